"""The model's own chat format: its reasoning, its way to call tools, and tool results (`env.prompt_format=native`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragen_pl.chat_formats.chat_template import ChatTemplate
from ragen_pl.chat_formats.messages import Message
from ragen_pl.chat_formats.tool_calls.message import (
    THINK_TAGS,
    THOUGHT_CHANNEL,
    AssistantMessage,
    CallFormat,
    ReasoningTags,
)
from ragen_pl.chat_formats.tool_template import ARGUMENT, NAME, NoToolsError, ToolTemplate
from ragen_pl.prompts.message_format import MAX_CALLS, MessageFormat, call_of

# texts in a template's own call by which its format is known
_FORMATS = (
    ("<|tool_call>call:", CallFormat.GEMMA),
    ("<|tool_call_start|>[", CallFormat.LFM),
    ("<function=", CallFormat.QWEN_XML),
    ("<tool_call>", CallFormat.HERMES),
    ('"parameters"', CallFormat.LLAMA_JSON),
)


@dataclass(slots=True)
class NativeFormat(MessageFormat):
    """Responses and tool results of one episode in the model's own chat format.

    Args:
        template: The chat template with the episode's tools.
        ends: Texts of the tokens that end a response.
        is_rendered: Whether prompts are rendered as a whole, so that the template has to show the calls again.

    Raises:
        NoToolsError: The template cannot show the tools, calls or results, or writes calls in a form that is not known.
    """

    template: ChatTemplate
    ends: Sequence[str]
    is_rendered: bool = False
    tools: ToolTemplate | None = field(init=False, default=None)
    _call_format: CallFormat = field(init=False, default=CallFormat.HERMES)
    _reasoning: ReasoningTags = field(init=False, default=THINK_TAGS)
    _max_calls: int = field(init=False, default=MAX_CALLS)
    _parameters: Mapping[str, Mapping[str, Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        added = self.template.tokenizer.added_tokens_decoder.values()
        if THOUGHT_CHANNEL.opening.startswith(tuple(map(str, added))):
            self._reasoning = THOUGHT_CHANNEL
        if not self.template.tools:
            return
        functions = [tool["function"] for tool in self.template.tools]
        self._parameters = {function["name"]: function["parameters"] for function in functions}
        self.tools = ToolTemplate(self.template, self.ends)
        self._call_format = _format_of(self.tools.example)
        self.tools.results([0])
        try:
            self.tools.results([0, 0])
        except NoToolsError:  # Llama 3.2 takes one call a response
            self._max_calls = 1

    def message(self, text: str, *, names: Collection[str] | None = None) -> AssistantMessage:
        """Read a response. Any text has a reading; see `parse_message`."""
        from ragen_pl.chat_formats.tool_calls.parsing import parse_message

        return parse_message(
            text,
            call_format=self._call_format if self.has_tools else None,
            thinks=self._reasoning,
            opened=False,
            tools=self._parameters,
            names=self._parameters if names is None else names,
        )

    @property
    def has_tools(self) -> bool:
        """Whether responses may call tools."""
        return self.tools is not None

    @property
    def max_calls(self) -> int:
        """Largest number of tool calls of a response that the template can show."""
        return self._max_calls

    def _problem_of(self, calls: Sequence[Message]) -> str | None:
        problem = MessageFormat._problem_of(self, calls)
        if problem is None and self.is_rendered and not self.shows(calls):
            return "the arguments of the tool call cannot be shown"
        return problem

    def shows(self, calls: Sequence[Message]) -> bool:
        """Return whether the template can show these calls."""
        if self.tools is None:
            return not calls
        try:
            self.tools.written(content="", calls=calls)
        # a template may raise for values that its model would not write
        except NoToolsError:
            return False
        return True

    def assistant_message(
        self, text: str, *, calls: Sequence[Message], plain: Callable[[str], str]
    ) -> Message:
        """Return the message of a response, for a template that is rendered as a whole.

        Args:
            text: The response, with the think tag that its prompt may have opened.
            calls: Its tool calls; empty where they were refused, and are words then.
            plain: Removes control tokens from a text.
        """
        read = self.message(text)
        if not calls and (read.calls or read.problem is not None):
            return {"role": "assistant", "content": plain(text)}
        message: Message = {"role": "assistant", "content": plain(read.content)}
        if read.reasoning is not None:
            message["reasoning_content"] = plain(read.reasoning)
        if calls:
            message["tool_calls"] = [mapped(call, plain) for call in calls]
        return message

    def result_messages(
        self,
        calls: Sequence[Message],
        results: Sequence[str],
        *,
        images: Sequence[int],
        plain: Callable[[str], str],
    ) -> list[Message]:
        """Return the messages of tool results, for a template that is rendered as a whole.

        Args:
            calls: The calls.
            results: A text for each of them.
            images: Number of images of each result.
            plain: Removes control tokens from a text.
        """
        assert self.tools is not None
        return self.tools.results(images).messages(
            [mapped(call, plain) for call in calls], [plain(text) for text in results]
        )

    def response_text(self, action: str, *, reasoning: str | None = None) -> str:
        """Return a response as the model writes it, for a scripted policy.

        Args:
            action: A tool call as JSON, `{"name": …, "arguments": {…}}`, or other text.
            reasoning: Its reasoning.

        Raises:
            NoToolsError: The template cannot write it.
        """
        call = call_of(action) if self.tools is not None else None
        tools = self.tools or ToolTemplate(self.template, self.ends)
        if call is None:
            return tools.written(content=action, calls=[], reasoning=reasoning)
        return tools.written(content="", calls=[call], reasoning=reasoning)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with each text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): mapped(item, change) for name, item in value.items()}
    return value


def _format_of(example: str) -> CallFormat:
    for text, call_format in _FORMATS:
        if text in example:
            return call_format
    raise NoToolsError(
        f"the model's chat template writes tool calls in a form that is not known: "
        f"{example.replace(NAME, 'NAME').replace(ARGUMENT, 'ARGUMENT')!r}"
    )
