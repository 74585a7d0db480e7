"""Statistics of importance masks: scores by kind of token, and the fraction of tokens kept in M_loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ragen_pl.metrics.sums import NamedSums, ratio
from ragen_pl.trajectory import SAMPLED_SPANS

KINDS = ("image", "text", *(span.name.lower() for span in SAMPLED_SPANS))


class ImportanceStatistics(NamedSums):
    """Sums over the positions of an iteration, by kind of token.

    `image` and `text` are tokens of the prompt. All other kinds are sampled tokens, by their block.
    """

    def __init__(self) -> None:
        super().__init__(
            [f"{kind}_{name}" for kind in KINDS for name in ("score", "count", "trained", "kept")]
        )

    def add(
        self,
        kind: str,
        scores: Tensor,
        positions: Tensor,
        *,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> None:
        """Add the positions of a kind.

        Args:
            kind: One of `KINDS`.
            scores: Importance scores, `[rows, time]`.
            positions: The kind's positions, bool `[rows, time]`.
            before: M_loss before the importance mask, for sampled tokens, bool `[rows, time]`.
            after: M_loss after the importance mask, bool `[rows, time]`.
        """
        sums: dict[str, float | Tensor] = {
            f"{kind}_score": torch.where(positions, scores, 0.0).double().sum(),
            f"{kind}_count": positions.sum(),
        }
        if before is not None and after is not None:
            sums |= {
                f"{kind}_trained": (positions & before).sum(),
                f"{kind}_kept": (positions & after).sum(),
            }
        self.update(sums)

    def compute(self) -> dict[str, float]:
        """Return by kind: `score_share_*` of the total score, `score_mean_*`, and the fraction `kept_*` of M_loss."""
        totals = self.totals()
        total_score = sum(totals[f"{kind}_score"] for kind in KINDS)
        metrics = {}
        for kind in KINDS:
            if not totals[f"{kind}_count"]:
                continue
            score = totals[f"{kind}_score"]
            metrics[f"score_share_{kind}"] = ratio(score, total_score)
            metrics[f"score_mean_{kind}"] = ratio(score, totals[f"{kind}_count"])
            if totals[f"{kind}_trained"]:
                metrics[f"kept_{kind}"] = ratio(totals[f"{kind}_kept"], totals[f"{kind}_trained"])
        return metrics
