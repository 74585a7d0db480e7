"""Chat Completions requests: JSON of a client to a `ChatRequest`, with each parameter honoured, ignored or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from ragen_pl.agent_programs.serving.errors import RequestError, shown, unsupported
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.strict_json import strict_json
from ragen_pl.agent_programs.serving.tools import (
    CallReader,
    in_order_of_calls,
    read_tool_choice,
    read_tools,
)
from ragen_pl.trajectory import ChatRequest

MAX_MESSAGES, MAX_IMAGES, MAX_STOPS = 4096, 64, 16
MAX_IMAGE_BYTES = 256 * 1024 * 1024
_NUMBER = ("a number", (int, float))
_WHOLE_NUMBER = ("a whole number", (int,))
_WORD = ("a text", (str,))
_OBJECT = ("an object", (dict,))
# of the sampling, which the config of a run decides, with their types
SAMPLING: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _WHOLE_NUMBER,
    "min_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "seed": _WHOLE_NUMBER,
    "reasoning_effort": _WORD,
    "reasoning": _OBJECT,
    "chat_template_kwargs": _OBJECT,
    "verbosity": _WORD,
}
# of no meaning here
_IGNORED = {
    "user",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
}
_REFUSED = {
    "logit_bias": "leave it out",
    "functions": "send tools",
    "function_call": "send tools",
    "audio": "leave it out",
    "prediction": "leave it out",
    "web_search_options": "leave it out",
}
_READ = {
    "messages",
    "model",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "n",
    "logprobs",
    "top_logprobs",
    "response_format",
    "modalities",
    "metadata",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(kw_only=True, slots=True)
class ClientRequest:
    """A request as the endpoint reads it.

    Attributes:
        chat: what the policy answers.
        model: name of the model that it asks for.
        images: images of the messages, in order.
        stream: whether the answer is streamed.
        include_usage: whether the stream ends with the number of tokens.
        ignored: parameters that are not honoured, with their values.
        sampling: sampling parameters, with their values.
        echo: parameters that the answer repeats, with their values.
    """

    chat: ChatRequest
    model: str
    images: list[np.ndarray] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    ignored: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    echo: dict[str, Any] = field(default_factory=dict)


def read_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        RequestError: it is none, is nested too deeply, or holds NaN, infinity or a lone surrogate.
    """
    try:
        body = strict_json(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(400, "the body is no JSON object", code="invalid_json")
    return body


def read_request(
    body: Mapping[str, Any], images: ImageReader, *, unconstrained: bool = False, train: bool = True
) -> ClientRequest:
    """Return a Chat Completions request.

    Args:
        body: its JSON.
        images: reads its images.
        unconstrained: whether a response format in JSON is accepted and not enforced.
        train: whether the policy may be trained on the response.

    Raises:
        RequestError: a parameter is not valid or cannot be honoured.
    """
    given = {name: value for name, value in body.items() if value is not None}
    _check_parameters(given, unconstrained=unconstrained)
    reader = _MessageReader(images)
    messages = reader.messages(given.get("messages"))
    tools = read_tools(given.get("tools", []))
    choice = read_tool_choice(given.get("tool_choice", "auto"), tools)
    metadata = given.get("metadata", {})
    if not isinstance(metadata, Mapping):
        raise RequestError(400, "metadata: expected an object")
    limits = [positive_count(given, name) for name in ("max_tokens", "max_completion_tokens")]
    options = given.get("stream_options", {})
    ignored = {name: given[name] for name in _IGNORED & given.keys()}
    if choice not in ("auto", "none"):
        ignored["tool_choice"] = choice
    return ClientRequest(
        chat=ChatRequest(
            messages=messages,
            tools=[] if choice == "none" else tools,
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            stop=_stops(given.get("stop", [])),
            logprobs=_boolean(given, "logprobs", default=False),
            parallel_calls=_boolean(given, "parallel_tool_calls", default=True),
            is_task_step=_flag(metadata, "advances"),
            trained=train and _flag(metadata, "train"),
        ),
        model=str(given.get("model", "")),
        images=reader.images(messages),
        stream=_boolean(given, "stream", default=False),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage", False)),
        ignored=ignored,
        sampling=_sampling(given),
    )


def _check_parameters(given: Mapping[str, Any], *, unconstrained: bool) -> None:
    for name, remedy in _REFUSED.items():
        if given.get(name):
            raise unsupported(name, given[name], remedy)
    unknown = given.keys() - _READ - _IGNORED - _REFUSED.keys() - set(SAMPLING)
    if unknown:
        name = min(unknown)
        raise unsupported(name, given[name], "leave it out")
    if given.get("n", 1) != 1:
        raise unsupported("n", given["n"], "send a request for each response")
    if given.get("top_logprobs"):
        raise unsupported(
            "top_logprobs", given["top_logprobs"], "logprobs=true gives the sampled tokens'"
        )
    if given.get("modalities", ["text"]) != ["text"]:
        raise unsupported("modalities", given["modalities"], "responses are text")
    response_format = given.get("response_format", {"type": "text"})
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind != "text" and not (unconstrained and kind in ("json_object", "json_schema")):
        raise unsupported(
            "response_format",
            response_format,
            "responses are not constrained; set env.kwargs.response_format=unconstrained where the program checks them "
            "itself",
        )


class _MessageReader:
    """Reads messages, and keeps their images."""

    def __init__(self, images: ImageReader) -> None:
        self._reader, self._calls = images, CallReader()
        self._by_digest: dict[str, np.ndarray] = {}
        self._count = 0

    def messages(self, given: object) -> list[dict[str, Any]]:
        if not isinstance(given, list) or not given:
            raise RequestError(400, "messages: expected a list of messages")
        if len(given) > MAX_MESSAGES:
            raise RequestError(
                400, f"messages: found {len(given)}, expected at most {MAX_MESSAGES}"
            )
        messages = [self._message(number, message) for number, message in enumerate(given)]
        if messages[-1]["role"] == "assistant":
            raise RequestError(
                400,
                "messages: the last one is the assistant's; a response cannot be continued, end with another message",
            )
        return in_order_of_calls(messages)

    def images(self, messages: list[dict[str, Any]]) -> list[np.ndarray]:
        """Return the images of messages in order."""
        contents = [message["content"] for message in messages]
        parts = [part for content in contents if not isinstance(content, str) for part in content]
        return [self._by_digest[part["digest"]] for part in parts if part["type"] == "image"]

    def _message(self, number: int, given: object) -> dict[str, Any]:
        where = f"messages[{number}]"
        role = given.get("role") if isinstance(given, dict) else None
        if not isinstance(given, dict) or role not in _ROLES:
            raise RequestError(400, f"{where}.role={role!r}: expected one of {', '.join(_ROLES)}")
        message: dict[str, Any] = {
            "role": "system" if role == "developer" else str(role),
            "content": self._content(where, given.get("content")),
        }
        if role == "assistant":
            if given.get("function_call"):
                raise unsupported(
                    f"{where}.function_call", given["function_call"], "send tool_calls"
                )
            reasoning = given.get("reasoning_content") or given.get("reasoning")
            if isinstance(reasoning, str):
                message["reasoning_content"] = reasoning
            calls = given.get("tool_calls") or []
            if not isinstance(calls, list):
                raise RequestError(400, f"{where}.tool_calls: expected a list")
            if calls:
                message["tool_calls"] = [self._calls.read(where, call) for call in calls]
        if role == "tool":
            call_id = given.get("tool_call_id")
            if not isinstance(call_id, str):
                raise RequestError(400, f"{where}.tool_call_id: expected the id of a tool call")
            message["tool_call_id"] = call_id
        return message

    def _content(self, where: str, given: object) -> str | list[dict[str, Any]]:
        """Return a content as one text, or as parts where it has images."""
        if given is None or isinstance(given, str):
            return given or ""
        if not isinstance(given, list):
            raise RequestError(400, f"{where}.content: expected a text or a list of parts")
        parts: list[dict[str, Any]] = []
        read = [self._part(where, part) for part in given]
        for kind, group in groupby(read, key=lambda part: str(part["type"])):
            if kind == "text":
                parts.append({"type": "text", "text": "".join(part["text"] for part in group)})
            else:
                parts += group
        if all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
        return parts

    def _part(self, where: str, given: object) -> dict[str, Any]:
        kind = given.get("type") if isinstance(given, Mapping) else None
        if isinstance(given, Mapping) and kind in ("text", "refusal"):
            text = given.get(kind)
            if isinstance(text, str):
                return {"type": "text", "text": text}
        if isinstance(given, Mapping) and kind == "image_url":
            url = given.get("image_url")
            digest, image = self._reader.read(url.get("url") if isinstance(url, Mapping) else url)
            self._by_digest[digest] = image
            self._count += 1
            if self._count > MAX_IMAGES:
                raise RequestError(400, f"messages: more than {MAX_IMAGES} images")
            # each image once, however often it is shown
            if sum(each.nbytes for each in self._by_digest.values()) > MAX_IMAGE_BYTES:
                raise RequestError(
                    400,
                    f"messages: the images have more than {MAX_IMAGE_BYTES // 3} pixels together",
                    code="image_too_large",
                )
            return {"type": "image", "digest": digest}
        raise unsupported(f"{where}.content type", kind, "send text and image_url parts")


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters, each of its type; who samples checks their ranges."""
    for name, (expected, types) in SAMPLING.items():
        value = given.get(name)
        is_one = isinstance(value, types) and not isinstance(value, bool)
        if value is not None and not is_one:
            raise RequestError(400, f"{name}={shown(value)}: expected {expected}")
    return {name: given[name] for name in SAMPLING if name in given}


def _stops(given: object) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(400, "stop: expected texts that are not empty")
    if len(stops) > MAX_STOPS:
        raise RequestError(400, f"stop: found {len(stops)}, expected at most {MAX_STOPS}")
    return tuple(stops)


def positive_count(given: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of a request that is at least 1, None without it.

    Raises:
        RequestError: it is no such number.
    """
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(400, f"{name}={value!r}: expected a whole number, at least 1")
    return value


def _boolean(given: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(400, f"{name}={value!r}: expected true or false")
    return value


def _flag(metadata: Mapping[str, Any], name: str) -> bool:
    """Return a truth value of the metadata, which has texts in OpenAI's API."""
    return metadata.get(name, True) not in (False, "false", "False", "0")
