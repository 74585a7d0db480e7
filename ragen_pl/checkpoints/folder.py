"""A run's folder, and the search for it by later commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig

from ragen_pl.checkpoints.checkpoint_check import is_listed, newest_whole, problem_of

RUN_DIR = "RAGEN_PL_RUN_DIR"
"""Environment variable by which the processes of one run share its folder."""

_CHECKPOINT = "RAGEN_PL_RUN_CHECKPOINT"


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder and the checkpoint that it continues from."""

    folder: Path
    checkpoint: Path | None = None
    resumed: bool = False
    """Whether the folder's earlier state is continued, from its warm start if there is no checkpoint."""
    passed_over: str | None = None
    """A newer checkpoint that is not whole, and what is wrong with it."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def last(self) -> Path:
        """Path of the newest checkpoint."""
        return self.checkpoints / "last.ckpt"

    @property
    def warm_start(self) -> Path:
        """Path of the weights after the warm start."""
        return self.folder / "warm_start.pt"

    @property
    def warm_start_checkpoint(self) -> Path:
        """Path of the checkpoint of an unfinished warm start."""
        return self.folder / "warm_start.ckpt"

    @property
    def has_initial_weights(self) -> bool:
        """Whether the run continues from weights that its warm start has written."""
        return self.resumed and self.warm_start.exists()

    @property
    def has_started(self) -> bool:
        """Whether the folder holds results of a run, besides its config."""
        results = (
            self.warm_start,
            self.warm_start_checkpoint,
            self.folder / "csv",
            self.folder / "mlflow_run.json",
        )
        return any(path.exists() for path in results) or any(self.checkpoints.glob("*.ckpt"))


def configured_run(cfg: DictConfig, *, make: bool = False) -> Run:
    """Find or name the folder of a config's run, as `locate` does."""
    return locate(
        root=cfg.paths.root,
        name=cfg.env.name,
        run_dir=cfg.paths.run_dir,
        ckpt_path=cfg.ckpt_path,
        make=make,
    )


def locate(
    *, root: str, name: str, run_dir: str | None, ckpt_path: str | None, make: bool = False
) -> Run:
    """Find or name the run's folder.

    `ckpt_path` is a checkpoint's path, or one of

    - None: a new run, in `run_dir` or a folder named after the time;
    - `"last"`: the run in `run_dir`, or the newest one of this name, continued from its last
      whole checkpoint, or from its warm start if there is none;
    - `"auto"`: the run in `run_dir`, continued if it has started, else started.

    Args:
        root: Folder of all runs.
        name: Name of the environment.
        run_dir: Folder of the run, None to find or name it.
        ckpt_path: See above.
        make: Make a folder named after the time, so that a run that starts in the same second gets another one.

    Raises:
        FileNotFoundError: There is no such run or checkpoint, or `"auto"` has no `run_dir`.
    """
    if ckpt_path not in (None, "last", "auto"):
        return _run_with_checkpoint(str(ckpt_path), run_dir=run_dir)
    parent = Path(root).expanduser().absolute() / name
    folder = _folder(parent, run_dir=run_dir, ckpt_path=ckpt_path, make=make)
    if ckpt_path == "last" and not (folder / "config.yaml").exists():
        raise FileNotFoundError(
            f"ckpt_path=last: {folder} holds no run; set paths.run_dir to a run's folder, or "
            "ckpt_path=auto to start one there"
        )
    run = Run(folder)
    if ckpt_path is None or (ckpt_path == "auto" and not run.has_started):
        return run
    if is_launched() and (chosen := os.environ.get(_CHECKPOINT)) is not None:
        # the process that has launched this one has checked it
        return Run(folder, Path(chosen), resumed=True)
    checkpoint, passed_over = last_whole(run)
    return Run(folder, checkpoint, resumed=True, passed_over=passed_over)


def last_whole(run: Run, *, name: str = "last.ckpt") -> tuple[Path | None, str | None]:
    """Return a run's checkpoint of a name, or its newest whole one where that is not whole or not there.

    Returns:
        The checkpoint, None if there is none; and what is wrong with the one of the name if another one is taken. The
        one of the name is returned where no checkpoint is whole.
    """
    named = run.checkpoints / name
    alone = outside_processes() == 1
    is_there = is_listed(named)
    problem = problem_of(named, folders=alone) if is_there else f"{named} is not there"
    if problem is None:
        return named, None
    others = (file for file in run.checkpoints.glob("*.ckpt") if file != named)
    whole = newest_whole(others, folders=alone)
    if whole is None:
        return named if is_there else None, None
    return whole, problem


def time_of(config: Path) -> tuple[int, str]:
    """Return the sort key of runs by time: when their config was written. It is never changed."""
    return config.stat().st_mtime_ns, str(config)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run that a checkpoint is in, in `checkpoints/` or next to its config, else None."""
    folders = (checkpoint.parent.parent, checkpoint.parent)
    return next((folder for folder in folders if (folder / "config.yaml").exists()), None)


def is_launched() -> bool:
    """Return whether another process of the same run has started this one."""
    return RUN_DIR in os.environ


@contextmanager
def sharing_with_children(folder: Path, *, checkpoint: Path | None = None) -> Iterator[None]:
    """Let the processes that this one starts in the block (other ranks) use the same folder and checkpoint."""
    os.environ[RUN_DIR] = str(folder)
    if checkpoint is not None:
        os.environ[_CHECKPOINT] = str(checkpoint)
    try:
        yield
    finally:
        # a later run in this process has a folder of its own
        for name in (RUN_DIR, _CHECKPOINT):
            os.environ.pop(name, None)


def outside_processes() -> int:
    """Return the number of processes that torchrun or srun started, 1 without them."""
    return max(int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "SLURM_NTASKS"))


def _run_with_checkpoint(ckpt_path: str, *, run_dir: str | None) -> Run:
    checkpoint = Path(ckpt_path).expanduser().absolute()
    if not checkpoint.exists():
        raise FileNotFoundError(
            f"ckpt_path={ckpt_path}: there is no such file; give a checkpoint's path, last or auto"
        )
    folder = Path(run_dir or run_of(checkpoint) or checkpoint.parent.parent)
    return Run(folder.expanduser().absolute(), checkpoint, resumed=True)


def _folder(parent: Path, *, run_dir: str | None, ckpt_path: str | None, make: bool) -> Path:
    inherited = os.environ.get(RUN_DIR)
    if inherited:
        return Path(inherited)
    if run_dir:
        return Path(run_dir).expanduser().absolute()
    if ckpt_path == "auto":
        # jobs that run at the same time would take each other's newest run
        raise FileNotFoundError(
            "ckpt_path=auto: expected paths.run_dir, the folder to start or continue the run in; set it"
        )
    if ckpt_path == "last":
        return _newest(parent)
    return make_time_stamped(parent) if make else time_stamped(parent)


def _newest(parent: Path) -> Path:
    configs = sorted(parent.glob("*/config.yaml"), key=time_of)
    if not configs:
        raise FileNotFoundError(
            f"ckpt_path=last: there is no run in {parent}; start one without ckpt_path"
        )
    return configs[-1].parent


def time_stamped(parent: Path) -> Path:
    """Return a new folder named after the time, with a number if its name is taken, as in a sweep."""
    folder = parent / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    number, candidate = 1, folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}_{number}")
    return candidate


def make_time_stamped(parent: Path) -> Path:
    """Make and return a `time_stamped` folder: a process that starts in the same second gets another one."""
    while True:
        with suppress(FileExistsError):
            folder = time_stamped(parent)
            folder.mkdir(parents=True)
            return folder
