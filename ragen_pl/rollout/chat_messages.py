"""Messages to a chat API: those of a conversation, and those of a program's request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from ragen_pl.base.data_url import data_url
from ragen_pl.chat_formats.messages import owners_of_images
from ragen_pl.prompts.conversation import Conversation, Exchange
from ragen_pl.prompts.message_format import ApiFormat
from ragen_pl.trajectory import ChatRequest

Message = dict[str, Any]


def user_message(exchange: Exchange) -> Message:
    """Return the message of an observation."""
    return {"role": "user", "content": _content(exchange.text, exchange.images)}


def result_messages(exchange: Exchange, calls: Sequence[Message]) -> list[Message]:
    """Return the messages of the results of tool calls. Their images follow in a user's message, as the API has it."""
    messages: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(calls, exchange.results, strict=True)
    ]
    if exchange.images:
        words = owners_of_images(exchange.result_images)
        messages.append({"role": "user", "content": _content(words, exchange.images)})
    return messages


def response_message(conversation: Conversation, exchange: Exchange) -> Message:
    """Return the message of a response."""
    if conversation.native is None or not exchange.calls:
        return {"role": "assistant", "content": exchange.response_text}
    content = conversation.native.message(exchange.response_text).content
    calls = [
        _call(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in exchange.calls
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def conversation_messages(
    conversation: Conversation, *, window: int | Literal["all"]
) -> list[Message]:
    """Return the messages up to the latest observation of a conversation.

    Args:
        conversation: The conversation.
        window: Number of latest turns shown, or `"all"`.
    """
    messages: list[Message] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    calls: Sequence[Message] = ()
    for exchange in conversation.latest(window):
        messages += result_messages(exchange, calls) if calls else [user_message(exchange)]
        calls = exchange.calls
        if exchange.response_ids is not None:
            messages.append(response_message(conversation, exchange))
    return messages


def request_messages(request: ChatRequest, images: Sequence[np.ndarray]) -> list[Message]:
    """Return the messages of a program's request.

    Args:
        request: The request.
        images: Its images, in order.
    """
    left = iter(images)
    return [_request_message(message, left) for message in request.messages]


def tools_of(conversation: Conversation) -> Sequence[Message]:
    """Return the schemas of a conversation's tools."""
    native = conversation.native
    return [dict(tool) for tool in native.tools] if isinstance(native, ApiFormat) else []


def _request_message(message: Message, images: Iterator[np.ndarray]) -> Message:
    content = message["content"]
    sent: Message = {"role": message["role"], "content": content}
    if not isinstance(content, str):
        sent["content"] = [
            part if part["type"] == "text" else _image(next(images)) for part in content
        ]
    if "tool_call_id" in message:
        sent["tool_call_id"] = message["tool_call_id"]
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_call(call["id"], call["name"], call["arguments"]) for call in calls]
    return sent


def _call(call_id: str, name: str, arguments: Any) -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _content(text: str, images: Sequence[np.ndarray]) -> str | list[Message]:
    if not images:
        return text
    words: list[Message] = [{"type": "text", "text": text}] if text else []
    return [*map(_image, images), *words]


def _image(image: np.ndarray) -> Message:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}
