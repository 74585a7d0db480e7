"""EnvironmentMixture: the environments of a run with several, each with its own manager and settings."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.environments.slot import EnvironmentSlot, EpisodeSpec, TurnResult
from ragen_pl.prompts.parsing import ParsedResponse

# of a wait for one of several managers in turn
_TICK_S = 0.001


class EnvironmentMixture(EnvironmentManager):
    """Managers by the names of their environments; an episode is played by that of `EpisodeSpec.environment`.

    It has no settings of its own: those of a slot are in the manager that `of` returns. All environments step at the
    same time, each in the threads of its manager.

    Args:
        managers: Managers by name.
    """

    def __init__(self, managers: Mapping[str, EnvironmentManager]) -> None:
        # the base's own state is that of the managers
        self.managers = dict(managers)

    @property
    def managers_by_name(self) -> Mapping[str, EnvironmentManager]:
        """The managers by name."""
        return self.managers

    def of(self, slot: EnvironmentSlot) -> EnvironmentManager:
        """Return the manager of a slot's environment."""
        return self._named(slot.spec)

    def _named(self, spec: EpisodeSpec) -> EnvironmentManager:
        try:
            return self.managers[spec.environment or ""]
        except KeyError:
            raise KeyError(
                f"found environment {spec.environment!r} in an episode's spec, expected one of "
                f"{', '.join(self.managers)}"
            ) from None

    def holding_out(self, keys: Collection[str]) -> EnvironmentManager:
        """Refuse: each environment holds out states of its own, see `with_held_out`."""
        raise TypeError("holding_out: a mixture has states of each environment; call with_held_out")

    def with_held_out(self, keys: Mapping[str, Collection[str]]) -> EnvironmentMixture:
        """Return a mixture of the same environments whose resets do not draw these initial states, by environment."""
        return EnvironmentMixture(
            {
                name: manager.holding_out(keys[name]) if name in keys else manager
                for name, manager in self.managers.items()
            }
        )

    @property
    def draws(self) -> tuple[int, int]:
        """Number of initial states drawn anew, and of episodes begun, in all environments."""
        managers = self.managers.values()
        return sum(one.redraws for one in managers), sum(one.resets for one in managers)

    def open(self, specs: Sequence[EpisodeSpec]) -> list[EnvironmentSlot]:
        """Return a slot at its first observation for each episode, in order."""
        slots: dict[int, EnvironmentSlot] = {}
        for manager in self.managers.values():
            numbers = [number for number, spec in enumerate(specs) if self._named(spec) is manager]
            opened = manager.open([specs[number] for number in numbers])
            slots |= zip(numbers, opened, strict=True)
        return [slots[number] for number in range(len(specs))]

    def start(
        self, slots: Sequence[EnvironmentSlot], responses: Sequence[ParsedResponse]
    ) -> list[int]:
        """Start to carry out one response in each environment; return the numbers of these turns."""
        numbers: dict[int, int] = {}
        for place, manager in enumerate(self.managers.values()):
            own = [number for number, slot in enumerate(slots) if self.of(slot) is manager]
            started = manager.start(
                [slots[number] for number in own], [responses[number] for number in own]
            )
            numbers |= zip(own, (self._joint(one, place) for one in started), strict=True)
        return [numbers[number] for number in range(len(slots))]

    def _joint(self, number: int, place: int) -> int:
        """Return a number of a manager's turn that no other manager's has."""
        return number * len(self.managers) + place

    def finished(self, *, wait_s: float | None = None) -> list[tuple[int, TurnResult]]:
        """Return the turns that have ended since the last call, each with its number.

        Args:
            wait_s: Longest time to wait for the first one in seconds; None waits until there is one.
        """
        until = None if wait_s is None else time.monotonic() + wait_s
        tick_s = 0.0
        while True:
            found = [
                (self._joint(number, place), result)
                for place, manager in enumerate(self.managers.values())
                for number, result in manager.finished(wait_s=tick_s)
            ]
            if found or (until is not None and time.monotonic() >= until):
                return found
            tick_s = _TICK_S

    def close(self, slots: Sequence[EnvironmentSlot]) -> None:
        """Keep usable environments for later episodes, and close the others."""
        for manager in self.managers.values():
            manager.close([slot for slot in slots if self.of(slot) is manager])
