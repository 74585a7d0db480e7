"""A curriculum in two stages: harder initial states for a share of the groups after enough success."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ragen_pl.constraints import Count, Fraction, checked


@checked
@dataclass(kw_only=True)
class Curriculum:
    """Give a share of the groups harder initial states after mean sampled success first exceeds `above`.

    Attributes:
        above: mean success over the last `window` iterations; a higher one starts the second stage.
        share: share of the groups with harder initial states.
        options: reset options of these groups, such as `{"min_distance": 3}`.
        window: number of iterations to average.
    """

    above: Fraction
    share: Fraction
    options: Mapping[str, object]
    window: Count = 5

    def __post_init__(self) -> None:
        self.history: list[float] = []
        self.since: int | None = None

    def observe(self, success: float, *, iteration: int) -> None:
        """Add an iteration's sampled success, which must be the same on every rank."""
        self.history = [*self.history, success][-self.window :]
        full = len(self.history) == self.window
        if self.since is None and full and sum(self.history) / self.window > self.above:
            self.since = iteration + 1

    def options_for(
        self, group: int, *, groups: int, iteration: int
    ) -> Mapping[str, object] | None:
        """Return the reset options of a group, None for the environment's own."""
        hard = self.since is not None and iteration >= self.since and group < self.share * groups
        return self.options if hard else None

    def state_dict(self) -> dict[str, object]:
        """Return the state that a resumed run needs."""
        return {"history": list(self.history), "since": self.since}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""
        self.history, self.since = list(state["history"]), state["since"]  # type: ignore[call-overload, assignment]
