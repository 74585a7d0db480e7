"""Support desk: a customer asks for a refund or a new address, and a policy says what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval

from .base import Observation, Probability, Reward, checked_arguments
from .support_desk_policy import (
    CITIES,
    CUSTOMERS,
    ITEMS,
    MAX_DAY,
    MOVED,
    REASONS,
    REFUNDED,
    REFUSED,
    Change,
    Order,
    Request,
    Rule,
    Tables,
    Wanted,
    broken_rules,
    policy_text,
    refund_amount,
    wanted_change,
)
from .support_desk_user import (
    BYE,
    USER_RULES,
    Cue,
    User,
    instruction,
    numbers_of,
    plain_text,
    random_text,
    scripted_text,
    user_errors,
    user_state,
    words_of,
)
from .tools import ToolEnvironment, ToolError, call_text, tool

CLERK, CUSTOMER = 0, 1
"""Seats, where the customer is played by a policy."""
# draws of an order until its verdict is the wanted one, and of policies, of which some forbid nothing
_DRAWS = 30


class SupportDesk(ToolEnvironment):
    """Find the order, follow the policy, change the database, and tell the customer the outcome.

    ## Rewards
    A request is worth 1 / `requests`. `database`: half of it if the database is right when the customer has been told
    an outcome, but for a refusal only with a true reason: otherwise doing nothing would be rewarded. Minus
    `wrong_cost` of it for each wrong change, when it is made. `said`: half of it if the outcome told is the right one
    and true, minus `wrong_cost` of it if it is not.

    ## Trivial Policies
    A clerk who grants everything, and one who refuses everything by the first rule that concerns the request, have
    success at most 0.5 and return at most 0.45 with the shipped settings: the policy never has a single rule only, and
    somewhat more than half of the requests are to be refused.

    ## Episode End
    Terminated when the customer has been told the outcome of the last request; one in a seat of its own answers that.

    ## The Customer as a Seat
    With `user=seat` the clerk has seat 0, and a policy plays the customer in seat 1 (a simulated user). It sees its
    instruction and what the clerk says, and begins. Each of its turns has `info["user_errors"]`, see `UserError`, and
    costs it `user_error_cost` for each error. The clerk is judged by the customer's instruction, whatever was said. The
    episode ends with the customer's answer to the last outcome, or with its bye.

    ## Arguments
    - `rules`: largest number of rules in the policy, from 1 to 7; the number is drawn, from two on where there are two.
    - `requests`: number of requests. `orders`: number of customers with an order of the same item.
    - `move_fraction`: fraction of requests for a new address. `grant_fraction`: fraction of requests that are allowed.
    - `insist_fraction`: fraction of requests whose first refusal the customer does not accept.
    - `wrong_cost`: see Rewards.
    - `lie_fraction`: fraction of requests in which the customer gives a day, which may be wrong.
    - `user`: who plays the customer in training, `scripted` or `seat`. `validation_user`: the same in validation (the
      option `held_out` of a reset). `user_error_cost`: see above.
    """

    needs_trust = ()
    draws_held_out = True
    option_names = ("held_out",)
    user_seat = CUSTOMER

    rules = (
        "You work at a support desk. The policy comes first, then the customer's request. Find the order, check "
        "the policy, and change the database only as it allows. Then tell the customer the outcome with say: the "
        "word refunded and the amount, the word moved and the city, or the word refused and one reason out of "
        "late, price, kind, gift, code and sent. These words count wherever they occur. A refund is the full "
        "price, or half of it for a used item where the policy says so. Late is an order delivered more days ago "
        "than the policy allows. Where the policy asks for the code, say code to the customer, and compare it "
        "with the order's before you change anything. Rules about refunds do not concern a move, nor the rule "
        "about sent orders a refund. What the database says is true. Wrong changes cost reward."
    )

    frequent_words = (
        '{"name": "', '", "arguments": {"', '": "', '", "', '": ', '"}}', "}}", "my", "find", "refunded", "refund",
        "moved", "move", "say", "item", "order", "amount", "city", "text", "refused", "policy", "until", "day",
        "Refund", "at most", "No refund of", "No move once sent.", "First ask for the", "Half for used.", "used",
        "sent", "gifts", "gift", "late", "price", "kind", "code", "fine", "done", "unknown", "error", "paid", "goes to",
        *ITEMS, *CUSTOMERS, *CITIES, "A1",
        "10", "15", "20", "25", "30", "35", "40", "45", "50", "60", "70", "80", "90",
    )  # fmt: skip

    @checked_arguments
    def __init__(
        self,
        *,
        rules: Annotated[int, Interval(ge=1, le=7)] = 3,
        requests: Annotated[int, Interval(ge=1, le=6)] = 1,
        orders: Annotated[int, Interval(ge=1, le=6)] = 1,
        move_fraction: Probability = 0.25,
        grant_fraction: Probability = 0.5,
        insist_fraction: Probability = 0.0,
        lie_fraction: Probability = 0.0,
        wrong_cost: Reward = 0.5,
        user: User = User.SCRIPTED,
        validation_user: User = User.SCRIPTED,
        user_error_cost: Reward = 1.0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(max_observation_length=1000, render_mode=render_mode)
        self.max_rules, self.request_count, self.order_count = rules, requests, orders
        self.move_fraction, self.grant_fraction = move_fraction, grant_fraction
        self.insist_fraction, self.lie_fraction = insist_fraction, lie_fraction
        self.wrong_cost, self.user_error_cost = wrong_cost, user_error_cost
        self._users = (user, validation_user)
        self.user = user
        """Who plays the customer in the present episode."""
        self.mover = CLERK
        """Seat that is to move."""
        self.policy: dict[Rule, int | str | None] = {}
        self.orders: dict[str, Order] = {}
        self.requests: list[Request] = []
        self.tables = Tables()
        self.at = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Draw a policy, the database and the customer's requests."""
        options = self._begin(seed=seed, options=options)
        self.user = self._users[bool(options.get("held_out"))]
        draw = self.np_random
        self.customer = str(draw.choice(CUSTOMERS))
        self.tables = Tables()
        self.at, self._calls, self._harm, self._all_right = 0, 0, 0, True
        self._unchecked: set[int] = set()
        wanted = [
            Wanted(
                item=str(item),
                city=str(draw.choice(CITIES)) if draw.random() < self.move_fraction else None,
                granted=bool(draw.random() < self.grant_fraction),
            )
            for item in draw.choice(ITEMS, self.request_count, replace=False)
        ]
        for _ in range(_DRAWS):
            self.policy = self._draw_policy()
            self.orders, self.requests = {}, []
            verdicts = [self._draw_request(each) for each in wanted]
            if all(verdicts):
                break
        self.mover, self._cue = CLERK, Cue.REQUEST
        self._asked = self._solved = self._begun = False
        policy = f"policy: {policy_text(self.policy)}"
        if self.user is User.SCRIPTED:
            return f"{policy} {self._scripted(Cue.REQUEST)}", {}
        self.mover = CUSTOMER
        self._seen = [policy, instruction(self.customer, self.requests)]
        return self._seen[CUSTOMER], {}

    @property
    def seats(self) -> int:
        """Number of seats that the trainer plays."""
        return 1 if self.user is User.SCRIPTED else 2

    def to_move(self) -> int:
        """Return the seat that is to move; after the end, the one that moved last."""
        return self.mover

    def observe(self, seat: int) -> str:
        """Return what a seat saw last."""
        return self._seen[seat]

    def seat_instructions(self, seat: int) -> str | None:
        """Return the rules of the customer, who has no tools; None for the clerk's own."""
        return USER_RULES if seat == CUSTOMER else None

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Carry out a call of the clerk, or hear what a customer in a seat of its own says."""
        if self.user is User.SCRIPTED:
            return super().step(action)
        if self.mover == CUSTOMER:
            return self._hear(self._take_text(action))
        seen, reward, _, _, info = super().step(action)
        if self.mover == CLERK:
            self._seen[CLERK] = str(seen)
        del info["reward_parts"]
        return self._answer(CLERK, reward, info)

    def forfeit(self, seat: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """End the episode without an outcome, after a response without a valid action."""
        self._take_text("")
        self._over = True
        info: dict[str, Any] = {"action_is_valid": False, "action_is_effective": False}
        if self.user is User.SCRIPTED:
            return "", 0.0, True, False, info | {"success": False, "reward_parts": {}}
        return self._answer(seat, -self.user_error_cost if seat == CUSTOMER else 0.0, info)

    def _hear(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Pass on what the customer says, with its errors."""
        said = plain_text(text)
        words = words_of(said)
        info: dict[str, Any] = {"action_is_valid": bool(words), "action_is_effective": bool(words)}
        if not words:
            return self._answer(CUSTOMER, 0.0, info)
        at = min(self.at, self.request_count - 1)
        errors = user_errors(
            said,
            cue=self._cue,
            customer=self.customer,
            requests=self.requests,
            at=at,
            asked=self._asked,
        )
        self.requests[at].heard_code |= bool(numbers_of(words)[0])
        self._over = BYE in words or self._cue is Cue.END
        if not self._over:
            policy = "" if self._begun else f"{self._seen[CLERK]} "
            self.mover, self._begun = CLERK, True
            self._seen[CLERK] = f"{policy}{self.customer}: {said}"[: self.max_observation_length]
        info["user_errors"] = [str(error) for error in errors]
        return self._answer(CUSTOMER, -self.user_error_cost * len(errors), info)

    def _answer(
        self, seat: int, reward: float, info: dict[str, Any]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Return the result of a seat's step; both seats solve the task together."""
        rewards = [0.0, 0.0]
        rewards[seat] = reward
        info |= {
            "success": self._solved,
            "seat_rewards": rewards,
            "seat_success": [self._solved, self._solved],
        }
        return self._seen[self.mover], reward, self._over, False, info

    @tool
    def find(self, item: str) -> str:
        """List the orders of an item: order, customer, item, price, days since delivery, state and code."""
        orders = [str(order) for order in self.orders.values() if order.item == item]
        if not orders:
            raise ToolError("no such item")
        self._calls += 1
        # also for a later request: what was seen then is a true reason
        for request in self.requests[self.at :]:
            request.found |= request.item == item
        return ", ".join(orders)

    @tool
    def refund(self, order: str, amount: int) -> str:
        """Pay an amount back for an order; this cannot be undone."""
        row = self._order(order)
        if not 0 < amount <= row.price:
            raise ToolError(f"amount from 1 to {row.price}")
        if order in self.tables.refunds:
            raise ToolError("has a refund")
        self.tables.refunds[order] = amount
        self._changed()
        return f"paid {amount}"

    @tool
    def move(self, order: str, city: str) -> str:
        """Change the city that an order goes to."""
        self._order(order)
        if city not in CITIES:
            raise ToolError("no such city")
        if self.tables.cities.get(order) == city:
            raise ToolError("goes there")
        self.tables.cities[order] = city
        self._changed()
        return f"goes to {city}"

    @tool
    def say(self, text: str) -> str:
        """Speak to the customer: ask for the code, or tell the outcome."""
        self._calls += 1
        cue = self._told(words_of(text))
        if self.user is User.SCRIPTED:
            if cue is Cue.END:
                self.end(success=self._solved)
            return self._scripted(cue)
        self.mover, self._cue = CUSTOMER, cue
        self._asked |= cue is Cue.CODE
        self._seen[CUSTOMER] = f"clerk: {plain_text(text)}"[: self.max_observation_length]
        return ""

    def _told(self, words: list[str]) -> Cue:
        """Judge what the clerk says, and return what the customer has to answer."""
        outcomes = {word for word in words if word in (REFUNDED, MOVED, REFUSED)}
        request = self._request
        if not outcomes:
            return Cue.CODE if Rule.CODE in words else Cue.OTHER
        if outcomes == {REFUSED} and request.insists:
            request.insists = False
            return Cue.EXCEPTION
        self._decide(outcomes, words)
        return Cue.REQUEST if self.at < self.request_count else Cue.END

    def _scripted(self, cue: Cue) -> str:
        request = self._request
        request.heard_code |= cue is Cue.CODE
        return f"{self.customer}: {scripted_text(cue, request)}"

    def describe(self) -> str:
        """Describe the known facts of the request, or what a customer in a seat of its own has to answer."""
        request = self._request
        if self.mover == CUSTOMER:
            return user_state(self._cue, request)
        if not request.found:
            return f"{'move' if request.city else 'refund'} {request.item}"
        order = self.order_of(request)
        if broken := self.broken_rules(request, known=True):
            return f"{order.id} {broken[0]}"
        if Rule.CODE in self.policy and not request.heard_code:
            return f"{order.id} code unknown"
        if self._wanted(request) in self.tables.entries():
            return f"{order.id} done"
        return f"{order.id} fine {request.city or self._amount(order)}"

    def state_key(self) -> str:
        """Return the policy, the database, the requests, and the calls and decisions so far.

        Before a customer in a seat of its own has spoken it is that of the scripted one's episode, so that training
        with one of them can leave out the states of validation with the other.
        """
        orders = [astuple(order) for order in self.orders.values()]
        requests = [astuple(request) for request in self.requests]
        record = f"{sorted(self._unchecked)} {self._harm} {self._all_right}"
        key = f"{self.policy} {self.customer} {orders} {requests} {self.tables} {self.at} {self._calls} {record}"
        if self.user is User.SCRIPTED or not (self._begun or self._over):
            return key
        said = f"{self.mover} {self._cue} {self._asked} {self._solved} {self._begun} {self._seen}"
        return f"{key} {said}"

    def difficulty(self) -> int:
        """Return the number of rules of the policy."""
        return len(self.policy)

    def optimal_action(self, rng: np.random.Generator) -> str:
        """Return the next step of a clerk who follows the policy, or what the scripted customer says."""
        request = self._request
        if self.mover == CUSTOMER:
            return scripted_text(self._cue, request)
        if not request.found:
            return call_text("find", item=request.item)
        order = self.order_of(request)
        if broken := self.broken_rules(request, known=True):
            return call_text("say", text=f"{REFUSED} {broken[0]}")
        if Rule.CODE in self.policy and not request.heard_code:
            return call_text("say", text=str(Rule.CODE))
        amount = self._amount(order)
        if self._wanted(request) in self.tables.entries():
            outcome = f"{MOVED} {request.city}" if request.city else f"{REFUNDED} {amount}"
            return call_text("say", text=outcome)
        if request.city:
            return call_text("move", order=order.id, city=request.city)
        return call_text("refund", order=order.id, amount=amount)

    def random_action(self, rng: np.random.Generator) -> str:
        """Return a call of any tool, or something that a customer may say."""
        return random_text(rng) if self.mover == CUSTOMER else super().random_action(rng)

    def argument_values(self, argument: str) -> list[Any]:
        """Return items, orders, amounts, cities and things to say."""
        messages = [f"{REFUSED} {reason}" for reason in sorted(REASONS)]
        messages += [f"{MOVED} {city}" for city in CITIES] + [f"{REFUNDED} 20", str(Rule.CODE)]
        values: dict[str, list[Any]] = {
            "item": list(ITEMS),
            "order": list(self.orders),
            "amount": [10, 20, 30, 40],
            "city": list(CITIES),
            "text": messages,
        }
        return values[argument]

    def order_of(self, request: Request) -> Order:
        """Return the customer's order that a request is about."""
        orders = self.orders.values()
        return next(o for o in orders if o.item == request.item and o.customer == self.customer)

    def broken_rules(self, request: Request, *, known: bool = False) -> list[Rule]:
        """Return the rules that forbid a request; with `known` those that the clerk can know so far."""
        return broken_rules(self.policy, request, self.order_of(request), known=known)

    @property
    def _request(self) -> Request:
        return self.requests[min(self.at, len(self.requests) - 1)]

    def _order(self, name: str) -> Order:
        if name not in self.orders:
            raise ToolError("no such order")
        return self.orders[name]

    def _amount(self, order: Order) -> int:
        return refund_amount(self.policy, order)

    def _wanted(self, request: Request) -> Change:
        return wanted_change(self.policy, request, self.order_of(request))

    def _changed(self) -> None:
        """Charge for wrong changes as soon as they are made: a player who never ends pays too."""
        self._calls += 1
        if Rule.CODE in self.policy and not self._request.heard_code:
            self._unchecked.add(self.at)
        allowed = {
            self._wanted(request) for request in self.requests if not self.broken_rules(request)
        }
        harm = len(self.tables.entries() - allowed) + len(self._unchecked)
        self.reward(database=self.wrong_cost * (self._harm - harm) / self.request_count)
        self._harm = harm

    def _decide(self, outcomes: set[str], words: list[str]) -> None:
        request, half = self._request, 0.5 / self.request_count
        broken, order = self.broken_rules(request), self.order_of(request)
        done = {entry for entry in self.tables.entries() if entry[1] == order.id}
        right = done == (set() if broken else {self._wanted(request)})
        right = right and self.at not in self._unchecked
        reasons = {word for word in words if word in REASONS}
        if broken:
            known = set(self.broken_rules(request, known=True))
            true = outcomes == {REFUSED} and len(reasons) == 1 and reasons <= known
        elif request.city:
            cities = {city for city in CITIES if city.casefold() in words}
            true = outcomes == {MOVED} and cities == {request.city}
        else:
            amounts = {word for word in words if word.isdigit()}
            true = outcomes == {REFUNDED} and amounts == {str(self._amount(order))}
        true = true and right
        self._all_right &= true
        earned = half * (right and (true or not broken))
        loss = self.wrong_cost / self.request_count
        self.reward(database=earned, said=half if true else -loss)
        self.at += 1
        self._asked &= self.at == self.request_count
        self._solved = bool(self.at == self.request_count and self._all_right and not self._harm)

    def _draw_policy(self) -> dict[Rule, int | str | None]:
        draw = self.np_random
        count = int(draw.integers(min(2, self.max_rules), self.max_rules + 1))
        values: dict[Rule, int | str] = {
            Rule.LATE: int(draw.integers(3, MAX_DAY)),
            Rule.PRICE: int(draw.integers(2, 8)) * 10,
            Rule.KIND: str(draw.choice(ITEMS)),
        }
        chosen = draw.choice(list(Rule), count, replace=False)
        return {Rule(rule): values.get(Rule(rule)) for rule in chosen}

    def _draw_request(self, wanted: Wanted) -> bool:
        """Add a request and the orders of its item; return whether the policy's verdict is the wanted one."""
        draw, item = self.np_random, wanted.item
        others = [name for name in CUSTOMERS if name != self.customer]
        names = [self.customer, *draw.choice(others, self.order_count - 1, replace=False)]
        first = len(self.orders)
        ids = [f"A{number}" for number in range(first + 1, first + self.order_count + 1)]
        own, *rest = draw.permutation(ids).tolist()
        for name, customer in zip(rest, names[1:], strict=True):
            self.orders[name] = self._draw_order(name, str(customer), item)
        for _ in range(_DRAWS):
            self.orders[own] = order = self._draw_order(own, self.customer, item)
            code = order.code if draw.random() < 0.7 else int(draw.integers(1, 10))
            request = Request(item, wanted.city, code, False, None)
            right = bool(self.broken_rules(request)) != wanted.granted
            if right:
                break
        request.insists = bool(draw.random() < self.insist_fraction)
        if draw.random() < self.lie_fraction:
            request.day = int(draw.integers(1, order.day + 1))
        self.requests.append(request)
        self.orders = dict(sorted(self.orders.items()))
        return right

    def _draw_order(self, name: str, customer: str, item: str) -> Order:
        draw = self.np_random
        price, day, code = (int(draw.integers(1, 10)) for _ in range(3))
        used, sent, gift = (bool(draw.random() < chance) for chance in (0.5, 0.5, 0.3))
        return Order(name, customer, item, price * 10, day, used, sent, gift, code)
