"""Credit assignment of an iteration: turn rewards, advantages, returns, written into its samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ragen_pl.algorithms.credit import Estimator, carry_into_mask, place_turn_rewards
from ragen_pl.algorithms.mismatch import Correction
from ragen_pl.algorithms.normalization import RewardNormalizer
from ragen_pl.algorithms.whitening import whiten
from ragen_pl.data.batch import TrajectoryBatch, credit_layout, gather_credit, scatter_credit
from ragen_pl.distributed import sum_over_ranks


def assign_credit(
    batch: TrajectoryBatch,
    estimator: Estimator,
    *,
    whiten_advantages: bool,
    normalizer: RewardNormalizer | None = None,
    penalty: Tensor | None = None,
) -> None:
    """Estimate advantages and returns and write them into the samples.

    A truncated episode bootstraps with `episodes.bootstrap`, a terminated one with 0.

    Args:
        batch: with masks and values; changed in place.
        estimator: of advantages and returns.
        whiten_advantages: over all trained tokens of all ranks.
        normalizer: of the episodes' returns.
        penalty: `[rows, time]`: what is taken from the reward of each sampled token (KL in the reward).
    """
    credit, rows, columns = credit_layout(batch)
    episodes, samples = batch.episodes, batch.samples
    turn_rewards = episodes.turn_rewards
    if normalizer is not None:
        turn_rewards = normalizer(
            turn_rewards, episodes.turns, episodes.group, all_reduce=sum_over_ranks
        )
        credit.returns = turn_rewards.sum(1)
    credit.rewards = place_turn_rewards(turn_rewards, credit.turn, credit.advantage_mask)
    if penalty is not None:
        taken = gather_credit(penalty, rows, columns)
        credit.rewards = credit.rewards - carry_into_mask(taken, credit.advantage_mask, credit.turn)
        credit.returns = credit.returns - taken.sum(1)
    estimates = estimator(credit, all_reduce=sum_over_ranks)
    advantages = estimates.advantages
    if whiten_advantages:
        advantages = whiten(advantages, credit.loss_mask, all_reduce=sum_over_ranks)
    advantages = advantages * episodes.weight[:, None]
    samples.advantages = scatter_credit(advantages, rows, columns, like=samples.advantages)
    samples.returns = scatter_credit(estimates.returns, rows, columns, like=samples.returns)


def correct_mismatch(batch: TrajectoryBatch, trainer: Tensor, correction: Correction) -> None:
    """Weigh advantages by p_trainer / p_engine and let the trainer's log-probs be the loss's old ones.

    Args:
        batch: with advantages; changed in place.
        trainer: `[rows, time]` log-probs of the sampled tokens before the update.
        correction: ratio to weight.
    """
    samples = batch.samples
    weight = correction(trainer, samples.behavior_logprobs, samples.turn)
    samples.advantages = samples.advantages * weight
    samples.behavior_logprobs = torch.where(samples.turn >= 0, trainer, 0.0)
