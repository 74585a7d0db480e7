"""Rewards of responses by their ids, which come from the program's result and over HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import repr as shortened

from ragen_pl.base.typed_json import typed_or_none
from ragen_pl.trajectory import MAX_REWARD

# parts of a reward, and their names, which become names of metrics (MLflow takes these characters)
_MAX_PARTS, _NAME = 64, re.compile(r"[\w./ :-]{1,100}")


class ResponseRewards(dict[str, dict[str, float]]):
    """Parts of the rewards by id of the response and name of the part.

    Each part of a response has one value: different parts add up, and the same value again, as a client sends it that
    got no answer, changes nothing.
    """

    def give(self, call_id: str, reward: object) -> None:
        """Note the reward of a response, a number or named parts.

        Raises:
            ValueError: A number is not finite, or a part has another value already. Nothing is noted then.
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
        reward: A JSON value.
        place: Where it stands, for errors.

    Raises:
        ValueError: A number is not finite, or too large to be added up; or a name is none, or there are too many.
    """
    given = reward if isinstance(reward, Mapping) else {"program": reward}
    parts: dict[str, float] = {}
    if len(given) > _MAX_PARTS:
        raise ValueError(f"{place} has {len(given)} parts, expected at most {_MAX_PARTS}")
    for part, value in given.items():
        if not _NAME.fullmatch(part):
            raise ValueError(
                f"{place} has a part named {part!r:.120}, expected 1 to 100 letters, digits, spaces and _ . - : /"
            )
        amount = typed_or_none(float, value)
        if amount is None or not abs(amount) < MAX_REWARD:
            raise ValueError(
                f"{place} has {part}={shortened(value)}, expected a finite number below {MAX_REWARD:g}"
            )
        parts[part] = amount
    return parts
