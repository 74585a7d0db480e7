"""Environments of other libraries with images, each with an extra of its own. They are used by class path."""
