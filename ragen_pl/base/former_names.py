"""Names that modules had: in class paths of configurations, in imports, and in files that hold classes by name.

A former name gives the same module, so an environment is registered once. Where another project's package has the
top-level name `envs` or `visual_envs`, it is that package's.
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
_FOLDERS = {
    "agent_programs": ("programs", "serving"),
    "assembly": ("run.build", "run.component_checks", "run.start_check", "run.weights"),
    "base": (
        "access", "checked", "constraints", "data_url", "distributed", "error_text", "files", "finite",
        "foreign_files", "json_text", "machine", "phases", "prompt_formats", "rgb", "run_facts", "seeding",
        "stop_signals", "tensor_files", "viewing.records",
    ),
    "chat_formats": (
        "models.chat_template", "models.messages", "models.template_source", "models.tool_template",
        "prompts.tool_calls",
    ),
    "checkpoints": (
        "known_pickle", "lock", "rank_states", "run.checkpoint_check", "run.folder", "run.pickle_outline",
        "run.sharded_checkpoint", "run.starts",
    ),
    "config": ("run.start_settings", "run.trust"),
    "modules": ("muon", "optimizers"),
    "ranks": (
        "run.phase_limits", "run.rank_agreement", "run.rank_hub", "run.rank_limits", "run.rank_threads",
        "run.rank_watch", "run.ranks", "run.same_run",
    ),
    "tracking": (
        "run.checkpoints", "run.loggers", "run.mlflow_outbox", "run.more_loggers", "run.outbox",
    ),
}  # fmt: skip
MOVED = {
    **{
        name: f"{folder}.{name.rpartition('.')[2]}"
        for folder, names in _FOLDERS.items()
        for name in names
    },
    "programs": "agent_programs",
    "run.replaying": "replaying.step",
    "run.slurm": "slurm.job_file",
    "run.tracking": "tracking.mlflow_run",
}
"""Modules and packages by former name, both below `ragen_pl`."""
_HERE = Path(__file__).parents[1]
_ROOT = _HERE.resolve().parent


def current(name: str) -> str:
    """Return a dotted name as it is now.

    >>> current("envs.policies.OptimalPolicy"), current("ragen_pl.muon.MuonAdamW"), current("mine.Shop")
    ('ragen_pl.envs.policies.OptimalPolicy', 'ragen_pl.modules.muon.MuonAdamW', 'mine.Shop')
    """
    top, _, inner = name.partition(".")
    if top == "ragen_pl":
        parts = inner.split(".")
        for count in (1, 2):
            if (now := MOVED.get(".".join(parts[:count]))) is not None:
                return ".".join(["ragen_pl", now, *parts[count:]])
    elif top.partition(":")[0] in PACKAGES and _others(top.partition(":")[0]) is None:
        return f"ragen_pl.{name}"
    return name


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
        if top in PACKAGES and (others := _others(top)) is not None:
            return others if name == top else None
        if top not in (*PACKAGES, "ragen_pl") or (now := current(name)) == name:
            return None
        place = _HERE.joinpath(*now.split(".")[1:])
        if not (place.is_dir() or place.with_suffix(".py").is_file()):
            return None
        spec = spec_from_loader(name, _FormerName(now), is_package=place.is_dir())
        if spec is not None and place.is_dir():
            spec.submodule_search_locations = [str(place)]
        return spec


def install() -> None:
    """Let imports take former names. Once in a process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
