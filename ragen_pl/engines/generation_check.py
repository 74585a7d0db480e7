"""Check of the responses of rollout engines: one that no policy can have sampled is refused before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ragen_pl.engines.protocol import Generation, GenerationRequest

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

# a log-softmax in float32 is above 0 by rounding at most
_LARGEST_LOGPROB = 1e-4
# no id is drawn whose probability is 0 in float32, below e^-103; a server of vLLM (0.32) writes -9999 for NaN and -inf
_MIN_LOGPROB = -1000.0


class InvalidGeneration(ValueError):
    """A response that no policy can have sampled."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerationCheck:
    """Checks responses against their requests.

    Log-probs are finite and at most 0, but for rounding. Ids are in the vocabulary and not banned. A response has as
    many log-probs as ids, at least one, and at most as many as requested. It has one end-of-turn token, the last one,
    or has reached its length limit without any.

    Attributes:
        allowed: bool `[vocab]`, ids that may be sampled.
        ends: bool `[vocab]`, ids that end a response.
    """

    allowed: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, bundle: ModelBundle) -> GenerationCheck:
        """Return the check of a model's responses."""
        rows = bundle.logit_count
        allowed, ends = np.ones(rows, dtype=bool), np.zeros(rows, dtype=bool)
        allowed[list(bundle.banned_token_ids)] = False
        ends[[token for token in bundle.eos_token_ids if token < rows]] = True
        return cls(allowed, ends)

    def __call__(
        self, requests: Sequence[GenerationRequest], generations: Sequence[Generation]
    ) -> None:
        """Check responses, all at once.

        Args:
            requests: Requests.
            generations: The response to each.

        Raises:
            InvalidGeneration: With the first problem in words.
        """
        if not generations:
            return
        limits = np.array([request.max_tokens for request in requests])
        lengths = np.array([len(generation.ids) for generation in generations])
        self._check_lengths(generations, lengths, limits)
        ids = np.concatenate([generation.ids for generation in generations])
        logprobs = np.concatenate([generation.logprobs for generation in generations])
        last = lengths.cumsum() - 1
        _require(np.isfinite(logprobs), logprobs, last, "log-probs that are not finite")
        _require(logprobs <= _LARGEST_LOGPROB, logprobs, last, "log-probs above 0")
        _require(logprobs >= _MIN_LOGPROB, logprobs, last, "log-probs of ids that are not drawn")
        _require((ids >= 0) & (ids < len(self.allowed)), ids, last, "ids outside the vocabulary")
        _require(self.allowed[ids], ids, last, "ids that are never sampled")
        ended = self.ends[ids]
        inside = np.ones(len(ids), dtype=bool)
        inside[last] = False
        _require(~(ended & inside), ids, last, "tokens after an end-of-turn token")
        at_limit = np.array([generation.hit_length_limit for generation in generations])
        _require(ended[last] | at_limit, ids[last], None, "an end without an end-of-turn token")
        cut = at_limit & (ended[last] | (lengths < limits))
        _require(~cut, ids[last], None, "a length limit that it has not reached")

    def _check_lengths(
        self, generations: Sequence[Generation], lengths: np.ndarray, limits: np.ndarray
    ) -> None:
        for generation in generations:
            if not np.issubdtype(generation.ids.dtype, np.integer):
                raise InvalidGeneration(f"ids of type {generation.ids.dtype}")
            if len(generation.logprobs) != len(generation.ids):
                raise InvalidGeneration(
                    f"{len(generation.ids)} ids and {len(generation.logprobs)} log-probs"
                )
        _require(lengths > 0, lengths, None, "no tokens")
        _require(lengths <= limits, lengths, None, "more tokens than requested")


def _require(holds: np.ndarray, values: np.ndarray, last: np.ndarray | None, problem: str) -> None:
    """Raise the problem with the first value for which it does not hold.

    Args:
        holds: bool, for each value.
        values: Values of all responses.
        last: Index of the last value of each response; None for one value each.
        problem: What is wrong, in words.

    Raises:
        InvalidGeneration: It does not hold for some.
    """
    if holds.all():
        return
    first = int(holds.argmin())
    place = ""
    if last is not None:
        response = int(np.searchsorted(last, first))
        start = 0 if response == 0 else int(last[response - 1]) + 1
        place = f" at token {first - start + 1} of {int(last[response]) - start + 1}"
    raise InvalidGeneration(f"{problem} ({values[first]}{place})")
