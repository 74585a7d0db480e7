"""Protocol: an API of the endpoint, which reads requests and writes answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ragen_pl.agent_programs.serving.chat_request import ClientRequest, read_request
from ragen_pl.agent_programs.serving.chat_response import (
    END_OF_STREAM,
    Answer,
    chunks,
    completion,
    event,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """An API of the endpoint.

    Attributes:
        id_prefix: Beginning of the ids of its answers.
        read: Reads a request; takes its JSON, an image reader, `unconstrained` and `train`.
        whole: Writes an answer as one JSON object.
        stream: Yields an answer as server-sent events.
        error: Writes an error as a server-sent event; takes its JSON.
    """

    id_prefix: str
    read: Callable[..., ClientRequest]
    whole: Callable[[Answer, ClientRequest], dict[str, Any]]
    stream: Callable[[Answer, ClientRequest], Iterator[bytes]]
    error: Callable[[dict[str, Any]], bytes] = event


def _whole(answer: Answer, _: ClientRequest) -> dict[str, Any]:
    return completion(answer)


def _stream(answer: Answer, client: ClientRequest) -> Iterator[bytes]:
    for chunk in chunks(answer, include_usage=client.include_usage):
        yield event(chunk)
    yield END_OF_STREAM


CHAT = Protocol(id_prefix="chatcmpl-", read=read_request, whole=_whole, stream=_stream)
