"""Statistics of the update phase: losses, divergences, clipping, and how well values explain returns."""

from __future__ import annotations

from ragen_pl.algorithms.equality import EQUAL
from ragen_pl.metrics.sums import NamedSums, ratio

TURNS = 8
"""First turns of an episode, whose mismatch and divergence are measured for each."""
_BY_TURN = range(1, TURNS + 1)

_PER_TOKEN = ("entropy", "approx_kl", "clipped_low", "clipped_high", "dual_clipped")
_POSITIONS = ("positions", "computed_positions")
_PER_STEP = ("loss", "policy_loss", "value_loss", "kl_loss", "entropy_bonus")


class UpdateStatistics(NamedSums):
    """Sums over the minibatches of an update phase.

    `loss` and `*_loss` are sums over steps of this rank's share of a global mean; they add up over ranks.
    `tokens` is the number of trained tokens. `positions` are those of whole samples. `kl_turn_1` and so on are the
    divergences of the first `TURNS` turns.
    """

    def __init__(self) -> None:
        others = ("tokens", "kl", "kl_tokens", "echo_loss", "text_tokens")
        by_turn = [f"{name}_turn_{turn}" for name in ("kl", "kl_tokens") for turn in _BY_TURN]
        super().__init__((*_PER_TOKEN, *_PER_STEP, *others, *by_turn, *_POSITIONS))

    def metrics(self, *, steps: int) -> dict[str, float]:
        """Return the metrics of an update phase.

        Args:
            steps: Number of optimizer steps with a trained token.
        """
        total = self.compute()
        metrics = {name: ratio(total[name], total["tokens"]) for name in _PER_TOKEN}
        metrics["clip_fraction"] = metrics["clipped_low"] + metrics["clipped_high"]
        metrics |= {name: ratio(total[name], steps) for name in _PER_STEP}
        metrics["shared_positions"] = 1.0 - ratio(total["computed_positions"], total["positions"])
        if total["kl_tokens"]:
            metrics["reference_kl"] = ratio(total["kl"], total["kl_tokens"])
            metrics |= {
                f"reference_kl_turn_{turn}": total[f"kl_turn_{turn}"] / count
                for turn in _BY_TURN
                if (count := total[f"kl_tokens_turn_{turn}"])
            }
        if total["text_tokens"]:
            metrics["echo_loss"] = ratio(total["echo_loss"], steps)
        return metrics


_TEXTS = ("observation", "result")


class PreparationStatistics(NamedSums):
    """Entropy, and mismatch of trainer and behavior log-probs and of values and returns, before an update."""

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
            "entropy",
            "trained",
            *(f"{name}_{sum_}" for name in _TEXTS for sum_ in ("nll", "tokens")),
            *(f"{name}_turn_{turn}" for name in ("tokens", "mismatch") for turn in _BY_TURN),
        )
        super().__init__(names, maxima=("mismatch_max",))

    def compute(self) -> dict[str, float]:
        """Return `logprob_mismatch` (mean and max of the absolute difference, k3 KL) and `policy_entropy`.

        `logprob_mismatch_turn_1` and so on are the means of the first `TURNS` turns, as far as there are such turns.
        `policy_entropy` is the trainer's own, in nats a token: some rollout engines report none. With a critic there is
        `explained_variance` too. With `loss.echo`, `observation_nll` and `result_nll` are mean negative log-probs of
        the environment's text, and of the results of tool calls, that follow a response.
        """
        total = self.totals()
        metrics = {
            "logprob_mismatch": ratio(total["mismatch"], total["tokens"]),
            "logprob_mismatch_max": total["mismatch_max"],
            "logprob_mismatch_kl": ratio(total["mismatch_kl"], total["tokens"]),
            "policy_entropy": ratio(total["entropy"], total["trained"]),
        }
        metrics |= {
            f"logprob_mismatch_turn_{turn}": total[f"mismatch_turn_{turn}"] / count
            for turn in _BY_TURN
            if (count := total[f"tokens_turn_{turn}"])
        }
        metrics |= {
            f"{name}_nll": total[f"{name}_nll"] / count
            for name in _TEXTS
            if (count := total[f"{name}_tokens"])
        }
        if count := total["credited"]:
            spread = total["returns_square"] - total["returns"] ** 2 / count
            if spread <= EQUAL**2 * total["returns_square"]:
                spread = 0.0  # nothing to explain: the returns are equal but for rounding
            errors = total["errors_square"] - total["errors"] ** 2 / count
            metrics["explained_variance"] = 1.0 - ratio(errors, spread)
        return metrics
