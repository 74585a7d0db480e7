"""Answers of a chat API: how they are read, counted and kept."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ragen_pl.prompts.message_format import written

log = logging.getLogger(__name__)
_MILLION = 1_000_000
_CONTENT_FILTER = "content_filter"
# of a text that is shown
_SHOWN = 100


class Tokens(NamedTuple):
    """Tokens of a request, as the server counts them; None where it does not say."""

    prompt: int | None = None
    completion: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer to a request.

    Attributes:
        text: The response; that of a refusal too. Tool calls are written into it, see `ApiFormat`.
        finish_reason: Why the response ended; `length` for its length limit.
        prompt_tokens: None where the server does not say, as of `completion_tokens`.
        refusal: Whether the model marked it as a refusal.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    refusal: bool = False

    @property
    def is_filtered(self) -> bool:
        """Whether the server's content filter withheld some of it."""
        return self.finish_reason == _CONTENT_FILTER

    @property
    def tokens(self) -> Tokens:
        """Tokens of the request."""
        return Tokens(self.prompt_tokens, self.completion_tokens)


def read_answer(body: object) -> Answer:
    """Return the answer in a chat completion.

    Args:
        body: The JSON of a server's answer, which may be anything.

    Raises:
        ValueError: It has none.
    """
    choices = body.get("choices") if isinstance(body, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise ValueError(f"expected a chat completion, found {_shown(body)}")
    text, refusal, reason = (
        message.get("content"),
        message.get("refusal"),
        choice.get("finish_reason"),
    )
    if isinstance(text, list) and all(map(_is_text_part, text)):
        text = "".join(part["text"] for part in text)
    # no content is an empty answer, such as one that hidden reasoning left no room for
    if not isinstance(text, str | None) or not {"content", "refusal"} & set(message):
        raise ValueError(f"expected a message of text, found {_shown(message)}")
    tokens = read_tokens(body)
    words = text or (refusal if isinstance(refusal, str) else "")
    return Answer(
        text=_encodable(written(words, _calls(message.get("tool_calls")))),
        finish_reason=reason[:_SHOWN] if isinstance(reason, str) else None,
        prompt_tokens=tokens.prompt,
        completion_tokens=tokens.completion,
        refusal=bool(refusal),
    )


def _calls(given: object) -> list[dict[str, Any]]:
    """Return name and arguments of tool calls, arguments that are no JSON as they are."""
    calls: list[dict[str, Any]] = []
    for call in given if isinstance(given, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # other text makes a call that is not well formed
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments or "{}")
        calls.append({"name": str(function.get("name")), "arguments": arguments})
    return calls


def read_tokens(body: object) -> Tokens:
    """Return the tokens that a server's answer says the request took."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return Tokens()
    return Tokens(*(_count(usage.get(f"{kind}_tokens")) for kind in ("prompt", "completion")))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which can't be written."""
    return text.encode("utf-8", "replace").decode()


def _shown(value: object) -> str:
    text = str(value)
    return repr(text[:_SHOWN] + "…" if len(text) > _SHOWN else text)


@dataclass(kw_only=True, slots=True)
class Usage:
    """Counts of the tokens and answers of a chat API.

    Attributes:
        prices: USD for a million prompt tokens and for a million completion tokens; None for a price that is not known.
        requests: Requests that were sent and answered.
        known: Requests whose answer was there already.
        failed: Requests that no attempt brought an answer to.
        refusals: Answers that are refusals, known ones too, as of `filtered`.
        filtered: Answers that a content filter withheld something of.
        prompt_tokens: Of answers to the requests that were sent, usable or not, as of `completion_tokens`.
        completion_tokens: See above.
        unknown_tokens: Answers whose tokens the server did not say.
        cost: USD of the requests that were sent; None without prices. Answers of unknown tokens are left out.
        known_cost: USD that the known answers have cost before.
    """

    prices: tuple[float | None, float | None] = (None, None)
    requests: int = 0
    known: int = 0
    failed: int = 0
    refusals: int = 0
    filtered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unknown_tokens: int = 0
    cost: float | None = field(init=False, default=None)
    known_cost: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Start with no cost where prices are known."""
        if self.prices != (None, None):
            self.cost = self.known_cost = 0.0

    def sent(self, tokens: Tokens) -> None:
        """Count the tokens of an answer, usable or not."""
        self.prompt_tokens += tokens.prompt or 0
        self.completion_tokens += tokens.completion or 0
        self.unknown_tokens += None in tokens
        if self.cost is not None:
            self.cost += self._cost(tokens)

    def answered(self, answer: Answer, *, known: bool) -> None:
        """Count a usable answer."""
        self.requests += not known
        self.known += known
        self.refusals += answer.refusal
        self.filtered += answer.is_filtered
        if known and self.known_cost is not None:
            self.unknown_tokens += None in answer.tokens
            self.known_cost += self._cost(answer.tokens)

    def _cost(self, tokens: Tokens) -> float:
        pairs = zip(tokens, self.prices, strict=True)
        return sum((count or 0) * (price or 0.0) for count, price in pairs) / _MILLION

    def report(self) -> dict[str, Any]:
        """Return the counts as JSON types, with `total_cost` in place of the prices."""
        report = asdict(self)
        del report["prices"]
        total = None if self.cost is None else self.cost + (self.known_cost or 0.0)
        return {**report, "total_cost": total}

    def __str__(self) -> str:
        parts = [
            f"{self.requests} requests" + (f" and {self.known} known answers" if self.known else "")
        ]
        parts.append(
            f"{self.prompt_tokens:,} prompt and {self.completion_tokens:,} completion tokens"
            + (f" (of {self.unknown_tokens} answers unknown)" if self.unknown_tokens else "")
        )
        if self.cost is not None:
            bound = "at least " if self.unknown_tokens else ""
            before = f" and {self.known_cost:.4f} USD before" if self.known else ""
            parts.append(f"{bound}{self.cost:.4f} USD{before}")
        for name in ("refusals", "filtered", "failed"):
            if count := getattr(self, name):
                parts.append(f"{count} {name}")
        return ", ".join(parts)


class AnswerFile:
    """Answers by request, in a file of one JSON line each, so that nothing is asked twice.

    Lines that are no such record are left alone: what an interrupted run was writing, and what others wrote.

    Args:
        path: File; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._answers: dict[str, Answer] = {}
        if path is None or not path.exists():
            return
        wrong = []
        # lines end with \n only: a text may hold other line ends
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            record = _record(line)
            if record is not None:
                self._answers[record[0]] = record[1]
            elif line.strip():
                wrong.append(number)
        if wrong:
            log.warning(
                "endpoint.answers=%s: %d of its lines hold no answer and are left out, the first is line %d",
                path, len(wrong), wrong[0],
            )  # fmt: skip

    @staticmethod
    def key(request: Mapping[str, Any]) -> str:
        """Return the digest of a request."""
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> Answer | None:
        """Return the answer to a request."""
        return self._answers.get(key)

    def add(self, key: str, answer: Answer) -> None:
        """Append an answer."""
        self._answers[key] = answer
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"request": key, **asdict(answer)}).encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:
            # one write, so that lines of several evaluations do not mix
            file.write(b"\n" + line if file.tell() and not _ends_a_line(self.path) else line)


def _record(line: bytes) -> tuple[str, Answer] | None:
    """Return the key and the answer of a line, None where it is no such record."""
    try:
        record = json.loads(line)
        key = record.pop("request")
        answer = Answer(**record)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    tokens = (answer.prompt_tokens, answer.completion_tokens)
    sound = (
        isinstance(key, str)
        and isinstance(answer.text, str)
        and isinstance(answer.finish_reason, str | None)
        and isinstance(answer.refusal, bool)
        and all(count is None or _count(count) is not None for count in tokens)
    )
    return (key, answer) if sound else None


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
