"""Check of the responses of rollout engines: one that no policy can have sampled is refused before it is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import TYPE_CHECKING

import numpy as np

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import Generation, GenerationRequest

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

# a log-softmax in float32 is above 0, and an entropy below 0, by rounding at most
_LARGEST_LOGPROB = _ROUNDING = 1e-4
# nats, of a mean over many ids
_ENTROPY_ROUNDING = 1e-2
# no id is drawn whose probability is 0 in float32, below e^-103; a server of vLLM (0.32) writes -9999 for NaN and -inf
_MIN_LOGPROB = -1000.0


class InvalidGeneration(ValueError):
    """A response that no policy can have sampled.

    Attributes:
        remedy: What can be done.
    """

    remedy = (
        "the weights may have diverged (lower optimizer.lr), or the engine is at fault (set another "
        "rollout/engine)"
    )


class MalformedGeneration(InvalidGeneration):
    """An answer of an engine that is no response, or has a field of another type or length than `Generation`."""

    remedy = "correct the engine, or set another rollout/engine"


def refused(engine: object, error: InvalidGeneration) -> RolloutError:
    """Return the error of a rollout whose engine has returned such a response."""
    return RolloutError(
        f"rollout.engine={type(engine).__name__}: it returned a response with {error}; {error.remedy}"
    )


def unanswered(engine: object, count: int) -> RolloutError:
    """Return the error of a rollout whose engine has no response to some requests, and none under way."""
    return RolloutError(
        f"rollout.engine={type(engine).__name__}: it returned no response to {count} of the requests; "
        f"{MalformedGeneration.remedy}"
    )


def unrequested(engine: object, session: object) -> RolloutError:
    """Return the error of a rollout whose engine has a response that nobody waits for."""
    return RolloutError(
        f"rollout.engine={type(engine).__name__}: it returned a response for session {session} that was not requested, "
        "or returned it before; set another rollout/engine"
    )


def finished_responses(answer: object) -> list[tuple[int, Generation]]:
    """Return the sessions and responses of an engine's `collect`, each of the types and lengths of `Generation`.

    Args:
        answer: What an engine returned, which may be anything.

    Raises:
        MalformedGeneration: With the first field that is something else.

    >>> finished_responses([(0, None)])
    Traceback (most recent call last):
        ...
    ragen_pl.engines.generation_check.MalformedGeneration: None for session 0, expected a Generation
    """
    if not isinstance(answer, list | tuple):
        raise MalformedGeneration(
            f"{shortened(answer)} of collect(), expected a list of pairs (session, Generation)"
        )
    for pair in answer:
        if not (isinstance(pair, tuple) and len(pair) == 2 and _is_whole(pair[0])):
            raise MalformedGeneration(
                f"{shortened(pair)} of collect(), expected a pair (session, Generation)"
            )
        session, generation = pair
        if not isinstance(generation, Generation):
            raise MalformedGeneration(
                f"{shortened(generation)} for session {session}, expected a Generation"
            )
        _check_fields(generation)
    return list(answer)


def _check_fields(generation: Generation) -> None:
    """Check the types and lengths of a response's fields."""
    length = _check_array(generation.ids, "ids", np.integer, "int64 [response]")
    logprobs = _check_array(generation.logprobs, "logprobs", np.floating, "float32 [response]")
    if logprobs != length:
        raise MalformedGeneration(f"{length} ids and {logprobs} log-probs")
    entropy, at_limit, version = (
        generation.entropy,
        generation.hit_length_limit,
        generation.version,
    )
    is_number = isinstance(entropy, float | np.floating) or _is_whole(entropy)
    if entropy is not None and not is_number:
        raise MalformedGeneration(f"entropy={shortened(entropy)}, expected a number or None")
    if not isinstance(at_limit, bool | np.bool_):
        raise MalformedGeneration(f"hit_length_limit={shortened(at_limit)}, expected true or false")
    if not _is_whole(version):
        raise MalformedGeneration(f"version={shortened(version)}, expected a whole number")
    if generation.values is not None:
        _check_array(generation.values, "values", np.floating, "float32 [response]", length=length)
    if generation.kept_ids is None and generation.kept_counts is None:
        return
    _check_array(
        generation.kept_counts, "kept_counts", np.integer, "int32 [response]", length=length
    )
    counts = np.asarray(generation.kept_counts)
    if (counts < 0).any():
        raise MalformedGeneration(f"kept_counts with {counts.min()}, expected 0 or more")
    _check_array(
        generation.kept_ids, "kept_ids", np.integer, "int32 [kept]", length=int(counts.sum())
    )
    kept = np.asarray(generation.kept_ids)
    holds = counts == 0
    holds[np.repeat(np.arange(length), counts)[kept == np.repeat(generation.ids, counts)]] = True
    if not holds.all():
        place = int(holds.argmin())
        raise MalformedGeneration(
            f"kept_ids without the id {generation.ids[place]} that was sampled at token {place + 1} of {length}"
        )


def _check_array(
    value: object, name: str, kind: type, expected: str, *, length: int | None = None
) -> int:
    """Return the length of a field that has to be a vector of a kind of number."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise MalformedGeneration(
            f"{name}={shortened(value)} ({type(value).__name__}), expected an array {expected}"
        )
    if value.ndim != 1:
        raise MalformedGeneration(f"{name} of shape {list(value.shape)}, expected {expected}")
    # others change the type of a batch, or torch can't read them
    fits = np.can_cast(value.dtype, np.int64 if kind is np.integer else np.float64)
    if not (fits and value.dtype.isnative and np.issubdtype(value.dtype, kind)):
        raise MalformedGeneration(f"{name} of type {value.dtype}, expected {expected}")
    if length is not None and len(value) != length:
        raise MalformedGeneration(f"{name} of length {len(value)}, expected {length}")
    return len(value)


def _is_whole(value: object) -> bool:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        return False
    return -(2**63) <= int(value) < 2**63


@dataclass(frozen=True, slots=True, eq=False)
class GenerationCheck:
    """Checks responses against their requests.

    Log-probs are finite and at most 0, but for rounding. Ids are in the vocabulary and not banned. A response has as
    many log-probs as ids, at least one, and at most as many as requested. It has one end-of-turn token, the last one,
    or has reached its length limit without any. Its entropy is that of some distribution over these ids, the critic's
    values are finite, and the ids that truncated sampling kept are in the vocabulary.

    Attributes:
        allowed: Bool `[vocab]`, ids that may be sampled.
        ends: Bool `[vocab]`, ids that end a response.
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
        for generation in generations:
            _check_fields(generation)
        limits = np.array([request.max_tokens for request in requests])
        lengths = np.array([len(generation.ids) for generation in generations])
        _require(lengths > 0, lengths, None, "no tokens")
        _require(lengths <= limits, lengths, None, "more tokens than requested")
        ids = np.concatenate([generation.ids for generation in generations])
        logprobs = np.concatenate([generation.logprobs for generation in generations])
        last = lengths.cumsum() - 1
        _require(np.isfinite(logprobs), logprobs, last, "log-probs that are not finite")
        given = [generation.entropy for generation in generations]
        entropies = np.array([entropy for entropy in given if entropy is not None])
        _require(np.isfinite(entropies), entropies, None, "an entropy that is not finite")
        _require(entropies >= -_ROUNDING, entropies, None, "an entropy below 0")
        most = math.log(max(1, int(self.allowed.sum()))) + _ENTROPY_ROUNDING
        problem = "an entropy above that of a uniform distribution over the vocabulary"
        _require(entropies <= most, entropies, None, problem)
        _require(logprobs <= _LARGEST_LOGPROB, logprobs, last, "log-probs above 0")
        _require(logprobs >= _MIN_LOGPROB, logprobs, last, "log-probs of ids that are not drawn")
        _require((ids >= 0) & (ids < len(self.allowed)), ids, last, "ids outside the vocabulary")
        _require(self.allowed[ids], ids, last, "ids that are never sampled")
        for generation in generations:
            if generation.values is not None:
                values = generation.values
                _require(np.isfinite(values), values, None, "values that are not finite")
            if generation.kept_ids is not None:
                kept = generation.kept_ids
                is_known = (kept >= 0) & (kept < len(self.allowed))
                _require(is_known, kept, None, "kept ids outside the vocabulary")
        ended = self.ends[ids]
        inside = np.ones(len(ids), dtype=bool)
        inside[last] = False
        _require(~(ended & inside), ids, last, "tokens after an end-of-turn token")
        at_limit = np.array([generation.hit_length_limit for generation in generations])
        _require(ended[last] | at_limit, ids[last], None, "an end without an end-of-turn token")
        cut = at_limit & (ended[last] | (lengths < limits))
        _require(~cut, ids[last], None, "a length limit that it has not reached")


def _require(holds: np.ndarray, values: np.ndarray, last: np.ndarray | None, problem: str) -> None:
    """Raise the problem with the first value for which it does not hold.

    Args:
        holds: Bool, for each value.
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
