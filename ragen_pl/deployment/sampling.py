"""Sampling parameters of a request, which `ragen_pl.serve` honours; what it leaves out is as in the run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragen_pl.agent_programs.serving.errors import RequestError, unsupported
from ragen_pl.base.seeding import derive_seed
from ragen_pl.models.truncation import Truncation
from ragen_pl.rollout.settings import EpisodeSettings

MAX_TEMPERATURE = 2.0
# below it the most probable token is taken: the logits would overflow
_MIN_TEMPERATURE = 1e-3
_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_REFUSED = {"chat_template_kwargs": "set context.template_kwargs for all requests"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a response is sampled.

    Attributes:
        temperature: Temperature; 0 is greedy.
        truncation: Ids that sampling keeps; None for all.
        seed: Seed of all random draws.
    """

    temperature: float
    truncation: Truncation | None
    seed: int


def read_sampling(given: Mapping[str, Any], settings: EpisodeSettings) -> Sampling:
    """Return the sampling parameters of a request.

    Args:
        given: Those that the request has, of the types that `read_request` has checked.
        settings: Those of the run.

    Raises:
        RequestError: One is not valid, or cannot be honoured.
    """
    for name, neutral in _NEUTRAL.items():
        if given.get(name, neutral) != neutral:
            raise unsupported(name, given[name], "the policy was trained without it; leave it out")
    for name, remedy in _REFUSED.items():
        if given.get(name):
            raise unsupported(name, given[name], remedy)
    temperature = _number(given, "temperature", settings.temperature, largest=MAX_TEMPERATURE)
    top_p = _number(given, "top_p", settings.top_p, largest=1.0)
    min_p = _number(given, "min_p", settings.min_p, largest=1.0)
    if top_p == 0.0 or min_p == 1.0:
        name = "top_p=0" if top_p == 0.0 else "min_p=1"
        raise RequestError(400, f"{name} keeps no token; send temperature=0 for greedy responses")
    top_k = settings.top_k
    if (own := given.get("top_k")) is not None:
        if own < -1:
            raise RequestError(400, f"top_k={own!r}: expected a whole number, 0 for all tokens")
        top_k = own if own > 0 else None
    greedy = temperature < _MIN_TEMPERATURE
    truncation = Truncation(top_p=top_p, top_k=top_k, min_p=min_p) or None
    return Sampling(
        temperature=0.0 if greedy else temperature,
        truncation=None if greedy else truncation,
        seed=derive_seed("serve", given["seed"]) if "seed" in given else secrets.randbits(48),
    )


def _number(given: Mapping[str, Any], name: str, default: float, *, largest: float) -> float:
    value = given.get(name, default)
    if not 0 <= value <= max(largest, default):
        raise RequestError(400, f"{name}={value!r}: expected a number from 0 to {largest:g}")
    return float(value)
