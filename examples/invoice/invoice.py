"""Environment for checking an invoice against its order, scored by rules.

It is an example of a workflow as an environment and does not depend on the trainer. docs/environments.md
explains its rewards.
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
    """Line of an invoice, with the ordered and the billed values."""

    ordered: int
    agreed: int
    count: int
    price: int
    sum: int

    @classmethod
    def correct(cls, ordered: int, agreed: int) -> Line:
        """Return a line that bills the order correctly."""
        return cls(ordered, agreed, count=ordered, price=agreed, sum=ordered * agreed)

    def wrong(self) -> tuple[str, ...]:
        """Return the names of the wrong fields. A sum is right if it is count times price."""
        is_right = (self.count == self.ordered, self.price == self.agreed)
        is_right += (self.sum == self.count * self.price,)
        return tuple(name for name, right in zip(FIELDS, is_right, strict=True) if not right)


class InvoiceCheck(gymnasium.Env[str, np.int64]):
    """Read an invoice line by line, then accept it or name the wrong field.

    ## Rewards
    1 for the correct decision, `-false_accept` for accepting a wrong invoice (a loss of money), 0 for refusing
    a right one or for the wrong reason (a second check). Each line read costs `read_cost`.

    ## Episode End
    Terminated by a decision. `Next` on the last line has no effect and costs the same.

    ## Arguments
    - `lines`: number of lines. `wrong_fraction`: fraction of invoices with one wrong field.
    - `max_number`: largest count and price. `false_accept`, `read_cost`: see Rewards.
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
        wrong_fraction: float = 0.5,
        max_number: int = 5,
        false_accept: float = 1.0,
        read_cost: float = 0.01,
    ) -> None:
        if lines < 1 or max_number < 2 or not 0 <= wrong_fraction <= 1:
            raise ValueError(
                f"found lines={lines}, max_number={max_number}, wrong_fraction={wrong_fraction}; "
                "expected at least 1, at least 2, and 0 to 1"
            )
        self.lines, self.wrong_fraction, self.max_number = lines, wrong_fraction, max_number
        self.false_accept, self.read_cost = false_accept, read_cost
        self.action_space = spaces.Discrete(len(self.action_names))
        self.observation_space = spaces.Text(max_length=80)
        self.invoice: list[Line] = []
        self.at = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Draw an order, and an invoice that is right or has one wrong field."""
        super().reset(seed=seed)
        draw = self.np_random
        orders = draw.integers(1, self.max_number + 1, (self.lines, 2)).tolist()
        self.invoice, self.at = [Line.correct(*order) for order in orders], 0
        if draw.random() < self.wrong_fraction:
            place = int(draw.integers(self.lines))
            self.invoice[place] = self._with_error(self.invoice[place])
        return self._page(), {}

    def step(self, action: int | np.int64) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Read the next line, or end with a decision."""
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
        """Describe the current line: which fields are right."""
        wrong = self.invoice[self.at].wrong()
        fields = " ".join(f"{name} {'off' if name in wrong else 'ok'}" for name in FIELDS)
        return f"{fields}{' last' if self.at + 1 == self.lines else ''}"

    def state_key(self) -> str:
        """Return the invoice and the index of the current line."""
        return f"{self.at} {[astuple(line) for line in self.invoice]}"

    def difficulty(self) -> int:
        """Return the number of lines up to the first wrong one, or all lines."""
        wrong = [number for number, line in enumerate(self.invoice, 1) if line.wrong()]
        return wrong[0] if wrong else self.lines

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return the wrong field if it has been read, else Next, and Accept on the last line."""
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

    def _with_error(self, line: Line) -> Line:
        field = FIELDS[int(self.np_random.integers(len(FIELDS)))]
        value = getattr(line, field)
        highest = self.max_number**2 if field == "sum" else self.max_number
        other = int(self.np_random.choice([n for n in range(1, highest + 1) if n != value]))
        wrong_line = replace(line, **{field: other})
        # The sum follows from the billed values, so exactly one field is wrong.
        return (
            wrong_line
            if field == "sum"
            else replace(wrong_line, sum=wrong_line.count * wrong_line.price)
        )


class HastyClerk:
    """Demonstrator that acts optimally with probability `care` and at random otherwise.

    Args:
        care: Probability of an optimal action.
    """

    def __init__(self, *, care: float = 0.3) -> None:
        self.care = care

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return an action index."""
        environment: Any = env.unwrapped
        if rng.random() < self.care:
            return int(environment.optimal_action(rng))
        return int(rng.integers(len(environment.action_names)))
