"""Requests and responses of vLLM's endpoint for token ids, and the budget of a request that fails."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ragen_pl.base.data_url import data_url
from ragen_pl.engines.generation_check import GenerationCheck, InvalidGeneration
from ragen_pl.engines.protocol import Generation, GenerationRequest
from ragen_pl.engines.vllm.requests import check_prompt, sampling_arguments
from ragen_pl.engines.vllm_server.server import (
    InvalidAnswerError,
    Json,
    ServerError,
    ServerLostError,
    UnavailableError,
)

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

FLOOR_BYTES, BYTES_PER_TOKEN, BYTES_PER_PROMPT_TOKEN = 2**20, 1024, 32
"""Largest response: a floor, and more for each token that is requested or shown. vLLM writes about 150 for a token."""

# a bias after which a probability is 0 in float32
_NEVER = -1e9


class Exchange:
    """Request bodies and answers of a model.

    Args:
        bundle: Model.
        finite: Whether requests have to be JSON by its standard, without infinity, as a router reads it.
    """

    def __init__(self, bundle: ModelBundle, *, finite: bool = False) -> None:
        self._family = bundle.facts.family
        self._check = GenerationCheck.of(bundle)
        self._banned = dict.fromkeys(bundle.banned_token_ids, _NEVER if finite else -math.inf)
        self._ends = sorted(bundle.eos_token_ids)

    def body(self, request: GenerationRequest, *, adapter: str | None = None) -> Json:
        """Return the body of a request.

        Args:
            request: Request.
            adapter: Name of the adapters that answer it; None for the model's own weights.
        """
        prompt = request.prompt
        ids = prompt.unexpanded_ids if prompt.images else prompt.ids
        body: Json = {
            "token_ids": ids.tolist(),
            "return_token_ids": True,
            "sampling_params": sampling_arguments(request, ends=self._ends, banned=self._banned),
        }
        if adapter is not None:
            body["model"] = adapter
        if prompt.images:
            body["content_parts"] = [
                {"type": "image_url", "url": data_url(image)} for image in prompt.images
            ]
        return body

    def max_bytes(self, request: GenerationRequest) -> int:
        """Return the largest size of an answer."""
        prompt = BYTES_PER_PROMPT_TOKEN * len(request.prompt.ids)
        return FLOOR_BYTES + BYTES_PER_TOKEN * request.max_tokens + prompt

    def generation(
        self, answer: object, request: GenerationRequest, *, label: str, version: int
    ) -> Generation:
        """Return the response in an answer.

        Args:
            answer: JSON of the answer, which may be anything.
            request: Request.
            label: Label of the weights that have to have sampled it.
            version: Version of these weights.

        Raises:
            UnavailableError: It was sampled with other weights, was interrupted, or is unlike vLLM's answers.
            InvalidAnswerError: Its values are impossible.
            ValueError: The server has put other ids in the place of the images than the model's own processor.
        """
        parts = _Answer.of(answer)
        if parts.reason not in ("stop", "length"):
            raise UnavailableError(f"a response ended with {parts.reason}")
        if parts.versions != {label}:
            raise UnavailableError("it has lost the weights")
        self._check_prompt(parts.shown, request)
        generation = Generation(
            ids=_numbers(parts.ids, (int,), np.int64),
            logprobs=_numbers(parts.logprobs, (int, float), np.float32),
            entropy=None,
            hit_length_limit=parts.reason == "length",
            version=version,
        )
        try:
            self._check([request], [generation])
        except InvalidGeneration as error:
            raise InvalidAnswerError(f"a response with {error}") from error
        return generation

    def _check_prompt(self, shown: object, request: GenerationRequest) -> None:
        if request.prompt.images and isinstance(shown, list):
            check_prompt(shown, request, family=self._family, engine="vllm_server")
        if shown != request.prompt.ids.tolist():
            raise UnavailableError("a response to another prompt")


@dataclass(frozen=True, slots=True)
class _Answer:
    """The parts of an answer that a response needs; their values may be anything."""

    shown: object
    ids: object
    logprobs: list[object]
    reason: object
    versions: set[object]

    @classmethod
    def of(cls, answer: Any) -> _Answer:
        try:
            (choice,) = answer["choices"]
            return cls(
                shown=answer["prompt_token_ids"],
                ids=choice["token_ids"],
                logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
                reason=choice["finish_reason"],
                versions={span["version"] for span in choice["weight_versions"]},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UnavailableError(f"an answer unlike vLLM's ({error})") from error


def _numbers(values: object, kinds: tuple[type, ...], dtype: type) -> np.ndarray:
    """Return a list of numbers as an array, without rounding one kind to another.

    Raises:
        InvalidAnswerError: Some are of another kind, or too large.
    """
    if not isinstance(values, list):
        raise InvalidAnswerError("a response without its ids")
    for value in values:
        if type(value) not in kinds:
            raise InvalidAnswerError(
                f"a response with {json.dumps(value)[:40]} in the place of a number"
            )
    try:
        return np.asarray(values, dtype=dtype)
    except OverflowError:
        raise InvalidAnswerError("a response with a number that is too large") from None


@dataclass(slots=True)
class Budget:
    """Attempts and time of a request.

    A request that fails while others are answered has `retries` attempts after the first. While none is answered, it is
    sent again for `timeout_s`, however often. A server that is busy, or that probes have lost, costs time only.

    Attributes:
        retries: Attempts after the first.
        timeout_s: Seconds.
    """

    retries: int
    timeout_s: float
    failures: int = 0
    """Failed attempts."""
    begun: float | None = None
    """Time of the first failure."""
    attempts: int = 0
    """Attempts, also those that found a server busy."""

    def spend(self, failure: ServerError, *, answered_at: float) -> bool:
        """Note a failed attempt; return whether the budget is used up.

        Args:
            failure: What failed.
            answered_at: Time of the last response to any request.
        """
        now = time.monotonic()
        self.begun = now if self.begun is None else self.begun
        self.attempts += 1
        is_late = now - self.begun >= self.timeout_s
        if failure.is_busy or isinstance(failure, ServerLostError):
            return is_late
        self.failures += 1
        return self.failures > self.retries and (is_late or answered_at > self.begun)
