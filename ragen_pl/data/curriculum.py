"""A curriculum: stages of initial states, each begun after enough success in those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragen_pl.checked import checked
from ragen_pl.constraints import Count, Fraction


@checked
@dataclass(kw_only=True)
class Curriculum:
    """Begin the next stage when mean sampled success in the present one exceeds `above`.

    All groups play the first stage. Later a fraction of them plays the present stage, and the others those before it in
    turn.

    Attributes:
        stages: reset options of each stage in order, none for the environment's own initial states:
            `[{}, {"min_distance": 3}]`.
        above: mean success over the last `window` iterations of a stage; a higher one begins the next stage.
        fraction: fraction of the groups that play the present stage.
        window: number of iterations to average.

    Raises:
        ValueError: there are fewer than two stages.
    """

    needs_trust = ()

    stages: Sequence[Mapping[str, object]]
    above: Fraction
    fraction: Fraction
    window: Count = 5

    def __post_init__(self) -> None:
        if len(self.stages) < 2:
            raise ValueError(f"stages: found {list(self.stages)}, expected two or more")
        self.history: list[float] = []
        self.starts: list[int] = []
        """First iteration of each stage after the first one."""

    def stage(self, iteration: int) -> int:
        """Return the number of an iteration's stage, from 0."""
        return sum(start <= iteration for start in self.starts)

    def observe(self, success: float, *, iteration: int) -> None:
        """Add an iteration's sampled success in its stage, which must be the same on every rank."""
        self.history = [*self.history, success][-self.window :]
        last = len(self.starts) == len(self.stages) - 1
        full = len(self.history) == self.window
        if full and not last and sum(self.history) / self.window > self.above:
            self.starts.append(iteration + 1)
            self.history = []

    def options_for(
        self, group: int, *, groups: int, iteration: int
    ) -> Mapping[str, object] | None:
        """Return the reset options of a group, None for the environment's own initial states."""
        stage = self.stage(iteration)
        if not self.plays_present_stage(group, groups=groups, iteration=iteration):
            stage = group % stage
        return self.stages[stage] or None

    def plays_present_stage(self, group: int, *, groups: int, iteration: int) -> bool:
        """Return whether a group plays the iteration's stage, and not an earlier one."""
        return group < self.fraction * groups or not self.stage(iteration)

    def state_dict(self) -> dict[str, object]:
        """Return the state that a resumed run needs."""
        return {"history": list(self.history), "starts": list(self.starts)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""
        self.history, self.starts = list(state["history"]), list(state["starts"])  # type: ignore[call-overload]
