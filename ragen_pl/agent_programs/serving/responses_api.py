"""Responses API without state, as a translation to and from Chat Completions.

A request holds its whole history: nothing is stored, and no earlier response is named. Reasoning comes back as an item
of its own, which a client may send again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Required

from annotated_types import MaxLen
from typing_extensions import TypedDict

from ragen_pl.agent_programs.serving.chat_request import (
    MAX_MESSAGES,
    ClientRequest,
    read_request,
)
from ragen_pl.agent_programs.serving.chat_response import Answer, logprob_items
from ragen_pl.agent_programs.serving.errors import only, read_as
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.protocol import Protocol
from ragen_pl.base.constraints import Count
from ragen_pl.base.typed_json import FIRST_FAULT

# a message may be of several
MAX_ITEMS = 4 * MAX_MESSAGES
_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "text", "top_p")
_HISTORY = Annotated[Any, only(remedy="send the whole history as input")]


class _Part(TypedDict, total=False):
    type: Literal[
        "input_text",
        "output_text",
        "text",
        "refusal",
        "input_image",
        "reasoning_text",
        "summary_text",
    ]
    text: str | None
    refusal: str
    image_url: str | None
    file_id: Annotated[Any, only(remedy="send an input_image with an image_url")]


_Content = str | Annotated[list[_Part], FIRST_FAULT] | None


class _Item(TypedDict, total=False):
    """Item of any type; what its type lacks is refused as a part of a chat request."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    role: Any
    content: _Content
    summary: _Content
    call_id: Any
    name: Any
    arguments: Any
    output: _Content


class _Same(TypedDict, total=False):
    """Parameters of the same meaning in a chat request."""

    metadata: Any
    model: Any
    parallel_tool_calls: Any
    prompt_cache_key: Any
    prompt_cache_retention: Any
    reasoning: Any
    safety_identifier: Any
    seed: Any
    service_tier: Any
    store: Any
    stream: Any
    temperature: Any
    min_p: Any
    tool_choice: Any
    top_k: Any
    top_logprobs: Any
    top_p: Any
    user: Any


class _Parameters(_Same, total=False):
    """All parameters; none is null."""

    input: Required[str | Annotated[list[_Item], MaxLen(MAX_ITEMS), FIRST_FAULT]]
    instructions: str
    tools: Annotated[list[dict[str, Any]], FIRST_FAULT]
    text: dict[str, Any]
    max_output_tokens: Count
    include: list[str]
    # of no meaning without state
    stream_options: dict[str, Any]
    truncation: Literal["auto", "disabled"]
    previous_response_id: _HISTORY
    conversation: _HISTORY
    background: Annotated[Any, only(remedy="wait for the response")]
    prompt: Annotated[Any, only(remedy="send instructions and input")]
    max_tool_calls: Annotated[Any, only(remedy="leave it out; there are no built-in tools")]
    context_management: Annotated[Any, only(remedy="send the history that the model is to see")]


def read_responses_request(
    body: Mapping[str, Any], images: ImageReader, *, unconstrained: bool = False, train: bool = True
) -> ClientRequest:
    """Return a request of the Responses API. The arguments are those of `read_request`.

    Raises:
        RequestError: A parameter is not valid or cannot be honoured.
    """
    given, parameters = read_as(_Parameters, body)
    chat: dict[str, Any] = {name: given[name] for name in _Same.__annotations__ if name in given}
    tools, text = parameters.get("tools", []), parameters.get("text", {})
    chat |= {
        "messages": _messages(parameters),
        "tools": [{"type": tool.get("type"), "function": tool} for tool in tools],
        "response_format": text.get("format"),
        "verbosity": text.get("verbosity"),
        "logprobs": "message.output_text.logprobs" in parameters.get("include", []),
        "max_completion_tokens": parameters.get("max_output_tokens"),
    }
    client = read_request(chat, images, unconstrained=unconstrained, train=train)
    echo = {name: given.get(name) for name in _ECHOED} | {
        "tools": given.get("tools", []),
        "tool_choice": given.get("tool_choice", "auto"),
        "parallel_tool_calls": client.chat.parallel_calls,
    }
    return replace(client, echo=echo)


def response(answer: Answer, client: ClientRequest) -> dict[str, Any]:
    """Return an answer as one JSON object."""
    cut = answer.finish_reason == "length"
    return _envelope(answer, client) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def response_events(answer: Answer, client: ClientRequest) -> Iterator[bytes]:
    """Yield an answer as the events of a stream."""
    for number, (kind, values) in enumerate(_events(answer, client)):
        yield _event({"type": kind, "sequence_number": number} | values)


def _events(answer: Answer, client: ClientRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {"response": _envelope(answer, client) | {"status": "in_progress", "output": []}}
    yield "response.created", begun
    yield "response.in_progress", begun
    for index, item in enumerate(_output(answer)):
        place: dict[str, Any] = {"output_index": index}
        empty: dict[str, Any] = (
            {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        )
        started = item | empty | {"status": "in_progress"}
        yield "response.output_item.added", place | {"item": started}
        place["item_id"] = item["id"]
        if item["type"] == "function_call":
            name, text = item["name"], item["arguments"]
            yield "response.function_call_arguments.delta", place | {"delta": text}
            done = {"name": name, "arguments": text}
            yield "response.function_call_arguments.done", place | done
        for content_index, part in enumerate(item.get("content", ())):
            here = place | {"content_index": content_index}
            name = "output_text" if part["type"] == "output_text" else "reasoning_text"
            logprobs = {"logprobs": part["logprobs"]} if name == "output_text" else {}
            yield "response.content_part.added", here | {"part": part | {"text": ""}}
            yield f"response.{name}.delta", here | {"delta": part["text"]} | logprobs
            yield f"response.{name}.done", here | {"text": part["text"]} | logprobs
            yield "response.content_part.done", here | {"part": part}
        yield "response.output_item.done", {"output_index": index, "item": item}
    whole = response(answer, client)
    yield f"response.{whole['status']}", {"response": whole}


def _error_event(body: dict[str, Any]) -> bytes:
    error = body["error"]
    values = {"code": error["code"], "message": error["message"], "param": None}
    return _event({"type": "error", "sequence_number": 0} | values)


def _event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode()


def _envelope(answer: Answer, client: ClientRequest) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
        "usage": None,
        "store": False,
        **client.echo,
    }


def _output(answer: Answer) -> list[dict[str, Any]]:
    """Return the items of an answer: reasoning, message, calls."""
    state = {"status": "incomplete" if answer.finish_reason == "length" else "completed"}
    items: list[dict[str, Any]] = []
    if reasoning := answer.message.get("reasoning_content"):
        thought = [{"type": "reasoning_text", "text": reasoning}]
        items.append(
            {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": thought}
        )
    content, calls = answer.message["content"], answer.calls
    if content or not calls:
        logprobs = logprob_items(answer) or []
        part = {"type": "output_text", "text": content, "annotations": [], "logprobs": logprobs}
        message = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant"}
        items.append(message | {"content": [part]} | state)
    for number, call in enumerate(calls):
        about = {"id": f"fc_{answer.id}_{number}", "type": "function_call", "call_id": call["id"]}
        items.append(about | call["function"] | state)
    return items


def _messages(given: _Parameters) -> list[dict[str, Any]]:
    """Return instructions and input as messages of a chat request."""
    messages: list[dict[str, Any]] = []
    if (instructions := given.get("instructions")) is not None:
        messages.append({"role": "system", "content": instructions})
    items = given["input"]
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items:
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: _Item) -> None:
    """Add an item to the messages. The items of a response make one message."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        message = _assistant(messages, before=("reasoning_content", "content", "tool_calls"))
        message["reasoning_content"] = _reasoning(item.get("content") or item.get("summary") or "")
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        if item.get("role") == "assistant":
            message = _assistant(messages, before=("content", "tool_calls"))
        else:
            messages.append(message := {"role": item.get("role")})
        message["content"] = _content(item.get("content"))


def _assistant(messages: list[dict[str, Any]], before: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the assistant's message at the end, a new one where that has one of these parts."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in before):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _reasoning(given: str | list[_Part]) -> str:
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in given)


def _content(given: _Content) -> object:
    """Return a content as that of a chat message."""
    return given if given is None or isinstance(given, str) else [_part(part) for part in given]


def _part(given: _Part) -> Mapping[str, Any]:
    kind = given.get("type")
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": given.get("image_url")}}
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": given.get("text")}
    return given


RESPONSES = Protocol(
    id_prefix="resp_",
    read=read_responses_request,
    whole=response,
    stream=response_events,
    error=_error_event,
)
