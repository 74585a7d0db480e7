"""Top-level names `envs` and `visual_envs`, which `ragen_pl.envs` and `ragen_pl.visual_envs` had.

A class path or an import with a former name gives the same modules, so an environment is registered once. Where
another project's package has the name, it is that package's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

PACKAGES = ("envs", "visual_envs")
_HERE = Path(__file__).parent
_ROOT = _HERE.resolve().parent


def current(name: str) -> str:
    """Return a dotted name as it is now: one that begins with a former name begins with `ragen_pl`.

    >>> current("envs.policies.OptimalPolicy"), current("mine.Shop")
    ('ragen_pl.envs.policies.OptimalPolicy', 'mine.Shop')
    """
    top = name.partition(".")[0].partition(":")[0]
    return f"ragen_pl.{name}" if top in PACKAGES and _others(top) is None else name


def _others(top: str) -> ModuleSpec | None:
    """Return the spec of another project's package with a former name; None if there is none."""
    loaded = sys.modules.get(top)
    if loaded is not None:
        return None if loaded.__name__ == f"ragen_pl.{top}" else loaded.__spec__
    own = (_HERE / top).resolve()
    # the checkout's folder is on the path of an editable install, maybe before the others
    spec = PathFinder.find_spec(top, [p for p in sys.path if Path(p, top).resolve() != own])
    if spec is None or spec.origin is not None:
        return spec
    # a folder without __init__.py, such as one of the checkout's tests
    places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    return None if all(place.is_relative_to(_ROOT) for place in places) else spec


class _FormerName(Loader):
    """Loader of a module's former name: the module itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        module = import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is: only its spec was replaced."""
        module.__spec__ = self.spec


class _Finder(MetaPathFinder):
    """Finder of modules by their former names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module's former name, or of another project's package; None for any other name."""
        top = name.partition(".")[0]
        if top not in PACKAGES:
            return None
        if (others := _others(top)) is not None:
            return others if name == top else None
        place = _HERE.joinpath(*name.split("."))
        if not (place.is_dir() or place.with_suffix(".py").is_file()):
            return None
        spec = spec_from_loader(name, _FormerName(f"ragen_pl.{name}"), is_package=place.is_dir())
        if spec is not None and place.is_dir():
            spec.submodule_search_locations = [str(place)]
        return spec


def install() -> None:
    """Let imports take former names. Once in a process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
