"""Customer of the support desk: what it wants, what the scripted one says, and the errors of a simulated one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from .base import PRINTABLE
from .support_desk_policy import CITIES, CUSTOMERS, ITEMS, Request, Rule

BYE, EXCEPTION, DAY = "bye", "exception", "day"
REFUND, MOVE = "refund", "move"

USER_RULES = (
    "You are a customer of a support desk. First you see your name, what you want and what you know, then what the "
    "clerk says. Your answer is what the clerk hears. Ask for what you want: the word refund or move, the item, the "
    "city of a move, and the word day with its number if you know it. Say the word code and your number only after the "
    "clerk has said code. The clerk tells you the outcome with refunded, moved or refused. Where you see insist, "
    "answer the first refused with the word exception, and never else. Where you want several things, ask for the "
    "next one after the outcome of the one before. After the last outcome say bye, and not before. These words count "
    "wherever they occur. Name no other item, city, person, number or order. Each error costs reward."
)


class User(StrEnum):
    """Who plays the customer."""

    SCRIPTED = "scripted"
    SEAT = "seat"


class Cue(StrEnum):
    """What the customer has to answer."""

    REQUEST = "request"  # nothing yet, or the outcome of the request before
    CODE = "code"  # the question for the code
    EXCEPTION = "exception"  # a refusal that it does not accept
    OTHER = "other"  # anything else that the clerk said
    END = "end"  # the outcome of the last request


class UserError(StrEnum):
    """Error of a simulated user against its instruction."""

    FACT = "fact"
    """Another item, city, code, day or person than in the instruction, another number, or the number of an order."""
    GOAL = "goal"
    """Something else asked for: the other kind of request, a later item, or an exception that it does not want."""
    REVEAL = "reveal"
    """The code before the clerk has asked for it."""
    OMISSION = "omission"
    """What had to be said now is left out, without another error."""
    EARLY_END = "early_end"
    """Bye before the outcome of the last request."""
    NO_END = "no_end"
    """No bye after it."""


def plain_text(text: str) -> str:
    r"""Return what somebody says as one line of printable ASCII, so that it cannot pass for another message.

    >>> plain_text("hi\n\x1b[2J there")
    'hi [2J there'
    """
    return " ".join("".join(one if one in PRINTABLE else " " for one in text).split())


def words_of(text: str) -> list[str]:
    """Return the words and numbers of a text in lower case."""
    return re.findall(r"[^\W_]+", text.casefold())


def instruction(customer: str, requests: Sequence[Request]) -> str:
    """Return what a simulated user wants and knows."""
    return f"you are {customer}: {'; then '.join(map(_wish, requests))}"


def _wish(request: Request) -> str:
    day = "" if request.day is None else f" {DAY} {request.day}"
    insist = " insist" if request.insists else ""
    return f"{_kind(request)} {_object(request)}{day} {Rule.CODE} {request.code}{insist}"


def _kind(request: Request) -> str:
    return MOVE if request.city else REFUND


def _object(request: Request) -> str:
    return f"{request.item} {request.city}" if request.city else request.item


def scripted_text(cue: Cue, request: Request) -> str:
    """Return what the scripted customer says."""
    claim = "" if request.day is None else f", it is {DAY} {request.day}"
    to = f" to {request.city}" if request.city else ""
    return {
        Cue.REQUEST: f"{_kind(request)} my {request.item}{to}{claim}",
        Cue.CODE: f"{Rule.CODE} {request.code}",
        Cue.EXCEPTION: f"please make an {EXCEPTION}.",
        Cue.OTHER: f"and my {request.item}?",
        Cue.END: BYE,
    }[cue]


def random_text(rng: np.random.Generator) -> str:
    """Return something that a customer may say, of one that knows the rules but not its instruction."""
    city = str(rng.choice(CITIES)) if rng.random() < 0.5 else None
    request = Request(str(rng.choice(ITEMS)), city, int(rng.integers(1, 10)), False, None)
    return scripted_text(list(Cue)[rng.integers(len(Cue))], request)


def user_state(cue: Cue, request: Request) -> str:
    """Return what the customer has to answer, with what it knows of that."""
    day = "" if request.day is None else f" {DAY} {request.day}"
    known = {
        Cue.REQUEST: f" {_kind(request)} {_object(request)}{day}",
        Cue.CODE: f" {request.code}",
        Cue.OTHER: f" {request.item}",
    }
    return f"{cue}{known.get(cue, '')}"


def user_errors(
    text: str, *, cue: Cue, customer: str, requests: Sequence[Request], at: int, asked: bool
) -> list[UserError]:
    """Return the errors of what a simulated user says, each kind once.

    Args:
        text: What it says; any text.
        cue: What it has to answer.
        customer: Its name.
        requests: What it wants, in order.
        at: Index of the present request.
        asked: Whether the clerk has asked for the code of that request.
    """
    said = words_of(text)
    words, (numbers, days) = set(said), numbers_of(said)
    request, so_far = requests[at], requests[: at + 1]
    later = {one.item for one in requests[at + 1 :]} - {request.item}
    known = {customer, *(word for one in so_far for word in (one.item, one.city) if word), *later}
    names = {name.casefold() for name in (*ITEMS, *CITIES, *CUSTOMERS)} - set(
        map(str.casefold, known)
    )
    goals = {_kind(one) for one in so_far} | ({EXCEPTION} if cue is Cue.EXCEPTION else set())
    code = str(request.code)
    found = {
        UserError.FACT: words & names
        or numbers - {code}
        or days - {str(request.day)}
        or any(re.fullmatch(r"a\d+", word) for word in said),
        UserError.GOAL: words & later or words & ({REFUND, MOVE, EXCEPTION} - goals),
        UserError.REVEAL: code in numbers and not asked,
        UserError.EARLY_END: BYE in words and cue is not Cue.END,
        UserError.NO_END: BYE not in words and cue is Cue.END,
    }
    errors = [error for error, is_made in found.items() if is_made]
    return errors or ([UserError.OMISSION] if _owed(cue, request) - words else [])


def _owed(cue: Cue, request: Request) -> set[str]:
    """Return the words that an answer has to have."""
    wish = words_of(f"{_kind(request)} {_object(request)}")
    day = [] if request.day is None else [str(request.day)]
    owed = {Cue.REQUEST: [*wish, *day], Cue.CODE: [str(request.code)], Cue.EXCEPTION: [EXCEPTION]}
    return set(owed.get(cue, []))


def numbers_of(said: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the numbers, and apart from them the days: those after the word day, with nothing but `is` between."""
    numbers: set[str] = set()
    days: set[str] = set()
    before = ""
    for word in said:
        if word.isdigit():
            (days if before == DAY else numbers).add(word)
        if word != "is":
            before = word
    return numbers, days
