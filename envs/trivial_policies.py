"""Trivial policies, whose reward is the least that an agent has to exceed.

They answer nothing, always the same or in a cycle, or follow the first habit that comes to mind, such as granting
every request. The class docstring of each environment says what they earn at most with the shipped settings.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import gymnasium
import numpy as np

from .base import call_text, checked_arguments


class Choice(StrEnum):
    """Result that a buyer takes without a look at the request."""

    CHEAPEST = "cheapest"
    DEAREST = "dearest"
    BEST = "best"
    FIRST = "first"


class Verdict(StrEnum):
    """Decision about an invoice."""

    ACCEPT = "accept"
    REFUSE = "refuse"


class NoAnswer:
    """Policy whose responses have no valid action."""

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Return an empty answer."""
        return ""


class Constant:
    """Policy that always gives the same answer.

    Args:
        action: Name or index of an action, or a free text. Its fields in braces are numbers of the question: for
            `reach 8 with 2 3 3`, `{1} + {2}` stands for `2 + 3`.
    """

    needs_trust = ()

    def __init__(self, *, action: str | int) -> None:
        self.action = action

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
        """Return the answer."""
        return _action(env, self.action)


class Cycle:
    """Policy that takes the same actions in turn, whatever the observation.

    Args:
        actions: Names of actions, or free texts.
        otherwise: Names of the actions to take in this order where the one in turn changes nothing. None to take it
            nevertheless.
    """

    needs_trust = ()

    def __init__(self, *, actions: Sequence[str], otherwise: Sequence[str] | None = None) -> None:
        self.actions, self.otherwise = list(actions), otherwise

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
        """Return the action of the present step."""
        environment: Any = env.unwrapped
        place = environment.steps % len(self.actions)
        names = [*self.actions[place:], *self.actions[:place], *(self.otherwise or ())]
        if self.otherwise is None:
            return _action(env, names[0])
        effective = (name for name in names if _is_effective(environment, _action(env, name)))
        return _action(env, next(effective, names[0]))


def _before_the_decision(desk: Any, rng: np.random.Generator) -> str | None:
    """Return the step before a decision, or the customer's line in the customer's seat; None if all is known."""
    from .support_desk_policy import Rule

    if desk.to_move() == desk.user_seat:
        return str(desk.optimal_action(rng))
    request = desk.requests[desk.at]
    if not request.found:
        return call_text("find", item=request.item)
    if Rule.CODE in desk.policy and not request.heard_code:
        return call_text("say", text=str(Rule.CODE))
    return None


class GrantAll:
    """Clerk at the support desk who grants every request, whatever the policy forbids.

    In the customer's seat it says what the scripted customer says.
    """

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Find the order, ask for a code that the policy names, change the database, and tell the outcome."""
        from .support_desk_policy import MOVED, REFUNDED, Rule

        desk: Any = env.unwrapped
        if (preparation := _before_the_decision(desk, rng)) is not None:
            return preparation
        request = desk.requests[desk.at]
        order = _order(desk, request)
        if request.city:
            if desk.tables.cities.get(order.id) == request.city:
                return call_text("say", text=f"{MOVED} {request.city}")
            return call_text("move", order=order.id, city=request.city)
        half = Rule.USED in desk.policy and order.used
        amount = order.price // 2 if half else order.price
        if order.id in desk.tables.refunds:
            return call_text("say", text=f"{REFUNDED} {amount}")
        return call_text("refund", order=order.id, amount=amount)


class RefuseAll:
    """Clerk at the support desk who refuses every request by the first rule of the policy that concerns it.

    In the customer's seat it says what the scripted customer says.
    """

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Find the order, ask for a code that the policy names, and refuse."""
        from .support_desk_policy import REFUSED, Rule

        desk: Any = env.unwrapped
        if (preparation := _before_the_decision(desk, rng)) is not None:
            return preparation
        request = desk.requests[desk.at]
        known = [rule for rule in desk.policy if rule is not Rule.USED]
        fitting = [rule for rule in known if (rule is Rule.SENT) == (request.city is not None)]
        return call_text("say", text=f"{REFUSED} {(fitting or known or list(Rule))[0]}")


class Buy:
    """Buyer in the web shop who searches for all words, and compares neither price nor stars with the request.

    Args:
        choice: Result to buy: the cheapest, the dearest, the best rated or the first one below the advertisement.
    """

    needs_trust = ()

    @checked_arguments
    def __init__(self, *, choice: Choice = Choice.CHEAPEST) -> None:
        self.choice = choice

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Search, open the result, choose the options that were asked for, and buy."""
        shop: Any = env.unwrapped
        if shop.opened is not None:
            for option, value in shop.request.options.items():
                if shop.chosen.get(option) != value and value in shop.opened.options[option]:
                    return call_text("choose", option=option, value=value)
            return call_text("buy")
        if not shop.results:
            return call_text("search", query=shop.request.query())
        _, *results = [shop.products[id] for id in shop.results]
        chosen = {
            Choice.CHEAPEST: min(results, key=lambda product: product.price),
            Choice.DEAREST: max(results, key=lambda product: product.price),
            Choice.BEST: max(results, key=lambda product: product.stars),
            Choice.FIRST: results[0],
        }[self.choice]
        return call_text("open", item=chosen.id)


class Decide:
    """Clerk who opens the order, the delivery note and the invoice, and always decides the same.

    Args:
        verdict: Accept or refuse.
        field: The wrong field to name in a refusal, of the first item of the invoice.
    """

    needs_trust = ()

    @checked_arguments
    def __init__(self, *, verdict: Verdict, field: str = "count") -> None:
        self.verdict, self.field = verdict, field

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Open the next document, or decide."""
        clerk: Any = env.unwrapped
        for document in ("order", "delivery", "invoice"):
            if document not in clerk.opened:
                return call_text("open", document=document)
        reason = "ok" if self.verdict is Verdict.ACCEPT else f"{clerk.lines[0].item} {self.field}"
        return call_text("decide", verdict=self.verdict, reason=reason)


class ReadOne:
    """Reader of the knowledge base who opens the first result of one search, and answers from it."""

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Search for the entity, read the first result, and answer with its value of the relation asked for."""
        reader: Any = env.unwrapped
        entity, relation = reader.chain[0][0], reader.chain[-1][1]
        page = reader.wiki.search(entity, count=1)[0]
        if page.id not in reader.shown:
            return call_text("search", query=entity)
        if page.id not in reader.read_ids:
            return call_text("read", page=page.id)
        text = page.states.get((entity, relation)) or next(iter(page.states.values()), "unknown")
        return call_text("answer", text=text, source=page.id)


class CountUp:
    """Policy that guesses the numbers 1, 2, 3 and so on."""

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Return the next number."""
        environment: Any = env.unwrapped
        return f"[{environment.steps + 1}]"


class AcceptFirst:
    """Negotiator who waits for an offer, and accepts whatever it is."""

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Accept, or say something."""
        game: Any = env.unwrapped
        return "accept" if game.offered(game.to_move()) is not None else "hello"


class HitBelow:
    """Blackjack player who draws below a sum and stands from it on, whatever the dealer shows.

    Args:
        total: The sum.
    """

    needs_trust = ()

    def __init__(self, *, total: int) -> None:
        self.total = total

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return Hit or Stand."""
        from .blackjack import HIT, STAND, total

        game: Any = env.unwrapped
        return HIT if total(game.card_sum, game.has_ace) < self.total else STAND


class FillRows:
    """Player of a small Sudoku who writes the numbers that a row lacks into its empty cells, in ascending order.

    Columns and blocks are not looked at. A row with one empty cell is right.
    """

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Return the grid."""
        environment: Any = env.unwrapped
        rows = re.findall(r"[0-4](?: [0-4]){3}", environment.render())
        return "\n".join(map(self._filled, rows))

    @staticmethod
    def _filled(row: str) -> str:
        missing = iter(number for number in "1234" if number not in row)
        return " ".join(next(missing, "1") if cell == "0" else cell for cell in row.split())


class AddAll:
    """Player of Arithmetic who adds all numbers of the question, whatever its signs say."""

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Return the sum."""
        environment: Any = env.unwrapped
        return str(sum(map(int, re.findall(r"\d+", environment.render()))))


class ProductAndRest:
    """Player of Countdown who multiplies two numbers, then adds or subtracts the third, if that reaches the target."""

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Return the first such expression that reaches the target, or else the first one."""
        environment: Any = env.unwrapped
        target, *numbers = map(int, re.findall(r"\d+", environment.render()))
        expressions = [
            (f"{a} * {b} {'+' if sign > 0 else '-'} {c}", a * b + sign * c)
            for a, b, c in itertools.permutations(numbers, 3)
            for sign in (1, -1)
        ]
        found = (text for text, value in expressions if value == target)
        return next(found, expressions[0][0])


def _order(desk: Any, request: Any) -> Any:
    """Return the customer's order that a request is about."""
    orders = desk.orders.values()
    return next(o for o in orders if (o.item, o.customer) == (request.item, desk.customer))


def _action(env: Any, text: str | int) -> int | str:
    """Return the index of a named action, or a free text with its fields filled in."""
    if isinstance(text, int):
        return text
    environment: Any = env.unwrapped
    names = environment.action_names
    if not names:
        return text.format(*re.findall(r"\d+", environment.render())) if "{" in text else text
    if text not in names:
        raise ValueError(f"actions: found {text!r}, expected some of {', '.join(names)}")
    return names.index(text)


def _is_effective(environment: Any, action: int | str) -> bool:
    """Return whether an action would change the state."""
    shared = (environment.action_space, environment.observation_space)
    memo: dict[int, Any] = {id(part): part for part in shared}
    # the copy does not foresee the environment's own random events
    memo[id(environment.np_random)] = np.random.default_rng(0)
    info = copy.deepcopy(environment, memo).step(action)[-1]
    return bool(info["action_is_effective"])
