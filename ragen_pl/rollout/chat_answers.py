"""Answers of a chat API: how they are read, counted and kept."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from annotated_types import Len
from pydantic import ConfigDict, InstanceOf
from typing_extensions import TypedDict

from ragen_pl.base.constraints import CountOrZero
from ragen_pl.base.foreign_files import plain_json
from ragen_pl.base.typed_json import OR_NONE, TypeFault, shown, typed, typed_or_none
from ragen_pl.prompts.message_format import written

log = logging.getLogger(__name__)
_MILLION = 1_000_000
_CONTENT_FILTER = "content_filter"
# of a text that is shown
_SHOWN = 100
# a text that may have lone surrogates, which pydantic's own type refuses
_Letters = InstanceOf[str]


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


class _TextPart(TypedDict):
    type: Literal["text"]
    text: _Letters


class _Call(TypedDict):
    function: dict[str, Any]


class _Message(TypedDict, total=False):
    content: _Letters | list[_TextPart] | None
    refusal: Annotated[_Letters | None, OR_NONE]
    tool_calls: Annotated[list[Annotated[_Call | None, OR_NONE]] | None, OR_NONE]


class _Choice(TypedDict):
    message: _Message
    finish_reason: NotRequired[Annotated[str | None, OR_NONE]]


class _Completion(TypedDict):
    choices: Annotated[list[_Choice], Len(1)]


class _Counted(TypedDict):
    usage: dict[str, Any]


class _Line(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    request: str
    text: str
    finish_reason: str | None
    prompt_tokens: NotRequired[CountOrZero | None]
    completion_tokens: NotRequired[CountOrZero | None]
    refusal: NotRequired[bool]


def read_answer(body: object) -> Answer:
    """Return the answer in a chat completion.

    Args:
        body: The JSON of a server's answer, which may be anything.

    Raises:
        ValueError: It has none.
    """
    try:
        choice = typed(_Completion, body)["choices"][0]
    except TypeFault as fault:
        raise ValueError(f"expected a chat completion, found {fault}") from None
    message = choice["message"]
    # no content is an empty answer, such as one that hidden reasoning left no room for
    if not {"content", "refusal"} & set(message):
        raise ValueError(f"expected a message with content, found {shown(message)}")
    content, refusal = message.get("content") or "", message.get("refusal")
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    tokens = read_tokens(body)
    return Answer(
        text=_encodable(written(text or refusal or "", _calls(message.get("tool_calls")))),
        finish_reason=(choice.get("finish_reason") or "")[:_SHOWN] or None,
        prompt_tokens=tokens.prompt,
        completion_tokens=tokens.completion,
        refusal=bool(refusal),
    )


def _calls(given: Sequence[_Call | None] | None) -> list[dict[str, Any]]:
    """Return name and arguments of tool calls, arguments that are no JSON as they are."""
    calls: list[dict[str, Any]] = []
    for function in (call["function"] for call in given or () if call is not None):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # other text makes a call that is not well formed
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments or "{}")
        calls.append({"name": str(function.get("name")), "arguments": arguments})
    return calls


def read_tokens(body: object) -> Tokens:
    """Return the tokens that a server's answer says the request took."""
    counted = typed_or_none(_Counted, body)
    usage = {} if counted is None else counted["usage"]
    counts = (usage.get(f"{kind}_tokens") for kind in ("prompt", "completion"))
    return Tokens(*(typed_or_none(CountOrZero, count) for count in counts))


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which can't be written."""
    return text.encode("utf-8", "replace").decode()


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
    with suppress(ValueError):
        record: dict[str, Any] = {**typed(_Line, plain_json(line))}
        return record.pop("request"), Answer(**record)
    return None


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
