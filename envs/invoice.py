"""Invoice checking: compare an invoice with its order and its delivery note, decide, and give the reason in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval

from .base import Probability, Reward, checked_arguments
from .tools import CALL_WORDS, ToolEnvironment, call_text, tool

ITEMS = ("lamp", "desk", "chair", "book", "shirt", "cable")
FIELDS = ("count", "price", "sum", "item")
Document = Literal["order", "delivery", "invoice"]
DOCUMENTS = ("order", "delivery", "invoice")
# a decision alone is a guess between two
_DECISION, _REASON = 0.3, 0.7


@dataclass(frozen=True, slots=True)
class Line:
    """Line of the three documents. `ordered`, `agreed` and `delivered` are 0 for an item that was not ordered."""

    item: str
    ordered: int
    agreed: int
    delivered: int
    count: int
    price: int
    sum: int

    def error(self) -> tuple[str, int | None] | None:
        """Return the wrong field with its right value, or None. The invoice has to bill what was delivered."""
        if not self.ordered:
            return "item", None
        if self.count != self.delivered:
            return "count", self.delivered
        if self.price != self.agreed:
            return "price", self.agreed
        if self.sum != self.count * self.price:
            return "sum", self.count * self.price
        return None


class Invoice(ToolEnvironment):
    """Open the documents, then accept the invoice or refuse it with the reason.

    ## Rewards
    `decision`: 0.3 for the right one, `-false_accept` for accepting a wrong invoice, 0 for refusing a right one.
    `reason`: 0.7 more if the reason of a right refusal names the item, the field and the right value, or that of a
    right acceptance nothing wrong; half of that for item and field without the value. `reading`: `-read_cost` for
    each document opened. A decision about documents that have not all been opened earns nothing.

    ## Trivial Policies
    Who opens all documents and always accepts, or always refuses with a guessed field of the first item, has success at
    most 0.4 and return at most 0.35 with the shipped settings.

    ## Episode End
    Terminated by a decision.

    ## Arguments
    - `lines`: number of items. `max_number`: largest count and price. `wrong_fraction`: fraction of wrong invoices.
    - `short_fraction`: fraction of lines of which less was delivered than ordered, which is no error of the invoice.
    - `false_accept`, `read_cost`: see Rewards.
    """

    needs_trust = ()

    rules = (
        "You check an invoice. Open the order, the delivery note and the invoice. The invoice is right if it bills "
        "the count that was delivered, at the price of the order, with sums that are count times price, and no item "
        "that was not ordered. Less may be delivered than was ordered. At most one field is wrong. Then decide: "
        "accept, with the reason ok, or refuse, with a reason that names the item, the wrong field (count, price, "
        "sum or item) and the right value; an item that was not ordered has no right value. The reason may name "
        "no other item, field or number."
    )

    frequent_words = (
        *CALL_WORDS, "open", "document", *DOCUMENTS, "decide", "verdict", "accept", "refuse", "reason",
        "check the", "lines", "read", "none", *FIELDS, *ITEMS,
    )  # fmt: skip

    @checked_arguments
    def __init__(
        self,
        *,
        lines: Annotated[int, Interval(ge=1, le=5)] = 2,
        max_number: Annotated[int, Interval(ge=2, le=99)] = 5,
        wrong_fraction: Probability = 0.6,
        short_fraction: Probability = 0.3,
        false_accept: Reward = 1.0,
        read_cost: Reward = 0.01,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(max_observation_length=1000, render_mode=render_mode)
        self.line_count, self.max_number = lines, max_number
        self.wrong_fraction, self.short_fraction = wrong_fraction, short_fraction
        self.false_accept, self.read_cost = false_accept, read_cost
        self.lines: list[Line] = []
        self.opened: list[str] = []

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Draw an order, a delivery, and an invoice that is right or has one wrong field."""
        self._begin(seed=seed, options=options)
        draw = self.np_random
        self.opened = []
        items = [str(item) for item in draw.permutation(ITEMS)[: self.line_count + 1]]
        self.lines = [self._draw_line(item) for item in items[:-1]]
        self.wrong_line: Line | None = None
        if draw.random() < self.wrong_fraction:
            self._spoil(items[-1])
        return f"check the invoice of {self.line_count} lines", {}

    @tool
    def open(self, document: Document) -> str:
        """Show one of the documents."""
        self.opened.append(document)
        self.reward(reading=-self.read_cost)
        if document == "order":
            parts = [f"{line.ordered} {line.item} at {line.agreed}" for line in self._ordered()]
        elif document == "delivery":
            parts = [f"{line.delivered} {line.item}" for line in self._ordered()]
        else:
            parts = [
                f"{line.count} {line.item} at {line.price} sum {line.sum}" for line in self.lines
            ]
        return f"{document}: {', '.join(parts)}"

    @tool
    def decide(self, verdict: Literal["accept", "refuse"], reason: str) -> str:
        """Accept or refuse the invoice and give the reason."""
        wrong, accepts = self.wrong_line, verdict == "accept"
        right = accepts == (wrong is None)
        loss = self.false_accept if accepts and not right else 0.0
        earns = right and self._read_all()
        score = self._score(reason) if earns else 0.0
        self.opened.append(verdict)
        self.end(success=score == 1, decision=_DECISION * earns - loss, reason=_REASON * score)
        return "closed"

    def describe(self) -> str:
        """Describe the opened documents: the documents, or the wrong field once all are open."""
        if not self._read_all():
            return f"read {' '.join(self._read()) or 'none'}"
        return self._finding()

    def state_key(self) -> str:
        """Return the documents and which have been opened."""
        return f"{[astuple(line) for line in self.lines]} {self.opened}"

    def difficulty(self) -> int:
        """Return 1 for a right invoice, 2 for one that a single document shows to be wrong, 3 for others."""
        if self.wrong_line is None:
            return 1
        error = self.wrong_line.error()
        return 2 if error is not None and error[0] == "sum" else 3

    def optimal_action(self, rng: np.random.Generator) -> str:
        """Open the documents in order, then decide."""
        unread = [document for document in DOCUMENTS if document not in self.opened]
        if unread:
            return call_text("open", document=unread[0])
        verdict = "accept" if self.wrong_line is None else "refuse"
        return call_text("decide", verdict=verdict, reason=self._finding())

    def argument_values(self, argument: str) -> list[Any]:
        """Return reasons with any item, field and number."""
        items, fields = sorted(ITEMS), FIELDS[:3]
        return ["ok", *(f"{item} {field} {self.max_number}" for item in items for field in fields)]

    def _ordered(self) -> list[Line]:
        return [line for line in self.lines if line.ordered]

    def _read(self) -> list[str]:
        return [document for document in DOCUMENTS if document in self.opened]

    def _read_all(self) -> bool:
        return len(self._read()) == len(DOCUMENTS)

    def _finding(self) -> str:
        if self.wrong_line is None or (error := self.wrong_line.error()) is None:
            return "ok"
        field, value = error
        return f"{self.wrong_line.item} {field}" + (f" {value}" if value is not None else "")

    def _score(self, reason: str) -> float:
        """Return the score of a reason: 1 if it is true, half without the value, nothing if anything else is named.

        A reason that names everything is no reason: items, fields and numbers have to be these and no others.
        """
        words = re.findall(r"[^\W_]+", reason.casefold())
        items = {word for word in words if word in ITEMS}
        fields = {word for word in words if word in FIELDS}
        numbers = {word for word in words if word.isdigit()}
        if self.wrong_line is None or (error := self.wrong_line.error()) is None:
            return float("ok" in words and not items | fields | numbers)
        field, value = error
        if "ok" in words or items != {self.wrong_line.item} or fields != {field}:
            return 0.0
        wanted = set() if value is None else {str(value)}
        if numbers == wanted:
            return 1.0
        return 0.0 if numbers else 0.5

    def _draw_line(self, item: str) -> Line:
        draw = self.np_random
        ordered, price = (int(number) for number in draw.integers(1, self.max_number + 1, 2))
        short = ordered > 1 and draw.random() < self.short_fraction
        delivered = int(draw.integers(1, ordered)) if short else ordered
        return Line(item, ordered, price, delivered, delivered, price, delivered * price)

    def _spoil(self, other: str) -> None:
        """Make one field wrong; the sum follows from the billed values, so that no other is."""
        draw = self.np_random
        place, field = int(draw.integers(self.line_count)), str(draw.choice(FIELDS))
        line = self.lines[place]
        if field == "item":
            count, price = (int(number) for number in draw.integers(1, self.max_number + 1, 2))
            wrong = Line(other, 0, 0, 0, count, price, count * price)
            self.lines.insert(place, wrong)
        elif field == "sum":
            shift = int(draw.choice([-1, 1])) if line.sum > 1 else 1
            wrong = replace(line, sum=line.sum + shift)
            self.lines[place] = wrong
        else:
            right = line.count if field == "count" else line.price
            values = [number for number in range(1, self.max_number + 1) if number != right]
            # What was ordered but not delivered is the likely error.
            likely = field == "count" and line.ordered != right
            value = line.ordered if likely else int(draw.choice(values))
            count, price = (value, line.price) if field == "count" else (line.count, value)
            wrong = replace(line, count=count, price=price, sum=count * price)
            self.lines[place] = wrong
        self.wrong_line = wrong
