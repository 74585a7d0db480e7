"""What the turn loop asks of a rollout engine: token ids and images in, sampled ids and log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(kw_only=True, slots=True)
class Prompt:
    """The exact ids a policy is shown, image slots expanded, and the images of those slots in order."""

    ids: np.ndarray  # int64 [prompt]
    images: list[np.ndarray] = field(default_factory=list)  # each uint8 [height, width, 3]
    patches: list[np.ndarray] | None = None  # int64: those that each image shows; None for all
    left_out: tuple[int, ...] = ()  # numbers of the window's turns that are not shown


@dataclass(kw_only=True, slots=True)
class GenerationRequest:
    """One response to sample.

    `session` names the environment: an engine may keep what it computed for a session's earlier prompt and
    use it where the new prompt starts with the same ids. The ids alone decide what is generated.
    """

    session: int
    prompt: Prompt
    max_tokens: int
    temperature: float  # 0 is greedy
    uniforms: np.ndarray  # float64 [max_tokens] in [0, 1): the response's only source of randomness


@dataclass(kw_only=True, slots=True)
class Generation:
    """A sampled response."""

    ids: np.ndarray  # int64 [response], the end-of-turn token included where it was sampled
    logprobs: np.ndarray  # float32 [response], of the distribution sampled from
    entropy: float  # nats, mean over the response's tokens
    hit_length_limit: bool  # the length limit came before an end-of-turn token


class RolloutEngine(Protocol):
    """Generates responses for many environments at once."""

    def generate(self, requests: Sequence[GenerationRequest], *, keep: bool) -> list[Generation]:
        """Return a response for each request, in order. `keep` says that sessions will go on from here."""
        ...

    def load_weights(self, version: int) -> None:
        """Use the policy's weights of this version from now on, and void every cache."""
        ...

    def release(self) -> None:
        """Forget all sessions and give back what they held."""
        ...
