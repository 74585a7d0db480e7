"""Chat Completions requests: JSON of a client to a `ChatRequest`, with each parameter honoured, ignored or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, NotRequired, Required

import numpy as np
from annotated_types import Len, MaxLen, MinLen
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from ragen_pl.agent_programs.serving.errors import RequestError, only, read_as, unsupported
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.strict_json import strict_json
from ragen_pl.agent_programs.serving.tools import (
    MAX_TOOLS,
    CallReader,
    Tool,
    ToolCall,
    in_order_of_calls,
    read_tool_choice,
    read_tools,
)
from ragen_pl.base.constraints import Count
from ragen_pl.base.typed_json import FIRST_FAULT
from ragen_pl.trajectory import ChatRequest

MAX_MESSAGES, MAX_IMAGES, MAX_STOPS = 4096, 64, 16
MAX_IMAGE_BYTES = 256 * 1024 * 1024
_Refused = Annotated[Any, only(remedy="leave it out")]


@dataclass(kw_only=True, slots=True)
class ClientRequest:
    """A request as the endpoint reads it.

    Attributes:
        chat: What the policy answers.
        model: Name of the model that it asks for.
        images: Images of the messages, in order.
        stream: Whether the answer is streamed.
        include_usage: Whether the stream ends with the number of tokens.
        ignored: Parameters that are not honoured, with their values.
        sampling: Sampling parameters, with their values.
        echo: Parameters that the answer repeats, with their values.
    """

    chat: ChatRequest
    model: str
    images: list[np.ndarray] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    ignored: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    echo: dict[str, Any] = field(default_factory=dict)


_Text = Annotated[str, MinLen(1)]


class _TextPart(TypedDict):
    type: Literal["text"]
    text: str


class _RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


class _ImageURL(TypedDict):
    url: str


class _ImagePart(TypedDict):
    type: Literal["image_url"]
    image_url: str | _ImageURL


_Part = Annotated[_TextPart | _RefusalPart | _ImagePart, Field(discriminator="type")]
_Content = str | Annotated[list[_Part], FIRST_FAULT] | None


class _OtherMessage(TypedDict):
    role: Literal["system", "developer", "user"]
    content: NotRequired[_Content]


class _AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: NotRequired[_Content]
    function_call: NotRequired[Annotated[Any, only(remedy="send tool_calls")]]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[ToolCall], FIRST_FAULT] | None]


class _ToolMessage(TypedDict):
    role: Literal["tool"]
    content: NotRequired[_Content]
    tool_call_id: str


_Message = Annotated[_OtherMessage | _AssistantMessage | _ToolMessage, Field(discriminator="role")]


def read_truth(value: object) -> bool:
    """Return a truth value, which metadata and headers have as text.

    Raises:
        ValueError: It is none.
    """
    found = {"true": True, "1": True, "false": False, "0": False}.get(str(value).casefold())
    if found is None:
        raise PydanticCustomError("truth", "true or false")
    return found


_Truth = Annotated[Any, AfterValidator(lambda value: True if value is None else read_truth(value))]


class _Metadata(TypedDict, total=False):
    """Entries of the metadata that the endpoint reads."""

    train: _Truth
    advances: _Truth


class _StreamOptions(TypedDict, total=False):
    include_usage: bool | None


class _Sampling(TypedDict, total=False):
    """Parameters that the config of a run decides; who samples checks their ranges."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    reasoning_effort: str
    reasoning: dict[str, Any]
    chat_template_kwargs: dict[str, Any]
    verbosity: str


class _Ignored(TypedDict, total=False):
    """Parameters of no meaning here."""

    user: Any
    store: Any
    service_tier: Any
    safety_identifier: Any
    prompt_cache_key: Any
    prompt_cache_retention: Any


class _Parameters(_Sampling, _Ignored, total=False):
    """All parameters; none is null."""

    messages: Required[Annotated[list[_Message], Len(1, MAX_MESSAGES), FIRST_FAULT]]
    model: str
    tools: Annotated[list[Tool], MaxLen(MAX_TOOLS), FIRST_FAULT]
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any]
    parallel_tool_calls: bool
    stop: _Text | Annotated[list[_Text], MaxLen(MAX_STOPS), FIRST_FAULT]
    max_tokens: Count
    max_completion_tokens: Count
    stream: bool
    stream_options: _StreamOptions
    logprobs: bool
    response_format: dict[str, Any]
    metadata: _Metadata
    n: Annotated[Any, only(1, remedy="send a request for each response")]
    modalities: Annotated[Any, only(["text"], remedy="responses are text")]
    top_logprobs: Annotated[Any, only(remedy="logprobs=true gives the sampled tokens'")]
    functions: Annotated[Any, only(remedy="send tools")]
    function_call: Annotated[Any, only(remedy="send tools")]
    logit_bias: _Refused
    audio: _Refused
    prediction: _Refused
    web_search_options: _Refused


def read_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        RequestError: It is none, is nested too deeply, or holds NaN, infinity or a lone surrogate.
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
        body: Its JSON.
        images: Reads its images.
        unconstrained: Whether a response format in JSON is accepted and not enforced.
        train: Whether the policy may be trained on the response.

    Raises:
        RequestError: A parameter is not valid or cannot be honoured.
    """
    given, parameters = read_as(_Parameters, body)
    _check_format(parameters.get("response_format", {"type": "text"}), unconstrained)
    shown, calls = _Images(images), CallReader()
    messages = [
        _message(message, shown, calls, where=f"messages[{number}]")
        for number, message in enumerate(parameters["messages"])
    ]
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            400,
            "messages: the last one is the assistant's; a response cannot be continued, end with another message",
        )
    messages = in_order_of_calls(messages)
    tools = read_tools(parameters.get("tools", []))
    choice = read_tool_choice(parameters.get("tool_choice", "auto"), tools)
    limits = (parameters.get("max_tokens"), parameters.get("max_completion_tokens"))
    ignored = {name: given[name] for name in _Ignored.__annotations__.keys() & given.keys()}
    if choice not in ("auto", "none"):
        ignored["tool_choice"] = choice
    stop, metadata = parameters.get("stop", []), parameters.get("metadata", _Metadata())
    return ClientRequest(
        chat=ChatRequest(
            messages=messages,
            tools=[] if choice == "none" else tools,
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=parameters.get("logprobs", False),
            parallel_calls=parameters.get("parallel_tool_calls", True),
            is_task_step=metadata.get("advances", True),
            trained=train and metadata.get("train", True),
        ),
        model=parameters.get("model", ""),
        images=shown.of(messages),
        stream=parameters.get("stream", False),
        include_usage=bool(parameters.get("stream_options", {}).get("include_usage", False)),
        ignored=ignored,
        sampling={name: given[name] for name in _Sampling.__annotations__ if name in given},
    )


def _check_format(response_format: Mapping[str, Any], unconstrained: bool) -> None:
    kind = response_format.get("type")
    if kind != "text" and not (unconstrained and kind in ("json_object", "json_schema")):
        raise unsupported(
            "response_format",
            response_format,
            "responses are not constrained; set env.kwargs.response_format=unconstrained where the program checks them "
            "itself",
        )


class _Images:
    """Images of a request, each once, however often it is shown."""

    def __init__(self, images: ImageReader) -> None:
        self._reader = images
        self._by_digest: dict[str, np.ndarray] = {}
        self._count = 0

    def read(self, part: _Part) -> dict[str, str]:
        """Return a part of a content, with the digest of its image."""
        if part["type"] == "text":
            return {"type": "text", "text": part["text"]}
        if part["type"] == "refusal":
            return {"type": "text", "text": part["refusal"]}
        given = part["image_url"]
        digest, image = self._reader.read(given if isinstance(given, str) else given["url"])
        self._by_digest[digest] = image
        self._count += 1
        if self._count > MAX_IMAGES:
            raise RequestError(400, f"messages: more than {MAX_IMAGES} images")
        if sum(each.nbytes for each in self._by_digest.values()) > MAX_IMAGE_BYTES:
            raise RequestError(
                400,
                f"messages: the images have more than {MAX_IMAGE_BYTES // 3} pixels together",
                code="image_too_large",
            )
        return {"type": "image", "digest": digest}

    def of(self, messages: list[dict[str, Any]]) -> list[np.ndarray]:
        """Return the images of messages in order."""
        contents = [message["content"] for message in messages]
        parts = [part for content in contents if not isinstance(content, str) for part in content]
        return [self._by_digest[part["digest"]] for part in parts if part["type"] == "image"]


def _message(given: _Message, images: _Images, reader: CallReader, *, where: str) -> dict[str, Any]:
    """Return a message as `ChatRequest.messages` has it."""
    message: dict[str, Any] = {
        "role": "system" if given["role"] == "developer" else given["role"],
        "content": _content(given.get("content"), images),
    }
    if given["role"] == "assistant":
        reasoning = given.get("reasoning_content") or given.get("reasoning")
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls := given.get("tool_calls"):
            message["tool_calls"] = [reader.read(where, call) for call in calls]
    elif given["role"] == "tool":
        message["tool_call_id"] = given["tool_call_id"]
    return message


def _content(given: str | list[_Part] | None, images: _Images) -> str | list[dict[str, Any]]:
    """Return a content as one text, or as parts where it has images."""
    if given is None or isinstance(given, str):
        return given or ""
    parts: list[dict[str, Any]] = []
    for kind, group in groupby(map(images.read, given), key=itemgetter("type")):
        if kind == "text":
            parts.append({"type": "text", "text": "".join(part["text"] for part in group)})
        else:
            parts += group
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
