"""Credit assignment of a batch: rewards on tokens, advantages and returns, in the credit layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragen_pl.algorithms.credit import (
    AdvantageInputs,
    Advantages,
    Estimator,
    carry_into_mask,
    place_turn_rewards,
)
from ragen_pl.algorithms.equality import sums_of
from ragen_pl.algorithms.normalization import RewardNormalizer
from ragen_pl.algorithms.whitening import whiten_by_environment
from ragen_pl.base.distributed import sum_over_ranks
from ragen_pl.base.finite import class_path, require_finite
from ragen_pl.data.batch import CreditLayout, Samples, TrajectoryBatch
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.masking import TokenMasks
from ragen_pl.modules.policy import TokenScores
from ragen_pl.modules.reference import divergence


def kl_penalty(
    samples: Samples,
    layout: CreditLayout,
    token_masks: TokenMasks,
    scores: TokenScores,
    reference: Tensor | None,
    loss: UpdateLoss,
) -> Tensor | None:
    """Return the KL penalty on each token's reward, `[episodes, tokens]`.

    Args:
        samples: Samples that were scored.
        layout: Credit layout of the batch.
        token_masks: Masks of the tokens.
        scores: Scores of the policy.
        reference: Log-probs of the reference by token number, or its states if `scores` hold the divergence; None
            without a penalty.
        loss: Loss with the settings of the penalty.
    """
    if loss.kl is None or token_masks.kl is None or reference is None:
        return None
    of_samples = reference
    if scores.kl is None:
        of_samples = reference[samples.token[samples.turn >= 0]]
    kl = layout.gather(divergence(scores, samples, of_samples, estimator=loss.kl.estimator))
    if loss.kl.bound is not None:
        kl = kl.clamp(-loss.kl.bound, loss.kl.bound)
    return loss.kl.coefficient * torch.where(token_masks.kl, kl, 0.0)


def assign_credit(
    batch: TrajectoryBatch,
    layout: CreditLayout,
    token_masks: TokenMasks,
    estimator: Estimator,
    *,
    whiten_advantages: bool,
    normalizers: Sequence[RewardNormalizer] = (),
    penalty: Tensor | None = None,
) -> Advantages:
    """Place the rewards and estimate advantages and returns, in each environment of a mixture by itself.

    A truncated episode bootstraps with `episodes.bootstrap`, a terminated one with 0.

    Args:
        batch: Trajectories with values.
        layout: Credit layout of the batch.
        token_masks: Masks of the tokens.
        estimator: Estimator of advantages and returns.
        whiten_advantages: Whiten over all trained tokens of an environment, those of all ranks.
        normalizers: Normalizer of the episodes' returns of each environment; empty to leave them.
        penalty: `[episodes, tokens]`, subtracted from the rewards of the tokens (KL in the reward).

    Returns:
        Estimates in the credit layout.

    Raises:
        NonFiniteError: The normalizer or the estimator returned a number that is not finite.
    """
    environment, count = batch.episodes.environment, max(1, len(batch.shares))
    estimates = Advantages(
        advantages=torch.zeros(layout.turn.shape, device=layout.turn.device),
        returns=torch.zeros(layout.turn.shape, device=layout.turn.device),
    )
    # also where this rank has no episode of an environment: estimators add up over all ranks
    for number in range(count):
        episodes = (environment == number).nonzero()[:, 0]
        inputs = _inputs(
            batch,
            episodes,
            layout.select(episodes),
            token_masks.select(episodes),
            normalizer=normalizers[number] if normalizers else None,
            penalty=None if penalty is None else penalty[episodes],
        )
        own = _estimate(inputs, estimator, bootstrapped=_bootstrapped(batch)[episodes])
        estimates.advantages[episodes] = own.advantages.float()
        estimates.returns[episodes] = own.returns.float()
    name = class_path(estimator)
    require_finite(estimates.advantages, f"algorithm.estimator: the advantages of {name}")
    require_finite(estimates.returns, f"algorithm.estimator: the returns of {name}")
    if whiten_advantages:
        estimates.advantages = whiten_by_environment(
            estimates.advantages,
            token_masks.loss,
            environment,
            environments=count,
            all_reduce=sum_over_ranks,
        )
    estimates.advantages = estimates.advantages * batch.episodes.weight[:, None]
    return estimates


def _inputs(
    batch: TrajectoryBatch,
    numbers: Tensor,
    layout: CreditLayout,
    token_masks: TokenMasks,
    *,
    normalizer: RewardNormalizer | None,
    penalty: Tensor | None,
) -> AdvantageInputs:
    """Return the estimator's inputs of some episodes.

    Args:
        batch: Trajectories with values.
        numbers: Numbers of the episodes.
        layout: Their credit layout.
        token_masks: Masks of their tokens.
        normalizer: Normalizer of their returns; None to leave them.
        penalty: `[episodes, tokens]`, subtracted from the rewards of the tokens.
    """
    episodes = batch.episodes.select(numbers)
    turn_rewards, center = episodes.turn_rewards, None
    if normalizer is not None:
        normalized = normalizer(
            turn_rewards, episodes.turns, episodes.group, all_reduce=sum_over_ranks
        )
        turn_rewards, center = normalized.turn_rewards, normalized.center
        require_finite(
            turn_rewards, f"algorithm.normalize: the rewards of {class_path(normalizer)}"
        )
    rewards, returns = (
        place_turn_rewards(turn_rewards, layout.turn, token_masks.advantage),
        sums_of(turn_rewards),
    )
    if penalty is not None:
        rewards = rewards - carry_into_mask(penalty, token_masks.advantage, layout.turn)
        returns = returns - penalty.sum(1)
    if center is not None:
        returns = returns - center
    # a rank may have none where others have some
    known = int(sum_over_ranks((episodes.state >= 0).sum()))
    has_states = bool(known) or not len(episodes.turns)
    has_potentials = bool(episodes.final_potential.isfinite().any()) or not len(episodes.turns)
    return AdvantageInputs(
        rewards=rewards,
        values=layout.gather(batch.samples.values),
        advantage_mask=token_masks.advantage,
        loss_mask=token_masks.loss,
        turn=layout.turn,
        group=episodes.group,
        bootstrap=episodes.bootstrap,
        returns=returns,
        center=center,
        state=episodes.state if has_states else None,
        final_state=episodes.final_state if has_states else None,
        potential=episodes.potential if has_potentials else None,
        final_potential=episodes.final_potential if has_potentials else None,
        advances=None if bool(episodes.advances.all()) else episodes.advances,
        success=episodes.success,
        terms=dict(zip(batch.terms, episodes.terms.unbind(1), strict=True)),
        penalty=penalty,
        logprobs=layout.gather(batch.samples.old_logprobs),
    )


def _estimate(inputs: AdvantageInputs, estimator: Estimator, *, bootstrapped: Tensor) -> Advantages:
    """Apply an estimator, with every return less the episode's `inputs.center`.

    The values V' of a critic that learns such returns are those of the rewards less the center c:
    `A(r, V' + c) = A(r - c in every return, V')`, whatever the discounts are.
    """
    center = inputs.center
    if center is None or inputs.values is None or not estimator.needs_values:
        return estimator(inputs, all_reduce=sum_over_ranks)
    inputs.values = inputs.values + center[:, None]
    inputs.bootstrap = inputs.bootstrap + torch.where(bootstrapped, center, 0.0)
    estimates = estimator(inputs, all_reduce=sum_over_ranks)
    estimates.returns = estimates.returns - torch.where(inputs.learned, center[:, None], 0.0)
    return estimates


def _bootstrapped(batch: TrajectoryBatch) -> Tensor:
    """Mark the episodes with a value after their last turn, bool `[episodes]`."""
    marked = torch.zeros_like(batch.episodes.truncated)
    if batch.final is not None:
        marked[batch.final.episode] = True
    return marked


def write_credit(
    samples: Samples, layout: CreditLayout, token_masks: TokenMasks, estimates: Advantages
) -> None:
    """Set the masks, advantages and returns of the samples."""
    token_masks.write(samples, layout)
    samples.advantages = layout.scatter(estimates.advantages, like=samples.advantages)
    samples.returns = layout.scatter(estimates.returns, like=samples.returns)
