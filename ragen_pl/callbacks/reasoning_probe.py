"""Probe of whether an agent's reasoning depends on its observation: cross-scoring under other prompts.

After RAGEN-2 (Wang et al., 2026, arXiv 2604.06268). The first reasoning of several episodes is scored under
the first prompt of each of them. Nothing is sampled: a run with probes has the weights of the run without.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import torch
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor

from ragen_pl.base.distributed import gather_over_ranks, values_of
from ragen_pl.data.collate import collate
from ragen_pl.data.microbatches import split_by_tokens
from ragen_pl.models.images import content_key
from ragen_pl.modules.policy import PolicyModule, TokenScores
from ragen_pl.trajectory import (
    REASONING_SPANS,
    EpisodeStatus,
    Observation,
    Span,
    Trajectory,
    Turn,
)

DIAGNOSTICS: Final = (
    "conditional_entropy",
    "conditional_entropy_per_token",
    "marginal_entropy",
    "mutual_information",
    "mutual_information_bound",
    "mutual_information_share",
    "retrieval_accuracy",
    "retrieval_above_chance",
    "regime",
)
"""Names of the probe's metrics. The config reads this constant without importing the module."""


class Regime(StrEnum):
    """State of a policy's reasoning, by entropy within a prompt and information between prompts."""

    DIVERSE = "diverse"
    """Reasoning varies and depends on the prompt."""
    TEMPLATE_COLLAPSE = "template collapse"
    """Reasoning varies and does not depend on the prompt."""
    COMPRESSED = "compressed"
    """Reasoning hardly varies for one prompt and depends on the prompt."""
    LOW_ENTROPY_COLLAPSE = "low-entropy collapse"
    """One text for all prompts."""


_IN_WORDS = {
    Regime.DIVERSE: "vary, and depend on the prompt",
    Regime.TEMPLATE_COLLAPSE: "vary, but hardly depend on the prompt (template collapse)",
    Regime.COMPRESSED: "depend on the prompt, and are nearly the same each time for one prompt",
    Regime.LOW_ENTROPY_COLLAPSE: "are nearly the same for all prompts (low-entropy collapse)",
}


@dataclass(frozen=True, kw_only=True)
class ReasoningProbe:
    """Metrics of N thoughts scored under N prompts, in nats summed over a thought's tokens.

    Attributes:
        conditional_entropy: H(Z|X).
        marginal_entropy: H(Z), with the mixture over the prompts as the marginal.
        mutual_information: I(X;Z) = H(Z) - H(Z|X), at most log N.
        bound: Log N.
        retrieval_accuracy: Fraction of thoughts that are likeliest under their own prompt; ties count partly.
        chance: Retrieval accuracy of guessing, 1/N.
        entropy_per_token: H(Z|X) divided by the mean number of tokens.
    """

    conditional_entropy: float
    marginal_entropy: float
    mutual_information: float
    bound: float
    retrieval_accuracy: float
    chance: float
    entropy_per_token: float

    @property
    def information_share(self) -> float:
        """The mutual information as a fraction of its bound, 0 with one prompt."""
        return self.mutual_information / self.bound if self.bound else 0.0

    def regime(self, *, low_entropy: float = 0.05, low_information: float = 0.25) -> Regime:
        """Return the regime.

        Args:
            low_entropy: Nats a token below which reasoning hardly varies.
            low_information: Fraction of log N below which reasoning hardly depends on the prompt.
        """
        varied = self.entropy_per_token >= low_entropy
        if self.information_share >= low_information:
            return Regime.DIVERSE if varied else Regime.COMPRESSED
        return Regime.TEMPLATE_COLLAPSE if varied else Regime.LOW_ENTROPY_COLLAPSE

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name, for a logger."""
        return {
            "conditional_entropy": self.conditional_entropy,
            "conditional_entropy_per_token": self.entropy_per_token,
            "marginal_entropy": self.marginal_entropy,
            "mutual_information": self.mutual_information,
            "mutual_information_bound": self.bound,
            "mutual_information_share": self.information_share,
            "retrieval_accuracy": self.retrieval_accuracy,
            "retrieval_above_chance": self.retrieval_accuracy - self.chance,
            "regime": float(list(Regime).index(self.regime())),
        }

    def in_words(self) -> str:
        """Return for a log what the metrics say."""
        found = f"{self.retrieval_accuracy:.0%} of them fit their own prompt best, {self.chance:.0%} would by chance"
        return f"{_IN_WORDS[self.regime()]}; {found}"

    def __str__(self) -> str:
        """Return the metrics in one line, each with its bound."""
        return (
            f"I(X;Z) {self.mutual_information:.2f} of at most {self.bound:.2f} nats (log N), "
            f"H(Z|X) {self.conditional_entropy:.2f} ({self.entropy_per_token:.3f} a token), "
            f"H(Z) {self.marginal_entropy:.2f}, retrieval {self.retrieval_accuracy:.2f} "
            f"(chance {self.chance:.2f}): {self.regime()}"
        )


@dataclass(slots=True)
class FirstThought:
    """The prompt of an episode's first turn and the response's tokens up to the end of its reasoning.

    Attributes:
        group: Group of the episode.
        prompt_ids: int64 `[prompt]`.
        images: Images of the prompt.
        ids: Sampled ids including the opening tag, int64 `[reasoning]`.
        temperature: Sampling temperature.
        patches: Patches shown of each image; None for all.
    """

    group: int
    prompt_ids: np.ndarray
    images: list[np.ndarray]
    ids: np.ndarray
    temperature: float
    patches: list[np.ndarray] | None = None


def first_thoughts(trajectories: Sequence[Trajectory], *, count: int) -> list[FirstThought]:
    """Return up to `count` first thoughts under different prompts.

    They are spread evenly over the groups of all ranks, and are the same on every rank and for every number
    of ranks. A group counts once, by its first member with a thought. All ranks must call this together. A rank
    receives the digests of all prompts, and of the thoughts the chosen ones alone.
    """
    own: dict[int, FirstThought] = {}
    for trajectory in trajectories:
        thought = _first_thought(trajectory)
        if thought is not None:
            own.setdefault(thought.group, thought)
    digests = {group: _prompt_digest(thought) for group, thought in own.items()}
    owner_of: dict[int, int] = {}
    group_of: dict[bytes, int] = {}
    gathered = list(enumerate(gather_over_ranks(digests)))
    rows = [(group, digest, number) for number, part in gathered for group, digest in part.items()]
    for group, digest, number in sorted(rows):
        owner_of[group] = number
        group_of.setdefault(digest, group)
    groups, count = list(group_of.values()), min(count, len(group_of))
    chosen = [groups[index * len(groups) // count] for index in range(count)]
    sources = sorted({owner_of[group] for group in chosen})
    sent = values_of(sources, {group: own[group] for group in chosen if group in own})
    by_group = {group: thought for part in sent for group, thought in part.items()}
    return [by_group[group] for group in chosen]


def _prompt_digest(thought: FirstThought) -> bytes:
    digest = hashlib.blake2b(thought.prompt_ids.tobytes(), digest_size=16)
    for image in thought.images:
        digest.update(content_key(image))
    return digest.digest()


def _first_thought(trajectory: Trajectory) -> FirstThought | None:
    if not trajectory.turns:
        return None
    turn = trajectory.turns[0]
    positions = np.flatnonzero(np.isin(turn.spans, REASONING_SPANS))
    if turn.think is None or not len(positions):
        return None
    return FirstThought(
        group=trajectory.group,
        prompt_ids=turn.prompt_ids,
        images=list(turn.prompt_images),
        ids=turn.response_ids[: positions[-1] + 1],
        temperature=turn.temperature,
        patches=turn.prompt_patches,
    )


@torch.no_grad()
def cross_score(
    policy: PolicyModule, thoughts: Sequence[FirstThought], *, tokens_per_forward: int = 16_384
) -> tuple[Tensor, Tensor]:
    """Return log p(thought i | prompt j), float64 `[N, N]`, and the thoughts' lengths, int64 `[N]`.

    The policy must be in eval mode. Its distribution is the sampling distribution at the thought's
    temperature.
    """
    pairs = [_pair(thought, prompt) for thought in thoughts for prompt in thoughts]
    batch = collate(pairs, policy.bundle)
    batch = move_data_to_device(batch, next(policy.parameters()).device)
    microbatches = split_by_tokens(batch.samples.length, tokens_per_forward)
    scored: TokenScores = policy(batch.samples, batch.images, microbatches=microbatches)
    values = scored.logprobs.double().sum(1).cpu().view(len(thoughts), len(thoughts))
    return values, torch.tensor([len(thought.ids) for thought in thoughts])


def _pair(thought: FirstThought, prompt: FirstThought) -> Trajectory:
    """Return an episode whose only response to `prompt` is `thought`."""
    count = len(thought.ids)
    turn = Turn(
        observation=Observation(text=""),
        prompt_ids=prompt.prompt_ids,
        prompt_images=prompt.images,
        prompt_patches=prompt.patches,
        response_ids=thought.ids,
        response_logprobs=np.zeros(count, np.float32),
        response_entropy=0.0,
        spans=np.full(count, Span.THINK, np.int8),
        response_text="",
        think="",
        actions=[],
        action_is_valid=True,
        action_is_effective=True,
        hit_length_limit=False,
        temperature=thought.temperature,
    )
    return Trajectory(
        group=0, member=0, seed=0, turns=[turn], status=EpisodeStatus.TERMINATED, success=False
    )


def probe_reasoning(scores: Tensor, tokens: Tensor) -> ReasoningProbe:
    """Return the probe of cross-scored reasoning.

    With `L_ij = log p(z_i | x_j)`: `H(Z|X) = -mean L_ii`; the marginal is the mixture over the prompts,
    `log p(z_i) = logsumexp_j L_ij - log N`; `I = mean(L_ii - log p(z_i))`, which no policy can raise above
    log N. The prompts must differ from each other.

    Args:
        scores: Log-probabilities summed over tokens, `[reasoning, prompt]`, own prompt on the diagonal.
        tokens: Number of tokens of each thought, `[reasoning]`.

    Raises:
        ValueError: The scores are not a square matrix, or it is empty.

    >>> probe = probe_reasoning(torch.tensor([[-1.0, -1.0], [-3.0, -3.0]]), torch.tensor([2, 2]))
    >>> probe.mutual_information, probe.conditional_entropy, probe.retrieval_accuracy
    (0.0, 2.0, 0.5)
    """
    count = len(scores)
    if count == 0 or scores.shape != (count, count):
        raise ValueError(
            f"found scores of shape {tuple(scores.shape)}, expected [N, N], N at least 1"
        )
    scores = scores.double()
    own = scores.diagonal()
    marginal = scores.logsumexp(1) - math.log(count)
    best = scores >= scores.amax(1, keepdim=True)
    hits = best.diagonal().double() / best.sum(1)
    return ReasoningProbe(
        conditional_entropy=float(-own.mean()),
        marginal_entropy=float(-marginal.mean()),
        mutual_information=float((own - marginal).mean()),
        bound=math.log(count),
        retrieval_accuracy=float(hits.mean()),
        chance=1.0 / count,
        entropy_per_token=float(-own.sum() / tokens.sum().clamp(min=1)),
    )
