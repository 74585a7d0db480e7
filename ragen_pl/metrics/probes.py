"""Does what an agent thinks depend on what it sees? Probes by cross-scoring reasoning under other prompts.

After RAGEN-2 (Wang et al., 2026, arXiv 2604.06268). Scoring itself is `callbacks.cross_scoring`'s part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class Regime(StrEnum):
    """What entropy within a prompt and information between prompts say together."""

    DIVERSE = "diverse"  # varied, and about the prompt
    TEMPLATE_COLLAPSE = "template collapse"  # varied, and the same whatever the prompt
    COMPRESSED = "compressed"  # hardly varied, and about the prompt
    LOW_ENTROPY_COLLAPSE = "low-entropy collapse"  # one text for everything


@dataclass(frozen=True, kw_only=True)
class ReasoningProbe:
    """Metrics of N pieces of reasoning scored under N prompts, in nats summed over a piece's tokens."""

    conditional_entropy: float  # H(Z|X)
    marginal_entropy: float  # H(Z), the prompts' mixture for the marginal
    mutual_information: float  # I(X;Z) = H(Z) - H(Z|X), at most log N
    bound: float  # log N
    retrieval_accuracy: float  # how often a piece is likeliest under its own prompt; ties share
    chance: float  # 1/N
    entropy_per_token: float  # H(Z|X) by token

    @property
    def information_share(self) -> float:
        """The mutual information as a share of its bound, 0 with one prompt."""
        return self.mutual_information / self.bound if self.bound else 0.0

    def regime(self, *, low_entropy: float = 0.05, low_information: float = 0.25) -> Regime:
        """Return the regime.

        Args:
            low_entropy: nats a token below which reasoning hardly varies.
            low_information: share of log N below which it hardly depends on the prompt.
        """
        if self.information_share >= low_information:
            varied = self.entropy_per_token >= low_entropy
            return Regime.DIVERSE if varied else Regime.COMPRESSED
        varied = self.entropy_per_token >= low_entropy
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

    def __str__(self) -> str:
        """Tell the metrics in one line, the bound beside what it bounds."""
        return (
            f"I(X;Z) {self.mutual_information:.2f} of at most {self.bound:.2f} nats (log N), "
            f"H(Z|X) {self.conditional_entropy:.2f} ({self.entropy_per_token:.3f} a token), "
            f"H(Z) {self.marginal_entropy:.2f}, retrieval {self.retrieval_accuracy:.2f} "
            f"(chance {self.chance:.2f}): {self.regime()}"
        )


def probe_reasoning(scores: Tensor, tokens: Tensor) -> ReasoningProbe:
    """Return the probe of cross-scored reasoning.

    With `L_ij = log p(z_i | x_j)`: `H(Z|X) = -mean L_ii`; the marginal is the mixture over the prompts,
    `log p(z_i) = logsumexp_j L_ij - log N`; `I = mean(L_ii - log p(z_i))`, which no policy can raise above
    log N. The prompts must differ from each other.

    Args:
        scores: `[reasoning, prompt]`, log-probabilities summed over tokens, own prompt on the diagonal.
        tokens: `[reasoning]`, tokens of each piece.

    Raises:
        ValueError: the scores are not a square of at least one prompt.

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
