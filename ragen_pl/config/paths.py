"""Folder of the configuration, and a check of the top-level packages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import ragen_pl
from ragen_pl.config.errors import ConfigError

_OURS = ("envs", "visual_envs")


def config_dir() -> Path:
    """Return the absolute path of the configuration.

    It is in the package when installed from a wheel, and next to it in a checkout or an editable install.

    Raises:
        ConfigError: there is none.
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
    """Check that `envs` and `visual_envs` are packages of this project.

    Raises:
        ConfigError: another package of that name comes first on the path, or there is none.
    """
    home = Path(ragen_pl.__file__).resolve().parent.parent
    for name in _OURS:
        spec = find_spec(name)
        places = list(spec.submodule_search_locations or [str(spec.origin)]) if spec else []
        if not places:
            raise ConfigError(f"package {name!r} not found; expected it at {home / name}")
        if home / name not in [Path(str(place)).resolve() for place in places]:
            raise ConfigError(
                f"package {name!r} is another project's: found {places[0]}, expected {home / name}; "
                "run from another folder, or remove that one from PYTHONPATH"
            )
