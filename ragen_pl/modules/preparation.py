"""What is computed of an iteration's batch before its update: values, reference log-probs, credit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_pl.algorithms.credit import Estimator
from ragen_pl.algorithms.kl import KLEstimator
from ragen_pl.algorithms.normalization import RewardNormalizer
from ragen_pl.data.batch import Minibatch, Samples, TrajectoryBatch
from ragen_pl.distributed import sum_over_ranks
from ragen_pl.metrics.importance import ImportanceStatistics
from ragen_pl.metrics.update import PreparationStatistics
from ragen_pl.modules.credit import assign_credit, correct_mismatch
from ragen_pl.modules.critic import CriticModule, last_values, score_together
from ragen_pl.modules.forward import split_by_tokens
from ragen_pl.modules.importance import keep_important
from ragen_pl.modules.losses import KLPlace, LossSettings, Masks
from ragen_pl.modules.masking import apply_masks, keep_top_entropy
from ragen_pl.modules.policy import PolicyModule, TokenScores, VocabularyReadout
from ragen_pl.modules.reference import ReferencePolicy, divergence
from ragen_pl.modules.saliency import SaliencyReadout
from ragen_pl.trajectory import Span


@dataclass(slots=True)
class Scorer:
    """Policy, critic and reference, asked together about the same samples."""

    policy: PolicyModule
    critic: CriticModule | None
    reference: ReferencePolicy | None
    loss: LossSettings

    def score(
        self,
        samples: Samples,
        pixel_values: Tensor,
        *,
        microbatches: list[Tensor],
        reference: Tensor | None = None,
    ) -> TokenScores:
        """Return log-probs and, with a critic, values of the sampled tokens."""
        return score_together(
            self.policy,
            self.critic,
            samples,
            pixel_values,
            reference=reference,
            microbatches=microbatches,
        )

    def score_minibatch(self, batch: Minibatch) -> TokenScores:
        """Return what the update's loss needs, the divergence over the vocabulary where it is asked for."""
        full = self.loss.kl is not None and self.loss.kl.estimator is KLEstimator.FULL
        reference = batch.reference if full else None
        return score_together(
            self.policy, self.critic, batch.samples, batch.pixel_values, reference=reference
        )

    def bootstrap(self, batch: TrajectoryBatch) -> None:
        """Value the state after the last turn of episodes that were cut from outside."""
        if batch.final is None or self.critic is None:
            return
        values = last_values(self.policy, self.critic, batch.final, batch.pixel_values)
        batch.episodes.bootstrap[batch.final.episode] = values.float()

    def reference_logprobs(
        self, samples: Samples, pixel_values: Tensor, *, microbatches: list[Tensor]
    ) -> Tensor | None:
        """Return the reference's log-probs by token number: `[tokens, vocab]`, or `[tokens]` for estimates.

        None where there is no penalty now.
        """
        if self.reference is None or self.loss.kl is None or self.loss.kl.coefficient == 0:
            return None
        if self.loss.kl.estimator is KLEstimator.FULL:
            log_probs: Tensor = self.reference(
                samples, pixel_values, microbatches=microbatches, readout=VocabularyReadout()
            )
            return log_probs
        scores: TokenScores = self.reference(samples, pixel_values, microbatches=microbatches)
        sampled = samples.turn >= 0
        result = scores.logprobs.new_zeros(int(sampled.sum()))
        result[samples.token[sampled]] = scores.logprobs[sampled]
        return result


@torch.no_grad()
def prepare_batch(
    batch: TrajectoryBatch,
    scorer: Scorer,
    *,
    estimator: Estimator,
    masks: Masks,
    tokens_per_forward: int,
    normalizer: RewardNormalizer | None = None,
    report: ImportanceStatistics | None = None,
) -> PreparationStatistics:
    """Fill masks, values, reference log-probs, advantages and returns in; return what was seen on the way."""
    loss, samples = scorer.loss, batch.samples
    apply_masks(batch, masks, kl=None if loss.kl is None else loss.kl.mask)
    microbatches = split_by_tokens(samples.length, tokens_per_forward)
    if masks.importance is not None:
        policy = scorer.policy
        effect: Tensor = policy(
            samples, batch.pixel_values, microbatches=microbatches, readout=SaliencyReadout()
        )
        slot = policy.bundle.image_token_id
        keep_important(batch, effect, masks.importance, image_token=slot, report=report)
    reference = scorer.reference_logprobs(samples, batch.pixel_values, microbatches=microbatches)
    in_reward = loss.kl is not None and loss.kl.place is KLPlace.REWARD
    full = reference if in_reward and reference is not None and reference.ndim == 2 else None
    scores = scorer.score(samples, batch.pixel_values, microbatches=microbatches, reference=full)
    if scores.values is not None:
        samples.values = scores.values
        scorer.bootstrap(batch)
    # text that was not sampled: its log-probs before the update stand for those
    shown = samples.spans == Span.SHOWN
    samples.behavior_logprobs = torch.where(shown, scores.logprobs, samples.behavior_logprobs)
    keep_top_entropy(batch, scores.entropy, fraction=masks.top_entropy)
    penalty = _penalty(samples, scores, reference, loss) if in_reward else None
    batch.reference = None if in_reward else reference
    assign_credit(
        batch,
        estimator,
        whiten_advantages=loss.whiten,
        normalizer=normalizer,
        penalty=penalty,
    )
    statistics = _statistics(samples, scores)
    if loss.mismatch is not None:
        correct_mismatch(batch, scores.logprobs, loss.mismatch)
    batch.entropy = _mean_entropy(samples, scores)
    return statistics


def _penalty(
    samples: Samples, scores: TokenScores, reference: Tensor | None, loss: LossSettings
) -> Tensor | None:
    """Return what the divergence from the reference takes from each token's reward, `[rows, time]`."""
    if loss.kl is None or reference is None:
        return None
    of_samples = reference[samples.token[samples.turn >= 0]]
    away = divergence(scores, samples, of_samples, estimator=loss.kl.estimator)
    return loss.kl.coefficient * torch.where(samples.kl_mask, away, 0.0)


def _mean_entropy(samples: Samples, scores: TokenScores) -> float:
    """Return the policy's mean entropy over the trained tokens of all ranks, nats."""
    inside = scores.entropy[samples.loss_mask].double()
    total, count = sum_over_ranks(
        torch.stack([inside.sum(), inside.new_tensor(float(len(inside)))])
    ).tolist()
    return total / max(count, 1.0)


def _statistics(samples: Samples, scores: TokenScores) -> PreparationStatistics:
    sampled, credited = samples.sampled, samples.advantage_mask
    delta = (scores.logprobs - samples.behavior_logprobs)[sampled].double()
    returns = samples.returns[credited].double()
    errors = (samples.returns - samples.values)[credited].double()
    statistics = PreparationStatistics().to(delta.device)
    statistics.update(
        {
            "tokens": len(delta),
            "mismatch": delta.abs().sum(),
            "mismatch_max": delta.abs().max() if len(delta) else 0.0,
            "mismatch_kl": (delta.exp() - 1 - delta).sum(),
            "credited": len(returns),
            "returns": returns.sum(),
            "returns_square": returns.square().sum(),
            "errors": errors.sum(),
            "errors_square": errors.square().sum(),
        }
    )
    return statistics
