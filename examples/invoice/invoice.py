"""Checking an invoice against the order it bills: a small environment scored by rules.

It is an example of a workflow made into an environment, and knows nothing of the trainer. What it stands
for, and why its rewards are what they are, is told in docs/environments.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

FIELDS = ("count", "price", "sum")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an invoice: what was ordered and what is billed."""

    ordered: int
    agreed: int
    count: int
    price: int
    sum: int

    @classmethod
    def honest(cls, ordered: int, agreed: int) -> Line:
        """Return a line that bills what was ordered."""
        return cls(ordered, agreed, count=ordered, price=agreed, sum=ordered * agreed)

    def wrong(self) -> tuple[str, ...]:
        """Return the fields that do not agree: a sum is count times price, whatever these are."""
        agrees = (self.count == self.ordered, self.price == self.agreed)
        agrees += (self.sum == self.count * self.price,)
        return tuple(name for name, right in zip(FIELDS, agrees, strict=True) if not right)


class InvoiceCheck(gymnasium.Env[str, np.int64]):
    """Read an invoice line by line; accept it, or name the field that is wrong.

    ## Rewards
    1 for the right verdict; `-false_accept` for accepting a wrong invoice (money is lost), 0 for refusing
    a right one or for the wrong reason (somebody looks once more); each line read costs `read_cost`.

    ## Episode End
    Terminated by a verdict. `Next` on the last line changes nothing and costs the same.

    ## Arguments
    - `lines`: of an invoice. `wrong_share`: of the invoices, with one wrong field each.
    - `most`: the largest count and price. `false_accept`, `read_cost`: see Rewards.
    """

    action_names = ("Next", "Accept", "Count", "Price", "Sum")
    instructions = (
        "You check an invoice against its order, one line at a time. A line tells the count ordered and the "
        "price agreed, then the count, price and sum billed. Answer Next to read the next line, Accept when all "
        "lines agree, or the name of the field that is wrong: Count, Price or Sum. A sum is count times price."
    )

    def __init__(
        self,
        *,
        lines: int = 3,
        wrong_share: float = 0.5,
        most: int = 5,
        false_accept: float = 1.0,
        read_cost: float = 0.01,
    ) -> None:
        if lines < 1 or most < 2 or not 0 <= wrong_share <= 1:
            raise ValueError(
                f"found lines={lines}, most={most}, wrong_share={wrong_share}; "
                "expected at least 1, at least 2, and 0 to 1"
            )
        self.lines, self.wrong_share, self.most = lines, wrong_share, most
        self.false_accept, self.read_cost = false_accept, read_cost
        self.action_space = spaces.Discrete(len(self.action_names))
        self.observation_space = spaces.Text(max_length=80)
        self.invoice: list[Line] = []
        self.at = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Draw an order, and an invoice that bills it rightly or with one wrong field."""
        super().reset(seed=seed)
        draw = self.np_random
        orders = draw.integers(1, self.most + 1, (self.lines, 2)).tolist()
        self.invoice, self.at = [Line.honest(*order) for order in orders], 0
        if draw.random() < self.wrong_share:
            place = int(draw.integers(self.lines))
            self.invoice[place] = self._spoilt(self.invoice[place])
        return self._page(), {}

    def step(self, action: int | np.int64) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Read on, or give the verdict."""
        name = self.action_names[action].lower()
        if name == "next":
            moved = self.at + 1 < self.lines
            self.at += moved
            return self._page(), -self.read_cost, False, False, {"action_is_effective": moved}
        seen = {field for line in self.invoice[: self.at + 1] for field in line.wrong()}
        sound = not any(line.wrong() for line in self.invoice)
        right = sound if name == "accept" else name in seen
        loss = self.false_accept if name == "accept" else 0.0
        info = {"success": right, "action_is_effective": True}
        return self._page(), 1.0 if right else -loss, True, False, info

    def describe(self) -> str:
        """Return what is seen on this line: which fields agree. Not what to do about it."""
        wrong = self.invoice[self.at].wrong()
        found = " ".join(f"{name} {'off' if name in wrong else 'ok'}" for name in FIELDS)
        return f"{found}{' last' if self.at + 1 == self.lines else ''}"

    def state_key(self) -> str:
        """Return the invoice and the line that is open."""
        return f"{self.at} {[astuple(line) for line in self.invoice]}"

    def difficulty(self) -> int:
        """Return the lines that a careful reader has to read: up to the first wrong one."""
        wrong = [number for number, line in enumerate(self.invoice, 1) if line.wrong()]
        return wrong[0] if wrong else self.lines

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return the careful reader's action: name what is wrong, else read on, at the end accept."""
        seen = [field for line in self.invoice[: self.at + 1] for field in line.wrong()]
        if seen:
            return self.action_names.index(seen[0].capitalize())
        return self.action_names.index("Accept" if self.at + 1 == self.lines else "Next")

    def _page(self) -> str:
        line = self.invoice[self.at]
        return (
            f"line {self.at + 1} of {self.lines} order {line.ordered} at {line.agreed} "
            f"bill {line.count} at {line.price} sum {line.sum}"
        )

    def _spoilt(self, line: Line) -> Line:
        field = FIELDS[int(self.np_random.integers(len(FIELDS)))]
        value = getattr(line, field)
        most = self.most**2 if field == "sum" else self.most
        other = int(self.np_random.choice([n for n in range(1, most + 1) if n != value]))
        spoilt = replace(line, **{field: other})
        # one field is wrong, not two: the sum follows from what is billed
        return spoilt if field == "sum" else replace(spoilt, sum=spoilt.count * spoilt.price)


class HastyClerk:
    """The warm start's demonstrator: careful now and then, else any action at all.

    Args:
        care: share of the steps at which the line is really looked at.
    """

    def __init__(self, *, care: float = 0.3) -> None:
        self.care = care

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return an action index."""
        environment: Any = env.unwrapped
        if rng.random() < self.care:
            return int(environment.optimal_action(rng))
        return int(rng.integers(len(environment.action_names)))
