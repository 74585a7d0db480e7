"""Chat Completions answers: the policy's message as JSON, whole or as the chunks of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Response of the policy to a request.

    Attributes:
        id: Id of the response.
        model: Name of the model.
        message: The message, see `ChatRequest.messages`.
        finish_reason: `stop`, `length` or `tool_calls`.
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens of the response.
        logprobs: Text and log-prob of each token, where they were asked for.
        created: Time in seconds since 1970.
    """

    id: str
    model: str
    message: Mapping[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Sequence[tuple[str, float]] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, id: str, model: str, given: Mapping[str, Any]) -> Answer:
        """Return an answer with these values.

        Args:
            id: Id of the response.
            model: Name of the model.
            given: `{"message", "finish_reason", "usage"}` and perhaps `"logprobs"`, as `ragen_pl.rollout.requests`
                writes them.
        """
        return cls(
            id=id,
            model=model,
            message=given["message"],
            finish_reason=given["finish_reason"],
            prompt_tokens=given["usage"]["prompt_tokens"],
            completion_tokens=given["usage"]["completion_tokens"],
            logprobs=given.get("logprobs"),
        )

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls, with arguments as JSON text."""
        return [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                },
            }
            for call in self.message.get("tool_calls") or ()
        ]


def completion(answer: Answer) -> dict[str, Any]:
    """Return an answer as one JSON object."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.message["content"] or (None if answer.calls else ""),
        "refusal": None,
    }
    if "reasoning_content" in answer.message:
        message["reasoning_content"] = answer.message["reasoning_content"]
    if answer.calls:
        message["tool_calls"] = answer.calls
    return {
        "id": answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": _logprobs(answer),
                "finish_reason": answer.finish_reason,
            }
        ],
        "usage": answer.usage,
    }


def chunks(answer: Answer, *, include_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield an answer as the objects of a stream: role, reasoning, content, calls, end, and the usage if asked for."""
    usage = {"usage": None} if include_usage else {}

    def chunk(delta: Mapping[str, Any], **values: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | values
        return _chunk(answer, [choice]) | usage

    content, logprobs = answer.message["content"], _logprobs(answer)
    yield chunk({"role": "assistant", "content": None if answer.calls and not content else ""})
    if "reasoning_content" in answer.message:
        yield chunk({"reasoning_content": answer.message["reasoning_content"]})
    if content or logprobs:
        yield chunk({"content": content} if content else {}, logprobs=logprobs)
    for number, call in enumerate(answer.calls):
        yield chunk({"tool_calls": [{"index": number} | call]})
    yield chunk({}, finish_reason=answer.finish_reason)
    if include_usage:
        yield _chunk(answer, []) | {"usage": answer.usage}


def event(value: object) -> bytes:
    """Return a value as a server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


END_OF_STREAM = b"data: [DONE]\n\n"


def _chunk(answer: Answer, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": "chat.completion.chunk",
        "created": answer.created,
        "model": answer.model,
        "choices": choices,
    }


def logprob_items(answer: Answer) -> list[dict[str, Any]] | None:
    """Return text, log-prob and bytes of each token, None where they were not asked for."""
    if answer.logprobs is None:
        return None
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.logprobs
    ]


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    content = logprob_items(answer)
    return None if content is None else {"content": content, "refusal": None}
