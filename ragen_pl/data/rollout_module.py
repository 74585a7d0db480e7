"""Protocols of the module that a RolloutDataModule collects trajectories for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.engines.protocol import RolloutEngine


class RolloutModule(Protocol):
    """Module that the DataModule collects trajectories for."""

    @property
    def global_step(self) -> int:
        """Number of optimizer steps taken, the version of the weights."""
        ...

    def rollout_engine(self) -> RolloutEngine:
        """Return the engine, with the policy's present weights as version `global_step`. All ranks call it."""
        ...

    def prepare(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """Fill in masks, values, advantages and returns."""


@runtime_checkable
class AsyncRolloutModule(RolloutModule, Protocol):
    """Module whose engine can sample a rollout while the module trains."""

    def async_rollout_engine(self, *, wait_for_rollout: Callable[[], None]) -> RolloutEngine:
        """Return the engine with the policy's present weights, for a rollout in another thread.

        Args:
            wait_for_rollout: Waits for the end of that rollout. The module calls it before it uses the engine again.

        Raises:
            ValueError: The engine can't sample while the policy trains, or the loss corrects for no older weights.
        """
        ...

    def prepare(self, batch: TrajectoryBatch, *, stale: bool = False) -> TrajectoryBatch:
        """Fill in masks, values, advantages and returns, as `RolloutModule.prepare`.

        Args:
            batch: Samples of an iteration.
            stale: Whether older weights have sampled some of them, which the loss then corrects for.
        """
