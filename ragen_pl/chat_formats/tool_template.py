"""Tool calls and their results as a chat template writes them, found by rendering conversations of marker words."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragen_pl.chat_formats.chat_template import ChatTemplate
from ragen_pl.chat_formats.messages import (
    Message,
    call_message,
    owners_of_images,
    tool_message,
    user_message,
)

NAME, ARGUMENT = "marker_tool", "marker_name"
_USER, _NEXT_USER = "@User@", "@Next User@"
# a template may write quotes and newlines of a result as JSON, and trim blanks
_ESCAPED = '@"Quoted"\nLine@'
_BLANK = " \n@Blank@\n "
_MARKERS = re.compile(rf"({NAME}_\d+|@Result \d+@|{_NEXT_USER})")


class NoToolsError(ValueError):
    """A chat template cannot show tools, calls or results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultText:
    """Text of a template around the results of a response's calls, up to the next response.

    Attributes:
        parts: The text after the token that ends the response, with markers in the places of results and of tools'
            names.
        end: Text of that token.
        escapes: Whether results are written as JSON strings.
        trims: Whether blanks at the edges of a result are removed.
        images: Number of images of each result.
        user: Whether the images follow in a user message, for templates that show none in a result.
    """

    parts: tuple[str, ...]
    end: str
    escapes: bool
    trims: bool
    images: tuple[int, ...]
    user: bool

    def shown(self, text: str) -> str:
        """Return a result as the template writes it."""
        text = text.strip() if self.trims else text
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.escapes else text

    def filled(self, names: Sequence[str], results: Sequence[str]) -> list[tuple[str, bool]]:
        """Return the text in parts, each with whether it is the template's own.

        Args:
            names: Names of the tools called.
            results: The results, in order.
        """
        texts = {_name(number): name for number, name in enumerate(names)}
        texts |= {_result(number): self.shown(text) for number, text in enumerate(results)}
        texts[_NEXT_USER] = owners_of_images(self.images)
        return [(texts.get(part, part), part not in texts) for part in self.parts]

    def messages(self, calls: Sequence[Message], results: Sequence[str]) -> list[Message]:
        """Return the messages of the results.

        Args:
            calls: The calls.
            results: A text for each of them.
        """
        owners = owners_of_images(self.images)
        return _result_messages(
            calls, results, images=self.images, user=owners if self.user else None
        )


@dataclass(slots=True)
class ToolTemplate:
    """Tools, calls and results in a chat template.

    Args:
        template: The chat template with the tools that it shows.
        ends: Texts of the tokens that end a response.

    Attributes:
        example: A call of a tool, its name begins with `NAME`, with one argument `ARGUMENT`, as the template writes it.

    Raises:
        NoToolsError: The template leaves out the tools or the calls.
    """

    template: ChatTemplate
    ends: Sequence[str]
    example: str = field(init=False)
    _results: dict[tuple[int, ...], ResultText] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.template.tools:
            name = str(self.template.tools[0]["function"]["name"])
            if name not in self.template.render([user_message(_USER, images=0)]):
                raise NoToolsError("the model's chat template leaves out the tools")
        self.example = self.written(content="", calls=[_call(0)])
        if NAME not in self.example or _argument(0) not in self.example:
            raise NoToolsError("the model's chat template leaves out tool calls")

    @property
    def control_tokens(self) -> frozenset[str]:
        """Names of the control tokens in a call."""
        added = self.template.tokenizer.added_tokens_decoder.values()
        names = (str(token) for token in added if token.special)
        return frozenset(name for name in names if name in self.example)

    def written(
        self, *, content: str, calls: Sequence[Message], reasoning: str | None = None
    ) -> str:
        """Return a response as the template writes it, without its end.

        Args:
            content: Words of the response.
            calls: Its calls, as messages have them.
            reasoning: Text of its reasoning.

        Raises:
            NoToolsError: The template cannot write it.
        """
        user = user_message(_USER, images=0)
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [*calls]
        if reasoning:
            message["reasoning_content"] = reasoning
        prompt = self.template.render([user])
        text = self._rendered([user, message], prompt=False)
        if not text.startswith(prompt):
            # the prompt of a response may open a think block that a written response lacks
            prompt = re.sub(r"<think>\s*\Z", "", prompt)
        if not text.startswith(prompt):
            raise NoToolsError("the model's chat template writes responses after another header")
        written = text.removeprefix(prompt)
        end = first_of(self.ends, written)
        return written if end is None else written[: end[0]]

    def results(self, images: Sequence[int]) -> ResultText:
        """Return the text around the results of a response's calls.

        Args:
            images: Number of images of each result.

        Raises:
            NoToolsError: The template cannot show them.
        """
        key = tuple(images)
        if key not in self._results:
            self._results[key] = self._find_results(key)
        return self._results[key]

    def _find_results(self, images: tuple[int, ...]) -> ResultText:
        calls = len(images)
        user = any(images) and not self._shows_images(calls)
        text = self._with_results(images, user=user)
        _, found, after = text.rpartition(_argument(calls - 1))
        first_end = first_of(self.ends, after)
        if not found or first_end is None:
            raise NoToolsError(
                f"the model's chat template shows no response with {calls} tool calls"
            )
        place, end = first_end
        parts = tuple(_MARKERS.split(after[place + len(end) :]))
        expected = [*map(_result, range(calls)), *([_NEXT_USER] if user else [])]
        if [part for part in parts if part in expected] != expected:
            raise NoToolsError(
                f"the model's chat template leaves out results of {calls} tool calls"
            )
        none = (0,) * calls
        escapes = _ESCAPED not in self._with_results(none, last=_ESCAPED)
        blank = json.dumps(_BLANK)[1:-1] if escapes else _BLANK
        trims = blank not in self._with_results(none, last=_BLANK)
        found_text = ResultText(
            parts=parts, end=end, escapes=escapes, trims=trims, images=images, user=user
        )
        for last in (_ESCAPED, _BLANK):
            if found_text.shown(last) not in self._with_results(none, last=last):
                raise NoToolsError("the model's chat template changes the text of a tool's result")
        return found_text

    def _shows_images(self, calls: int) -> bool:
        """Return whether the template shows an image in the result that it belongs to, whichever one that is."""
        slots = self.template.render([user_message(_USER, images=1)]).partition(_USER)[0]
        without = self.template.render([user_message(_USER, images=0)]).partition(_USER)[0]
        slot = slots.removeprefix(without)
        if not slot:
            return False
        for number in range(calls):
            images = [int(other == number) for other in range(calls)]
            try:
                text = self._with_results(images)
            except NoToolsError:
                return False
            # between the results beside it
            _, _, after = text.partition(_result(number - 1) if number else _argument(calls - 1))
            own = after.partition(_result(number + 1))[0] if number + 1 < calls else after
            if _result(number) not in own or slot not in own or text.count(slot) != 1:
                return False
        return True

    def _with_results(
        self, images: Sequence[int], *, user: bool = False, last: str | None = None
    ) -> str:
        """Render a response with calls and their results, and the prompt of the next response.

        Args:
            images: Number of images of each result.
            user: Whether they are in a user message.
            last: Text of the last result in place of its marker.
        """
        calls = [_call(number) for number in range(len(images))]
        results = [_result(number) for number in range(len(images))]
        if last is not None:
            results[-1] = last
        messages: list[Message] = [
            user_message(_USER, images=0),
            {"role": "assistant", "content": "", "tool_calls": calls},
            *_result_messages(calls, results, images=images, user=_NEXT_USER if user else None),
        ]
        return self._rendered(messages, prompt=True)

    def _rendered(self, messages: list[Message], *, prompt: bool) -> str:
        try:
            return self.template.render(messages, prompt=prompt)
        # a template may raise any exception
        except Exception as error:
            raise NoToolsError(
                f"the model's chat template cannot show tool calls ({type(error).__name__}: {error})"
            ) from error


def first_of(ends: Sequence[str], text: str) -> tuple[int, str] | None:
    """Return the place and the text of the first of these tokens in a text, None without any."""
    return min(((text.find(end), end) for end in ends if end in text), default=None)


def _result_messages(
    calls: Sequence[Message], results: Sequence[str], *, images: Sequence[int], user: str | None
) -> list[Message]:
    """Return the messages of results, with the images of each in it or all in a user message after them.

    Args:
        calls: The calls.
        results: A text for each of them.
        images: Number of images of each.
        user: Text of the user message; None for none.
    """
    messages = [
        tool_message(call, text, images=count if user is None else 0)
        for call, text, count in zip(calls, results, images, strict=True)
    ]
    return messages if user is None else [*messages, user_message(user, images=sum(images))]


def _call(number: int) -> Message:
    return call_message(number, _name(number), {ARGUMENT: _argument(number)})


def _name(number: int) -> str:
    return f"{NAME}_{number}"


def _argument(number: int) -> str:
    return f"@Argument {number}@"


def _result(number: int) -> str:
    return f"@Result {number}@"
