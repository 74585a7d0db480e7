"""Orders, requests and the policy of the support desk: what the policy forbids, and what it allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

ITEMS = ("lamp", "desk", "chair", "book", "shirt", "food")
CUSTOMERS = ("Kim", "Lee", "Ana", "Bob", "Eve", "Max")
CITIES = ("Rome", "Oslo", "Bern", "Lima")
REFUNDED, MOVED, REFUSED = "refunded", "moved", "refused"
MAX_DAY = 9


class Rule(StrEnum):
    """Rule of a policy, by the reason of a refusal."""

    LATE = "late"
    PRICE = "price"
    KIND = "kind"
    GIFT = "gift"
    CODE = "code"
    SENT = "sent"
    USED = "used"


_TEXTS = {
    Rule.LATE: "Refund until day {}.",
    Rule.PRICE: "Refund at most {}.",
    Rule.KIND: "No refund of {}.",
    Rule.GIFT: "No refund of gifts.",
    Rule.CODE: "First ask for the code.",
    Rule.SENT: "No move once sent.",
    Rule.USED: "Half for used.",
}
# a reason that may be given; half the price is no refusal
REASONS = frozenset(Rule) - {Rule.USED}


Policy = Mapping[Rule, int | str | None]
"""Number or item of each rule; None of a rule without one."""
Change = tuple[str, str, int | str]
"""Change in the database: refund or city, the order, and the amount or the new city."""


@dataclass(slots=True)
class Order:
    """Row of the orders. `day` counts from the delivery."""

    id: str
    customer: str
    item: str
    price: int
    day: int
    used: bool
    sent: bool
    gift: bool
    code: int

    def __str__(self) -> str:
        words = [self.id, self.customer, self.item, str(self.price), f"day {self.day}"]
        words += [word for word in ("used", "sent", "gift") if getattr(self, word)]
        return " ".join([*words, f"code {self.code}"])


@dataclass(slots=True)
class Request:
    """Request of the customer and its state. `city` is None for a refund."""

    item: str
    city: str | None
    code: int
    insists: bool
    day: int | None
    found: bool = False
    heard_code: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """Request to draw: its item, its city or None for a refund, and whether the policy allows it."""

    item: str
    city: str | None
    granted: bool


@dataclass(slots=True)
class Tables:
    """Changes in the database: the amount of a refund and the new city, by order."""

    refunds: dict[str, int] = field(default_factory=dict)
    cities: dict[str, str] = field(default_factory=dict)

    def entries(self) -> set[Change]:
        """Return all changes."""
        refunds = {("refund", order, amount) for order, amount in self.refunds.items()}
        return refunds | {("city", order, city) for order, city in self.cities.items()}


def policy_text(policy: Policy) -> str:
    """Return the rules in words."""
    return " ".join(_TEXTS[rule].format(value) for rule, value in policy.items())


def refund_amount(policy: Policy, order: Order) -> int:
    """Return the amount that a refund of an order has."""
    half = Rule.USED in policy and order.used
    return order.price // 2 if half else order.price


def wanted_change(policy: Policy, request: Request, order: Order) -> Change:
    """Return the change that the customer asks for, with the amount that the policy allows."""
    if request.city:
        return ("city", order.id, request.city)
    return ("refund", order.id, refund_amount(policy, order))


def broken_rules(
    policy: Policy, request: Request, order: Order, *, known: bool = False
) -> list[Rule]:
    """Return the rules that forbid a request.

    Args:
        policy: The policy.
        request: The request.
        order: The customer's order that it is about.
        known: Return only those that the clerk can know so far.
    """
    broken = {Rule.CODE: request.code != order.code}
    if request.city:
        broken[Rule.SENT] = order.sent
    else:
        amount = refund_amount(policy, order)
        # The default never forbids.
        broken[Rule.LATE] = order.day > int(policy.get(Rule.LATE) or MAX_DAY)
        broken[Rule.PRICE] = amount > int(policy.get(Rule.PRICE) or amount)
        broken[Rule.KIND] = order.item == policy.get(Rule.KIND)
        broken[Rule.GIFT] = order.gift
    if known and not request.heard_code:
        del broken[Rule.CODE]
    if known and not request.found:
        # only the item is in the request
        broken = {Rule.KIND: broken.get(Rule.KIND, False)}
    return [rule for rule in policy if broken.get(rule)]
