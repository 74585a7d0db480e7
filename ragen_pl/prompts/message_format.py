"""Responses with reasoning, words and tool calls: their reading as actions, and their form for models behind an API."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragen_pl.chat_formats.messages import Message, call_message
from ragen_pl.chat_formats.tool_calls.message import THINK_TAGS, AssistantMessage, CallFormat
from ragen_pl.prompts.parsing import ParsedResponse, named_actions

# of a response; a prompt has a result for each
MAX_CALLS = 32


class MessageFormat(ABC):
    """Form of responses that may call tools."""

    __slots__ = ()

    @property
    @abstractmethod
    def has_tools(self) -> bool:
        """Whether responses may call tools."""

    @property
    @abstractmethod
    def max_calls(self) -> int:
        """Largest number of tool calls of a response."""

    @abstractmethod
    def message(self, text: str, *, names: Collection[str] | None = None) -> AssistantMessage:
        """Read a response. Any text has a reading; see `parse_message`.

        Args:
            text: The response, with the think tag that its prompt may have opened.
            names: Tools that may be called; None for those of the format.
        """

    def shows(self, calls: Sequence[Message]) -> bool:
        """Return whether later prompts can show these calls."""
        return True

    @abstractmethod
    def response_text(self, action: str, *, reasoning: str | None = None) -> str:
        """Return a response as the model writes it, for a scripted policy.

        Args:
            action: A tool call as JSON, `{"name": …, "arguments": {…}}`, or other text.
            reasoning: Its reasoning.
        """

    def parse(
        self, text: str, action_names: Sequence[str] | None, *, max_actions: int
    ) -> ParsedResponse:
        """Return the actions of a response: its tool calls, or without tools what it says.

        A response with tools is valid if it has a call and all of its calls are well formed; one of another tool is
        not. Beside a malformed call, which is part of its words, the well-formed ones count all the same, as they do
        for an agent program. Of more calls than `max_actions` the first ones count.

        Args:
            text: The response, with the think tag that its prompt may have opened.
            action_names: Names of the actions; None where actions are tool calls or free text.
            max_actions: Largest number of actions.
        """
        message = self.message(text)
        parsed = ParsedResponse(think=message.reasoning, spans=message.spans)
        if not self.has_tools:
            parsed.actions = named_actions(message.content, action_names, max_actions=max_actions)
            return parsed
        calls = [
            call_message(number, call.name, call.arguments)
            for number, call in enumerate(message.calls)
        ]
        unusable = self._problem_of(calls)
        parsed.problem = message.problem or unusable
        if unusable is None:
            parsed.calls = calls
            parsed.actions = [action_text(call) for call in calls[:max_actions]]
        return parsed

    def _problem_of(self, calls: Sequence[Message]) -> str | None:
        """Return why well-formed calls cannot be carried out and shown, None if they can."""
        if not calls:
            return "expected a tool call"
        if len(calls) > self.max_calls:
            return f"found {len(calls)} tool calls, expected at most {self.max_calls}"
        return None


@dataclass(slots=True)
class ApiFormat(MessageFormat):
    """Responses of a model behind an API, whose calls come apart from its words.

    They are kept as one text, with calls in the form of Hermes, `<tool_call>{"name", "arguments"}</tool_call>`.

    Attributes:
        tools: Schemas of the tools.
    """

    tools: Sequence[Mapping[str, Any]]

    @property
    def has_tools(self) -> bool:
        """Whether there are tools."""
        return bool(self.tools)

    @property
    def max_calls(self) -> int:
        """Largest number of tool calls of a response."""
        return MAX_CALLS

    def message(self, text: str, *, names: Collection[str] | None = None) -> AssistantMessage:
        """Read a response that `written` may have written."""
        from ragen_pl.chat_formats.tool_calls.parsing import parse_message

        return parse_message(
            text,
            call_format=CallFormat.HERMES if self.has_tools else None,
            thinks=THINK_TAGS,
            opened=False,
            tools={},
            names={tool["function"]["name"] for tool in self.tools} if names is None else names,
        )

    def response_text(self, action: str, *, reasoning: str | None = None) -> str:
        """Return a response for a scripted policy."""
        call = call_of(action) if self.has_tools else None
        return written(
            "" if call else action, [call["function"]] if call else [], reasoning=reasoning
        )


def written(
    content: str, calls: Sequence[Mapping[str, Any]], *, reasoning: str | None = None
) -> str:
    """Return the text of a response behind an API.

    Args:
        content: Its words.
        calls: Name and arguments of each call. Arguments that are no object make a call that is not well formed.
        reasoning: Its reasoning, where the API tells it.
    """
    tags = THINK_TAGS
    thought = f"{tags.opening}{reasoning}{tags.closing}" if reasoning else ""
    bodies = [
        json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
        for call in calls
    ]
    return thought + content + "".join(f"<tool_call>{body}</tool_call>" for body in bodies)


def action_text(call: Message) -> str:
    """Return a call as the text of an environment's action, `{"name": …, "arguments": {…}}`."""
    return json.dumps(call["function"], ensure_ascii=False)


def content_of(answer: str) -> str:
    """Return the content of the answer to a program's request, without the reasoning before them.

    Args:
        answer: Its JSON, see `ragen_pl.rollout.requests`.
    """
    return str(json.loads(answer)["message"]["content"])


def call_of(action: str) -> Message | None:
    """Return the call that the text of an action is, None for other text."""
    try:
        call = json.loads(action)
    except ValueError:
        return None
    match call:
        case {"arguments": dict(arguments)}:
            return call_message(0, str(call.get("name")), arguments)
    return None
