"""What the benchmarks share: clocks, a stopwatch, the parts of a training step, a run built from its config."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra import compose, initialize_config_dir

from ragen_pl.config.paths import config_dir
from ragen_pl.run.build import RunComponents, assemble
from ragen_pl.run.train import open_run, quieten, warm_start

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` counts this process's own seconds over all its threads, whatever else the machine does."""


class Stopwatch:
    """Adds up seconds by name."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: object, method: str, *, part: str) -> None:
        """Time every call of a method (or a module's function) from here on."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[part] += self.clock() - began

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds so far and start again from nothing."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class StepTimer(pl.Callback):
    """Time forward, backward and optimizer (clipping included) of every training step."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self._mark = self._step = 0.0

    def _lap(self, part: str) -> None:
        now = self.watch.clock()
        self.watch.seconds[part] += now - self._mark
        self._mark = now

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin."""
        self._mark = self._step = self.watch.clock()

    def on_before_backward(self, *_: Any) -> None:
        """End the forward part."""
        self._lap("forward")

    def on_after_backward(self, *_: Any) -> None:
        """End the backward part."""
        self._lap("backward")

    def on_train_batch_end(self, *_: Any) -> None:
        """End the optimizer's part."""
        self._lap("optimizer")
        self.watch.seconds["steps"] += self.watch.clock() - self._step


def build_parts(overrides: Sequence[str]) -> RunComponents:
    """Build a run's parts from its config, without logger and callbacks."""
    warnings.filterwarnings("ignore")
    quieten()
    quiet = ["logger=none", "callbacks.progress=null", "callbacks.trajectories=null"]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return assemble(compose("fit", [*quiet, *overrides]))


def warm_started(overrides: Sequence[str], *, cache: str | None = None) -> RunComponents:
    """Build a run's parts and warm-start them, or load what `cache` kept of that."""
    parts = build_parts(overrides)
    cfg, kept = parts.cfg, Path(cache) / "ours.pt" if cache else None
    with tempfile.TemporaryDirectory() as root:
        cfg.paths.root = root
        run = open_run(cfg)
        if kept is not None and kept.exists():
            run.warm_start.write_bytes(kept.read_bytes())
            run = replace(run, resumed=True)
        warm_start(parts, run, False)
        if kept is not None and not kept.exists() and run.warm_start.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(run.warm_start.read_bytes())
    return parts


def use_threads(count: int) -> None:
    """Set the threads that torch computes with."""
    torch.set_num_threads(count)
