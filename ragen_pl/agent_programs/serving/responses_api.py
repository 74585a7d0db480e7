"""Responses API without state, as a translation to and from Chat Completions.

A request holds its whole history: nothing is stored, and no earlier response is named. Reasoning comes back as an item
of its own, which a client may send again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ragen_pl.agent_programs.serving.chat_request import (
    MAX_MESSAGES,
    ClientRequest,
    positive_count,
    read_request,
)
from ragen_pl.agent_programs.serving.chat_response import Answer, logprob_items
from ragen_pl.agent_programs.serving.errors import RequestError, unsupported
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.protocol import Protocol

# a message may be of several
MAX_ITEMS = 4 * MAX_MESSAGES
# of the same meaning in a chat request
_SAME = (
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning",
    "safety_identifier",
    "seed",
    "service_tier",
    "store",
    "stream",
    "temperature",
    "min_p",
    "tool_choice",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
)
_REFUSED = {
    "previous_response_id": "send the whole history as input",
    "conversation": "send the whole history as input",
    "background": "wait for the response",
    "prompt": "send instructions and input",
    "max_tool_calls": "leave it out; there are no built-in tools",
    "context_management": "send the history that the model is to see",
}
_READ = {"input", "instructions", "tools", "text", "max_output_tokens"}
# of no meaning without state
_IGNORED = {"include", "stream_options", "truncation"}
_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "text", "top_p")


def read_responses_request(
    body: Mapping[str, Any], images: ImageReader, *, unconstrained: bool = False, train: bool = True
) -> ClientRequest:
    """Return a request of the Responses API. The arguments are those of `read_request`.

    Raises:
        RequestError: a parameter is not valid or cannot be honoured.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, remedy in _REFUSED.items():
        if given.get(name):
            raise unsupported(name, given[name], remedy)
    known = _READ | _IGNORED | _REFUSED.keys() | set(_SAME)
    if unknown := given.keys() - known:
        raise unsupported(min(unknown), given[min(unknown)], "leave it out")
    chat = {name: given[name] for name in _SAME if name in given}
    chat["messages"] = _messages(given)
    chat["tools"] = _chat_tools(given.get("tools", []))
    chat |= _text_settings(given.get("text", {}))
    include = given.get("include", [])
    chat["logprobs"] = isinstance(include, list) and "message.output_text.logprobs" in include
    chat["max_completion_tokens"] = positive_count(given, "max_output_tokens")
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


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return instructions and input as messages of a chat request."""
    messages: list[dict[str, Any]] = []
    instructions, items = given.get("instructions"), given.get("input")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise RequestError(400, "instructions: expected a text")
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise RequestError(400, "input: expected a text or a list of items")
    if len(items) > MAX_ITEMS:
        raise RequestError(400, f"input: found {len(items)} items, expected at most {MAX_ITEMS}")
    for number, item in enumerate(items):
        _add(messages, item, where=f"input[{number}]")
    return messages


def _add(messages: list[dict[str, Any]], item: object, *, where: str) -> None:
    """Add an item to the messages. The items of a response make one message."""
    if not isinstance(item, Mapping):
        raise RequestError(400, f"{where}: expected an object")
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") != "assistant":
        content = _content(item.get("content"), where)
        messages.append({"role": item.get("role"), "content": content})
    elif kind == "message":
        _assistant(messages, before=("content", "tool_calls"))["content"] = _content(
            item.get("content"), where
        )
    elif kind == "reasoning":
        message = _assistant(messages, before=("reasoning_content", "content", "tool_calls"))
        message["reasoning_content"] = _reasoning(item, where)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        remedy = "send message, reasoning, function_call and function_call_output items"
        raise unsupported(f"{where}.type", kind, remedy)


def _assistant(messages: list[dict[str, Any]], before: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the assistant's message at the end, a new one where that has one of these parts."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in before):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item, or of its summary where it has none."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise RequestError(400, f"{where}: expected a list of texts")
    return "".join(str(part.get("text") or "") for part in parts)


def _content(given: object, where: str) -> object:
    """Return a content as that of a chat message."""
    if not isinstance(given, list):
        return given
    return [_part(part, where) for part in given]


def _part(given: object, where: str) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping) and kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": given.get("text")}
    if isinstance(given, Mapping) and kind == "refusal":
        return {"type": "refusal", "refusal": given.get("refusal")}
    if isinstance(given, Mapping) and kind == "input_image" and not given.get("file_id"):
        return {"type": "image_url", "image_url": {"url": given.get("image_url")}}
    raise unsupported(f"{where}.content type", kind, "send input_text and input_image parts")


def _chat_tools(given: object) -> object:
    """Return flat tools as those of a chat request; what is none is refused there."""
    if not isinstance(given, list):
        return given
    return [
        {"type": "function", "function": dict(tool)}
        if isinstance(tool, Mapping) and tool.get("type") == "function"
        else tool
        for tool in given
    ]


def _text_settings(given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise RequestError(400, f"text={given!r}: expected an object")
    settings = {"response_format": given.get("format"), "verbosity": given.get("verbosity")}
    return {name: value for name, value in settings.items() if value is not None}


RESPONSES = Protocol(
    id_prefix="resp_",
    read=read_responses_request,
    whole=response,
    stream=response_events,
    error=_error_event,
)
