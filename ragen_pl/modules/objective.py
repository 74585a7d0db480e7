"""What an update step minimises: the policy's loss, the critic's, the anchor to the reference, the entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragen_pl.algorithms.aggregation import Aggregation, aggregate
from ragen_pl.algorithms.value_loss import value_loss
from ragen_pl.data.batch import Minibatch
from ragen_pl.modules.losses import LossSettings
from ragen_pl.modules.policy import TokenScores
from ragen_pl.modules.reference import divergence


@dataclass(slots=True)
class Objective:
    """A minibatch's share of the optimizer step's loss, and the sums that its metrics are made of."""

    loss: Tensor
    sums: dict[str, Tensor]


def objective(scores: TokenScores, batch: Minibatch, settings: LossSettings) -> Objective:
    """Return the loss of a minibatch.

    Its sums are divided by the optimizer step's counts over all ranks and accumulated parts, so that
    the gradient does not depend on how a step's samples are split. Rows of weight 0 count nowhere.
    """
    mask = batch.samples.loss_mask & batch.real
    weight = batch.samples.loss_weight * batch.real
    surrogate = settings.policy(
        scores.logprobs,
        batch.samples.behavior_logprobs,
        batch.samples.advantages,
        mask,
        turn=batch.samples.turn,
    )
    how, constant = settings.policy.aggregation, settings.policy.constant
    policy = _reduce(
        surrogate.losses, weight, batch, how=how, tokens=batch.tokens, constant=constant
    )
    entropy = _reduce(
        scores.entropy, weight, batch, how=how, tokens=batch.tokens, constant=constant
    )
    value = _value_loss(scores, batch, settings)
    kl, kl_sum, kl_tokens = _reference_kl(scores, batch, settings)
    loss = policy + settings.value_coefficient * value + kl
    loss = loss - settings.entropy_weight(batch.entropy) * entropy
    sums = {
        "tokens": surrogate.tokens,
        "entropy": (scores.entropy * mask).sum(),
        "approx_kl": surrogate.approx_kl,
        "clipped_low": surrogate.clipped_low,
        "clipped_high": surrogate.clipped_high,
        "dual_clipped": surrogate.dual_clipped,
        "loss": loss,
        "policy_loss": policy,
        "value_loss": value,
        "kl_loss": kl,
        "entropy_bonus": entropy,
        "kl": kl_sum,
        "kl_tokens": kl_tokens,
    }
    return Objective(loss, {name: value.detach() for name, value in sums.items()})


def _value_loss(scores: TokenScores, batch: Minibatch, settings: LossSettings) -> Tensor:
    """Return the critic's loss over M_adv, where returns are defined."""
    if scores.values is None:
        return scores.logprobs.new_zeros(())
    samples = batch.samples
    mask = samples.advantage_mask & batch.real
    losses = value_loss(
        scores.values, samples.returns, mask, old_values=samples.values, clip=settings.value_clip
    ).losses
    return _reduce(losses, mask, batch, how=Aggregation.TOKEN_MEAN, tokens=batch.credited)


def _reference_kl(
    scores: TokenScores, batch: Minibatch, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted penalty, and the plain divergence's sum and tokens."""
    zero = scores.logprobs.new_zeros(())
    if settings.kl is None or batch.reference is None or settings.kl.coefficient == 0:
        return zero, zero, zero
    away = divergence(scores, batch.samples, batch.reference, estimator=settings.kl.estimator)
    mask = batch.samples.kl_mask & batch.real
    penalty = _reduce(away, mask, batch, how=settings.kl.aggregation, tokens=batch.kl_tokens)
    return settings.kl.coefficient * penalty, (away * mask).sum(), mask.sum()


def _reduce(
    losses: Tensor,
    mask: Tensor,
    batch: Minibatch,
    *,
    how: Aggregation,
    tokens: Tensor,
    constant: float | None = None,
) -> Tensor:
    """Aggregate token losses, `tokens` being the mask's count over the whole optimizer step."""
    return aggregate(
        losses, mask, how=how, tokens=tokens, sequences=batch.sequences, constant=constant
    )
