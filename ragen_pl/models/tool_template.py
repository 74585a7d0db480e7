"""Tool calls and their results as a chat template writes them, found by rendering conversations of marker words."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragen_pl.models.chat_template import ChatTemplate
from ragen_pl.models.messages import Message, call_message, tool_message, user_message

NAME, ARGUMENT = "marker_tool", "marker_name"
_USER, _NEXT_USER = "@User@", "@Next User@"
# a template may write quotes and newlines of a result as JSON, and trim blanks
_ESCAPED = '@"Quoted"\nLine@'
_BLANK = " \n@Blank@\n "
_MARKERS = re.compile(rf"({NAME}_\d+|@Result \d+@|{_NEXT_USER})")


class NoToolsError(ValueError):
    """A chat template cannot show tools, calls or results."""


@dataclass(frozen=True, slots=True)
class ResultText:
    """Text of a template around the results of a response's calls, up to the next response.

    Attributes:
        parts: the text after the token that ends the response, with markers in the places of results and of tools'
            names.
        end: text of that token.
        escapes: whether results are written as JSON strings.
        trims: whether blanks at the edges of a result are removed.
        user: whether the images follow in a user message.
    """

    parts: tuple[str, ...]
    end: str
    escapes: bool
    trims: bool
    user: bool

    def shown(self, text: str) -> str:
        """Return a result as the template writes it."""
        text = text.strip() if self.trims else text
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.escapes else text

    def filled(self, names: Sequence[str], results: Sequence[str]) -> list[tuple[str, bool]]:
        """Return the text in parts, each with whether it is the template's own.

        Args:
            names: names of the tools called.
            results: the results, in order.
        """
        texts = {_name(number): name for number, name in enumerate(names)}
        texts |= {_result(number): self.shown(text) for number, text in enumerate(results)}
        texts[_NEXT_USER] = ""
        return [(texts.get(part, part), part not in texts) for part in self.parts]


@dataclass(slots=True)
class ToolTemplate:
    """Tools, calls and results in a chat template.

    Args:
        template: the chat template with the tools that it shows.
        ends: texts of the tokens that end a response.

    Attributes:
        example: a call of a tool, its name begins with `NAME`, with one argument `ARGUMENT`, as the template writes it.

    Raises:
        NoToolsError: the template leaves out the tools or the calls.
    """

    template: ChatTemplate
    ends: Sequence[str]
    example: str = field(init=False)
    _results: dict[tuple[int, int], ResultText] = field(init=False, default_factory=dict)

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
            content: words of the response.
            calls: its calls, as messages have them.
            reasoning: text of its reasoning.

        Raises:
            NoToolsError: the template cannot write it.
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

    def results(self, *, calls: int, images: int) -> ResultText:
        """Return the text around the results of a response with so many calls.

        Args:
            calls: number of calls, each with one result.
            images: number of images that the last result shows.

        Raises:
            NoToolsError: the template cannot show them.
        """
        key = (calls, images)
        if key not in self._results:
            self._results[key] = self._find_results(calls, images)
        return self._results[key]

    def _find_results(self, calls: int, images: int) -> ResultText:
        in_tool_message = images > 0 and self._shows_images(images)
        user = images > 0 and not in_tool_message
        text = self._with_results(calls, images=images, user=user)
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
        escapes = _ESCAPED not in self._with_results(calls, last=_ESCAPED)
        blank = json.dumps(_BLANK)[1:-1] if escapes else _BLANK
        trims = blank not in self._with_results(calls, last=_BLANK)
        found_text = ResultText(parts, end, escapes=escapes, trims=trims, user=user)
        for last in (_ESCAPED, _BLANK):
            if found_text.shown(last) not in self._with_results(calls, last=last):
                raise NoToolsError("the model's chat template changes the text of a tool's result")
        return found_text

    def _shows_images(self, images: int) -> bool:
        """Return whether a tool message shows images where a user message would."""
        slots = self.template.render([user_message(_USER, images=images)]).partition(_USER)[0]
        without = self.template.render([user_message(_USER, images=0)]).partition(_USER)[0]
        slot = slots.removeprefix(without)
        try:
            text = self._with_results(1, images=images)
        except NoToolsError:
            return False
        before = text.partition(_argument(0))[2].partition(_result(0))[0]
        return bool(slot) and slot in before

    def _with_results(
        self, calls: int, *, images: int = 0, user: bool = False, last: str | None = None
    ) -> str:
        """Render a response with calls and their results, and the prompt of the next response.

        Args:
            calls: number of calls.
            images: number of images in the last result, or in a user message after it.
            user: whether they are in a user message.
            last: text of the last result in place of its marker.
        """
        call_messages = [_call(number) for number in range(calls)]
        messages: list[Message] = [
            user_message(_USER, images=0),
            {"role": "assistant", "content": "", "tool_calls": call_messages},
        ]
        for number, call in enumerate(call_messages):
            is_last = number == calls - 1
            text = last if last is not None and is_last else _result(number)
            messages.append(tool_message(call, text, images=images if is_last and not user else 0))
        if user:
            messages.append(user_message(_NEXT_USER, images=images))
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


def _call(number: int) -> Message:
    return call_message(number, _name(number), {ARGUMENT: _argument(number)})


def _name(number: int) -> str:
    return f"{NAME}_{number}"


def _argument(number: int) -> str:
    return f"@Argument {number}@"


def _result(number: int) -> str:
    return f"@Result {number}@"
