"""Composes and checks a configuration on import: forks have the signatures of its classes then."""

from ragen_pl.config.composition import composed

for environment in ("frozenlake", "frozenlake_visual"):
    composed("fit", {"env": environment})
