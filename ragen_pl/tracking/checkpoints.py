"""Resolve `ckpt=` to a checkpoint or a Hugging Face folder, and to the run that made it.

No weights are loaded here, and neither torch nor transformers is imported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_pl.base.constraints import shown
from ragen_pl.base.settings_files import SETTINGS, settings_of_weights
from ragen_pl.checkpoints.checkpoint_check import text_in
from ragen_pl.checkpoints.folder import Run, last_whole, run_of, time_of
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.own_files import is_own, run_settings
from ragen_pl.tracking.mlflow_run import RUN_DIR, RUN_FILE, check_reachable, known_run, tracking_uri

log = logging.getLogger(__name__)

EXPORTED = "ragen_pl.yaml"
"""Settings and origin of the weights, next to them in a folder that `ragen_pl.export` wrote."""
NEWEST = ("best", "last")
"""Values of `ckpt` that name a checkpoint of the newest run."""

# characters of a text that is shown
_LENGTH = 200
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_CHOICES = "a checkpoint, a run's folder, a Hugging Face folder, an MLflow run id, best or last"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Location of weights, and the run that made them."""

    path: Path
    run: Path | None
    """The run's folder, None if it is unknown or was deleted."""

    @property
    def is_folder(self) -> bool:
        """Whether it is a Hugging Face folder."""
        return self.path.is_dir()

    @property
    def folder(self) -> Path | None:
        """Folder that the weights come with: the model's or the run's; None for a file without."""
        return self.path if self.is_folder else self.run

    @property
    def settings_file(self) -> Path:
        """File of the config of the start that wrote the weights, which need not exist."""
        if self.is_folder:
            return self.path / EXPORTED
        return settings_of_weights(self.run or self.path, text_in(self.path, SETTINGS))

    def settings(self) -> dict[str, Any]:
        """Return the run's config, empty if the run is unknown.

        Raises:
            ConfigError: It cannot be read, or is not there.
        """
        if self.is_folder:
            settings = exported(self.path).get("settings", {})
        elif self.run is None:
            settings = {}
        elif not self.settings_file.exists():
            raise ConfigError(
                f"{self.path} was written with the settings {self.settings_file}, which are not there; copy the file "
                "from the run's folder too"
            )
        else:
            settings = run_settings(self.settings_file)
        if settings:
            _check_groups(settings, self.settings_file)
        return dict(settings)


def find_checkpoint(
    ckpt: str,
    *,
    root: str,
    name: str | None = None,
    run_dir: str | None = None,
    key: str = "ckpt",
) -> Checkpoint:
    """Resolve `ckpt` to a file or folder.

    Args:
        ckpt: A checkpoint's path, a run's folder, a Hugging Face folder, an MLflow run id, `best`, `last`.
        root: Folder of the runs.
        name: Environment of the newest run for `best` and `last`; None for any environment.
        run_dir: Run for `best` and `last`, or the run of a moved checkpoint.
        key: The setting that names it, for error messages.

    Raises:
        ConfigError: There is no such checkpoint.
    """
    if ckpt in NEWEST:
        run = _folder(run_dir) if run_dir else newest_run(root, name=name, which=ckpt)
        return Checkpoint(_in_run(run, which=ckpt), run)
    path = Path(ckpt).expanduser()
    if path.is_dir():
        path = path.absolute()
        if (path / "config.json").exists():
            return Checkpoint(path, _origin(path))
        if (path / "config.yaml").exists():
            return Checkpoint(_in_run(path, which="last"), path)
        raise ConfigError(
            f"{key}={ckpt}: the folder holds no model (config.json) and no run (config.yaml)"
        )
    if path.is_file():
        path = path.absolute()
        return Checkpoint(path, _folder(run_dir) if run_dir else run_of(path))
    if _RUN_ID.fullmatch(ckpt):
        run = _run_in_mlflow(ckpt, root=root)
        return Checkpoint(_in_run(run, which="last"), run)
    raise ConfigError(f"{key}={ckpt}: there is no such file or folder; give {_CHOICES}")


def newest_run(root: str, *, name: str | None, which: str) -> Path:
    """Return the newest run of an environment with a checkpoint `best` or `last`; without a best one, any with a last.

    Raises:
        ConfigError: There is no such run.
    """
    parent = Path(root).expanduser().absolute()
    for file in (f"{which}.ckpt", "last.ckpt"):
        found = parent.glob(f"{name or '*'}/*/checkpoints/{file}")
        runs = [path.parent.parent for path in found]
        runs = [run for run in runs if (run / "config.yaml").exists()]
        if runs:
            return max(runs, key=lambda run: time_of(run / "config.yaml"))
    place = f"{parent}/{name}" if name else str(parent)
    raise ConfigError(
        f"ckpt={which}: no run in {place} has a {which}.ckpt; train one, set paths.root=…, or give a checkpoint's path"
    )


def exported(folder: Path) -> dict[str, Any]:
    """Return the settings that `ragen_pl.export` wrote next to the weights, empty in another folder."""
    file = folder / EXPORTED
    return run_settings(file) if file.exists() else {}


def _check_groups(settings: Mapping[str, Any], file: Path) -> None:
    """Check that a run's config has the groups that a checkpoint is used with.

    Raises:
        ConfigError: One is missing or no group.
    """
    for names in (("env",), ("model",), ("model", "build")):
        group_of(settings, *names, file=file)
    for name in ("context", "rollout", "validation", "source"):
        group_of(settings, name, file=file, missing={})
    if settings["env"].get("kwargs"):
        group_of(settings, "env", "kwargs", file=file)


def group_of(
    settings: object, *names: str, file: Path, missing: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a group of settings in those of somebody else's file.

    Args:
        settings: What the file holds.
        names: Names that lead to the group.
        file: The file.
        missing: What stands for a group that is not there; None for an error.

    Raises:
        ConfigError: There is something else.
    """
    found: Any = settings
    for name in names:
        found = found.get(name, missing) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        place = ".".join(names)
        raise ConfigError(f"{file}: {place}={text_of(found)}: expected a group of settings")
    return found


def text_of(value: object) -> str:
    r"""Return a value of somebody else's file as a short text without control characters.

    >>> text_of(None), text_of("a\x1b[2J")
    ('null', 'a?[2J')
    """
    text = shown(value)
    short = f"{text[:_LENGTH]}…" if len(text) > _LENGTH else text
    return "".join(letter if letter.isprintable() else "?" for letter in short)


def _folder(run_dir: str) -> Path:
    run = Path(run_dir).expanduser().absolute()
    if not (run / "config.yaml").exists():
        raise ConfigError(f"paths.run_dir={run_dir}: expected a run's folder, with its config.yaml")
    return run


def _in_run(run: Path, *, which: str) -> Path:
    path = Run(run).checkpoints / f"{which}.ckpt"
    if path.exists():
        whole, problem = last_whole(Run(run), name=path.name)
        assert whole is not None
        if problem is not None:
            log.warning(f"{problem}; {whole.name}, the newest whole checkpoint, is used instead")
        return whole
    if which == "best" and (run / "checkpoints" / "last.ckpt").exists():
        log.warning(
            f"the run {run} has no best.ckpt: no validation of it ended; its last.ckpt is used"
        )
        return _in_run(run, which="last")
    raise ConfigError(
        f"the run {run} has no {which} checkpoint; train it further, or give another run"
    )


def _origin(folder: Path) -> Path | None:
    """Return the run that an exported folder names; somebody else's names none."""
    run = exported(folder).get("run_dir") if is_own(folder / EXPORTED) else None
    return Path(run) if run and (Path(run) / "config.yaml").exists() else None


def _run_in_mlflow(run_id: str, *, root: str) -> Path:
    """Return the folder of an MLflow run. It is searched under `root`, then in the tracking store."""
    for file in Path(root).expanduser().absolute().glob(f"*/*/{RUN_FILE}"):
        if known_run(file.parent).get("run_id") == run_id:
            return file.parent
    uri = tracking_uri(root)
    check_reachable(uri)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        raise ConfigError(
            f"ckpt={run_id}: there is no MLflow store {uri}; set paths.root or MLFLOW_TRACKING_URI"
        )
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        tags = MlflowClient(uri).get_run(run_id).data.tags
    except MlflowException as error:
        raise ConfigError(
            f"ckpt={run_id}: MLflow at {uri} knows no such run; set paths.root or MLFLOW_TRACKING_URI"
        ) from error
    run = tags.get(RUN_DIR)
    if not run:
        raise ConfigError(
            f"ckpt={run_id}: this MLflow run was not written by ragen_pl (it has no tag {RUN_DIR})"
        )
    if not (Path(run) / "config.yaml").exists():
        raise ConfigError(
            f"ckpt={run_id}: the run's folder {run} is gone or on another machine; give a checkpoint's path"
        )
    return Path(run)
