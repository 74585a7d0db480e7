"""Comparison of a request's messages with recorded requests and their responses.

Messages are compared as values, never as rendered text: clients write JSON with other blanks and leave out reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ragen_pl.chat_formats.messages import Message, content_parts
from ragen_pl.engines.protocol import Prompt
from ragen_pl.trajectory import ChatRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """A program's request with the response that was sampled.

    Attributes:
        request: The request.
        message: The response as the program got it.
        prompt: Ids and images of the prompt.
        response_ids: int64 `[response]`.
    """

    request: ChatRequest
    message: Message
    prompt: Prompt
    response_ids: np.ndarray


def longest(calls: Sequence[RecordedCall], request: ChatRequest) -> RecordedCall | None:
    """Return the recorded call with the most messages whose request and response begin a request; None for none."""
    by_length = sorted(calls, key=lambda call: len(call.request.messages), reverse=True)
    return next((call for call in by_length if difference(call, request) is None), None)


def difference(call: RecordedCall, request: ChatRequest) -> str | None:
    """Return the first of `DIFFERENCES` between a request and a recorded call, None if it continues the call.

    Another order or number of messages is `messages`.
    """
    if request.tools != call.request.tools:
        return "tools"
    history = [*call.request.messages, call.message]
    for recorded, sent in zip(history, request.messages, strict=False):
        if recorded["role"] != sent["role"]:
            return "messages"
        if recorded is call.message:
            return _response_difference(recorded, sent, stop=call.request.stop)
        if recorded != sent:
            return _message_difference(recorded, sent)
    return "messages"


def _response_difference(recorded: Message, sent: Message, *, stop: Sequence[str]) -> str | None:
    """Return the first difference in a response that a program sends back.

    Programs leave out reasoning, strip the text, or add the stop string before which it ended (smolagents).
    """
    if _calls(recorded) != _calls(sent):
        return "arguments"
    if sent.get("reasoning_content") not in (None, "", recorded.get("reasoning_content")):
        return "reasoning"
    text, sent_text = recorded["content"], sent["content"]
    if sent_text == text or (isinstance(sent_text, str) and sent_text.strip() == text.strip()):
        return None
    return None if sent_text in [text + end for end in stop] else "content"


def _message_difference(recorded: Message, sent: Message) -> str:
    role = str(recorded["role"])
    if _digests(recorded) != _digests(sent):
        return "images"
    if role != "assistant":
        return role
    return "arguments" if _calls(recorded) != _calls(sent) else "content"


def _calls(message: Message) -> list[tuple[str, object]]:
    return [(call["name"], call["arguments"]) for call in message.get("tool_calls") or ()]


def _digests(message: Message) -> list[str]:
    parts = content_parts(message["content"])
    return [part["digest"] for part in parts if part["type"] == "image"]
