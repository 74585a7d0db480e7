"""Folder of the configuration, and a check of the packages of environments."""

from __future__ import annotations

from pathlib import Path

import ragen_pl
from ragen_pl.base.former_names import PACKAGES
from ragen_pl.config.errors import ConfigError


def config_dir() -> Path:
    """Return the absolute path of the configuration.

    It is in the package when installed from a wheel, and next to it in a checkout or an editable install.

    Raises:
        ConfigError: There is none.
    """
    package = Path(ragen_pl.__file__).resolve().parent
    places = (package / "conf", package.parent / "conf")
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(
        f"no configuration found at {places[0]} or {places[1]}; install ragen_pl again "
        "(pip install -e . in its checkout)"
    )


def searched(directory: str | None) -> list[str]:
    """Return the override that adds a folder of the user to Hydra's search path (`--config-dir`)."""
    return [f"hydra.searchpath=[file://{Path(directory).resolve()}]"] if directory else []


def check_packages() -> None:
    """Check that the environments are there: folders in the package, or links to those of the checkout.

    Raises:
        ConfigError: They are not.
    """
    package = Path(ragen_pl.__file__).resolve().parent
    for name in PACKAGES:
        if not (package / name / "__init__.py").is_file():
            raise ConfigError(
                f"package ragen_pl.{name} not found at {package / name}; install ragen_pl again, or restore this link "
                "(git checkout in its checkout)"
            )
