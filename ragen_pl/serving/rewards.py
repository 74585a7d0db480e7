"""Rewards of responses by their ids, which come from the program's result and over HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress


class ResponseRewards(dict[str, dict[str, float]]):
    """Parts of the rewards by id of the response and name of the part.

    Each part of a response has one value: different parts add up, and the same value again, as a client sends it that
    got no answer, changes nothing.
    """

    def give(self, call_id: str, reward: object) -> None:
        """Note the reward of a response, a number or named parts.

        Raises:
            ValueError: a number is not finite, or a part has another value already. Nothing is noted then.
        """
        known = self.get(call_id, {})
        parts = reward_parts(reward, f"rewards[{call_id}]")
        for part, value in parts.items():
            if known.get(part, value) != value:
                raise ValueError(
                    f"rewards[{call_id}] has {part}={known[part]:g} already, and {value:g} is given; other parts of "
                    'the reward have names, {"name": number}'
                )
        self[call_id] = known | parts


def reward_parts(reward: object, place: str) -> dict[str, float]:
    """Return the parts of a reward by name; that of a number is `program`.

    Args:
        reward: a JSON value.
        place: where it stands, for errors.

    Raises:
        ValueError: a number is not finite.
    """
    given = reward if isinstance(reward, Mapping) else {"program": reward}
    parts: dict[str, float] = {}
    for part, value in given.items():
        amount = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(OverflowError):
                amount = float(value)
        if not math.isfinite(amount):
            raise ValueError(f"{place} has {part}={value!r:.100}, expected a finite number")
        parts[str(part)] = amount
    return parts
