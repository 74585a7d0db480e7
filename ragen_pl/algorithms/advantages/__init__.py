"""Advantage estimators, one idea a file: a formula as a pure function, and the class that a config names."""
