"""Where a run keeps what it makes, and how it is found again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

RUN_DIR = "RAGEN_PL_RUN_DIR"  # how the processes of one run agree on its folder


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder and the checkpoint that it goes on from."""

    folder: Path
    checkpoint: Path | None

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def last(self) -> Path:
        """The newest checkpoint, where there is one."""
        return self.checkpoints / "last.ckpt"

    @property
    def has_started(self) -> bool:
        """Whether the folder holds anything that a run has made, besides its config."""
        made = (self.warm_start, self.folder / "csv", self.folder / "mlflow_run.json")
        return any(path.exists() for path in made) or any(self.checkpoints.glob("*.ckpt"))

    @property
    def warm_start(self) -> Path:
        """The weights after the warm start."""
        return self.folder / "warm_start.pt"


def locate(*, root: str, name: str, run_dir: str | None, ckpt_path: str | None) -> Run:
    """Find or name the run's folder.

    `ckpt_path="last"` goes on in `run_dir`, or in the newest run of this name: from its last
    checkpoint, or from its beginning where none was written yet.

    Raises:
        FileNotFoundError: there is no such run or checkpoint.
    """
    inherited = os.environ.get(RUN_DIR)
    parent = Path(root).absolute() / name
    if ckpt_path not in (None, "last"):
        checkpoint = Path(str(ckpt_path)).absolute()
        if not checkpoint.exists():
            raise FileNotFoundError(
                f"ckpt_path={ckpt_path}: there is no such file; give a checkpoint's path, or last"
            )
        run = Path(run_dir) if run_dir else run_of(checkpoint) or checkpoint.parent.parent
        return Run(run.absolute(), checkpoint)
    if inherited:
        folder = Path(inherited)
    elif run_dir:
        folder = Path(run_dir).absolute()
    elif ckpt_path == "last":
        runs = sorted(parent.glob("*/config.yaml"), key=time_of)
        if not runs:
            raise FileNotFoundError(
                f"ckpt_path=last: there is no run in {parent}; start one without ckpt_path"
            )
        folder = runs[-1].parent
    else:
        folder = _unused(parent / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    if ckpt_path == "last" and not (folder / "config.yaml").exists():
        raise FileNotFoundError(f"ckpt_path=last: {folder} holds no run; give paths.run_dir of one")
    last = folder / "checkpoints" / "last.ckpt"
    return Run(folder, last if ckpt_path == "last" and last.exists() else None)


def time_of(config: Path) -> tuple[int, str]:
    """Return what runs are ordered by in time: when their config was written, which is never changed."""
    return config.stat().st_mtime_ns, str(config)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run that a checkpoint lies in, in `checkpoints/` or beside its config; None where it is alone."""
    folders = (checkpoint.parent.parent, checkpoint.parent)
    return next((folder for folder in folders if (folder / "config.yaml").exists()), None)


def _unused(folder: Path) -> Path:
    """Return the folder, numbered where another run of a sweep has taken its name."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}_{number}")
    return free


def share_with_children(folder: Path) -> None:
    """Let processes that this one starts (other ranks) use the same folder."""
    os.environ[RUN_DIR] = str(folder)


def forget_sharing() -> None:
    """End what `share_with_children` began, so that a later run in this process has its own folder."""
    os.environ.pop(RUN_DIR, None)
