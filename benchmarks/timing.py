"""Utilities of the benchmarks: clocks, a stopwatch, a timer of training steps, components of a run."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra import compose, initialize_config_dir

from ragen_pl.assembly.build import RunComponents, assemble
from ragen_pl.checkpoints.folder import configured_run
from ragen_pl.config.paths import config_dir
from ragen_pl.run.train import open_run, quieten, warm_start

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` is the processor time of this process over all its threads, independent of other processes."""


class Stopwatch:
    """Seconds by name."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time a block."""
        began = self.clock()
        try:
            yield
        finally:
            self.seconds[part] += self.clock() - began

    def wrap(self, owner: object, method: str, *, part: str) -> None:
        """Time every later call of a method, or of a function of a module."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.timed(part):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds and reset them."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds


class StepTimer(pl.Callback):
    """Time the forward pass, backward pass and optimizer (including clipping) of every training step."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self._mark = self._step = 0.0

    def _lap(self, part: str) -> None:
        now = self.watch.clock()
        self.watch.seconds[part] += now - self._mark
        self._mark = now

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the time of a step."""
        self._mark = self._step = self.watch.clock()

    def on_before_backward(self, *_: Any) -> None:
        """Record the forward pass."""
        self._lap("forward")

    def on_after_backward(self, *_: Any) -> None:
        """Record the backward pass."""
        self._lap("backward")

    def on_train_batch_end(self, *_: Any) -> None:
        """Record the optimizer step."""
        self._lap("optimizer")
        self.watch.seconds["steps"] += self.watch.clock() - self._step


def build_components(overrides: Sequence[str]) -> RunComponents:
    """Build the components of a run from its config, without logger and callbacks."""
    warnings.filterwarnings("ignore")
    quieten()
    quiet = ["logger=none", "callbacks.progress=null", "callbacks.trajectories=null"]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return assemble(compose("fit", [*quiet, *overrides]))


def warm_started(overrides: Sequence[str], *, cache: str | None = None) -> RunComponents:
    """Build the components of a run and warm-start them, or load the weights cached in `cache`."""
    parts = build_components(overrides)
    cfg, cached = parts.cfg, Path(cache) / "ours.pt" if cache else None
    with tempfile.TemporaryDirectory() as root:
        cfg.paths.root = root
        run = configured_run(cfg)
        with open_run(cfg, run):
            if cached is not None and cached.exists():
                run.warm_start.write_bytes(cached.read_bytes())
                run = replace(run, resumed=True)
            warm_start(parts, run, False)
        if cached is not None and not cached.exists() and run.warm_start.exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            cached.write_bytes(run.warm_start.read_bytes())
    return parts


def use_threads(count: int) -> None:
    """Set the number of torch threads."""
    torch.set_num_threads(count)
