"""What the update phase did: losses, divergences, clipping, gradient norms, and how well values explain returns."""

from __future__ import annotations

from ragen_pl.metrics.sums import NamedSums, ratio

_PER_TOKEN = ("entropy", "approx_kl", "clipped_low", "clipped_high", "dual_clipped")
_PER_STEP = ("loss", "policy_loss", "value_loss", "kl_loss", "entropy_bonus")


class UpdateStatistics(NamedSums):
    """Sums over the minibatches of an update phase.

    `*_loss` and `loss` are sums over steps of this rank's share of a global mean, so they add up
    over ranks; `tokens` counts trained tokens.
    """

    def __init__(self) -> None:
        super().__init__((*_PER_TOKEN, *_PER_STEP, "tokens", "kl", "kl_tokens"))

    def figures(self, *, steps: int) -> dict[str, float]:
        """Return the metrics of an update phase of this many optimizer steps."""
        total = self.compute()
        figures = {name: ratio(total[name], total["tokens"]) for name in _PER_TOKEN}
        figures["clip_fraction"] = figures["clipped_low"] + figures["clipped_high"]
        figures |= {name: ratio(total[name], steps) for name in _PER_STEP}
        if total["kl_tokens"]:
            figures["reference_kl"] = ratio(total["kl"], total["kl_tokens"])
        return figures


class PreparationStatistics(NamedSums):
    """Trainer against behavior log-probs, and values against returns, before an update."""

    def __init__(self) -> None:
        names = (
            "tokens",
            "mismatch",
            "mismatch_kl",
            "returns",
            "returns_square",
            "errors",
            "errors_square",
            "credited",
        )
        super().__init__(names, maxima=("mismatch_max",))

    def compute(self) -> dict[str, float]:
        """Return `logprob_mismatch` (mean and max |Δ|, k3 KL) and `explained_variance`."""
        total = self.totals()
        count = total["credited"]
        spread = total["returns_square"] - ratio(total["returns"] ** 2, count)
        errors = total["errors_square"] - ratio(total["errors"] ** 2, count)
        return {
            "logprob_mismatch": ratio(total["mismatch"], total["tokens"]),
            "logprob_mismatch_max": total["mismatch_max"],
            "logprob_mismatch_kl": ratio(total["mismatch_kl"], total["tokens"]),
            "explained_variance": 1.0 - ratio(errors, spread),
        }
