"""Answers to the requests of agent programs: a sampled response as a message, and requests that get none.

An action of a program's environment is JSON text: `{"message", "finish_reason", "usage"}` for an answer, with
`"logprobs"` where the program asked for them, and `{"error": {"code", "message"}}` for a refusal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ragen_pl.chat_formats.messages import Message, call_message
from ragen_pl.chat_formats.tool_calls.message import AssistantMessage, ToolCall
from ragen_pl.engines.protocol import Generation
from ragen_pl.prompts.message_format import MessageFormat
from ragen_pl.prompts.parsing import ParsedResponse
from ragen_pl.prompts.requests import RequestRefusedError
from ragen_pl.trajectory import ChatRequest


@dataclass(kw_only=True, slots=True)
class RequestAnswer:
    """A response to a program's request.

    Attributes:
        generation: the response, up to its stop string or its last permitted call.
        parsed: the response as the environment takes it.
        content: the response as the program gets it, `{"message", "finish_reason", "usage"}`.
    """

    generation: Generation
    parsed: ParsedResponse
    content: dict[str, Any]

    @property
    def message(self) -> Message:
        """The message of the response, see `ChatRequest.messages`."""
        message: Message = self.content["message"]
        return message


def refusal(code: str, message: str) -> ParsedResponse:
    """Return the action that tells a program why its request has no response."""
    error = json.dumps({"error": {"code": code, "message": message}})
    return ParsedResponse(actions=[error], refused=True)


def too_long(prompt_tokens: int, response_tokens: int, *, context: int) -> RequestRefusedError:
    """Return the error of a request whose prompt and response are longer than the context."""
    return RequestRefusedError(
        "context_length_exceeded",
        f"the prompt has {prompt_tokens} tokens and the response may have {response_tokens}, more than the {context} "
        "tokens of the context",
    )


def answer_request(
    request: ChatRequest,
    generation: Generation,
    *,
    native: MessageFormat,
    prompt_tokens: int,
    turn: int,
    opening: str,
    pieces: Sequence[str],
) -> RequestAnswer:
    """Return the answer to a request.

    A response ends before the request's first stop string, and after its first tool call where the request or the
    chat template allows one. Ids are cut there, so what is trained is a prefix of what was sampled. A call of a tool
    that the request does not offer, or that no later prompt can show, is not well formed: a program could not send it
    back.

    Args:
        request: the request.
        generation: the sampled response.
        native: format of the response, with the request's tools.
        prompt_tokens: tokens of the prompt.
        turn: number of the turn, of which the ids of tool calls are made.
        opening: text of the prompt with which the response begins.
        pieces: text of each token.
    """
    ends = len(opening) + np.cumsum([len(piece) for piece in pieces])
    text = opening + "".join(pieces)
    place = _first_stop(text, request.stop, start=len(opening))
    if place is not None:
        start, end = place
        generation = _cut(generation, int(np.searchsorted(ends, end)) + 1)
        text = text[:start]
    read = native.message(text)
    allowed = native.max_calls if request.parallel_calls else 1
    if len(read.calls) > allowed:
        end = read.calls[allowed - 1].span[1]
        generation = _cut(generation, int(np.searchsorted(ends, end)) + 1)
        text = text[:end]
        read = native.message(text)
    shown = [
        call_message(number, call.name, call.arguments) for number, call in enumerate(read.calls)
    ]
    if shown and not native.shows(shown):
        read = native.message(text, names=())
        read.problem = "the arguments of the tool call cannot be shown"
    # a response without its end has no calls, even where they look complete
    calls = [] if generation.hit_length_limit else read.calls
    message = _message(read, calls, turn=turn)
    reason = "length" if generation.hit_length_limit else "tool_calls" if calls else "stop"
    count = len(generation.ids)
    content: dict[str, Any] = {
        "message": message,
        "finish_reason": reason,
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count},
    }
    if request.logprobs:
        pairs = zip(pieces[:count], generation.logprobs.tolist(), strict=True)
        content["logprobs"] = [[piece, logprob] for piece, logprob in pairs]
    parsed = ParsedResponse(
        think=read.reasoning,
        actions=[json.dumps(content)],
        spans=read.spans,
        calls=[{"function": {"name": call.name, "arguments": call.arguments}} for call in calls],
        problem="the response was cut" if generation.hit_length_limit else read.problem,
    )
    return RequestAnswer(generation=generation, parsed=parsed, content=content)


def _message(read: AssistantMessage, calls: Sequence[ToolCall], *, turn: int) -> Message:
    message: Message = {"role": "assistant", "content": read.content}
    if read.reasoning is not None:
        message["reasoning_content"] = read.reasoning
    if calls:
        message["tool_calls"] = [
            # Mistral's templates take ids of nine letters and digits
            {
                "id": f"call{turn % 1000:03}{number % 100:02}",
                "name": call.name,
                "arguments": call.arguments,
            }
            for number, call in enumerate(calls)
        ]
    return message


def _first_stop(text: str, stops: Sequence[str], *, start: int) -> tuple[int, int] | None:
    """Return where the first of the stop strings begins and ends, None without any."""
    found = [(text.find(stop, start), stop) for stop in stops]
    places = [(place, place + len(stop)) for place, stop in found if place >= 0]
    # the one that is complete first
    return min(places, key=lambda place: (place[1], place[0]), default=None)


def _cut(generation: Generation, length: int) -> Generation:
    """Return the first tokens of a response. The mean entropy of these is not known."""
    if length >= len(generation.ids):
        return generation
    kept_ids, kept_counts = generation.kept_ids, generation.kept_counts
    if kept_ids is not None and kept_counts is not None:
        kept_counts = kept_counts[:length]
        kept_ids = kept_ids[: kept_counts.sum()]
    return replace(
        generation,
        ids=generation.ids[:length],
        logprobs=generation.logprobs[:length],
        entropy=None,
        hit_length_limit=False,
        kept_ids=kept_ids,
        kept_counts=kept_counts,
        values=None if generation.values is None else generation.values[:length],
    )
