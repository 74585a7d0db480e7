"""Preparation of an iteration's batch before its update: scores, masks, rewards and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragen_pl.algorithms.credit import Estimator
from ragen_pl.algorithms.kl import KLEstimator
from ragen_pl.algorithms.mismatch import Correction
from ragen_pl.algorithms.normalization import RewardNormalizer
from ragen_pl.data.batch import CreditLayout, Minibatch, Samples, TrajectoryBatch
from ragen_pl.data.microbatches import split_for_scoring, with_equal_count
from ragen_pl.distributed import rank, sum_over_ranks
from ragen_pl.engines.errors import RolloutError
from ragen_pl.finite import class_path, require_finite
from ragen_pl.metrics.importance import ImportanceStatistics
from ragen_pl.metrics.update import PreparationStatistics
from ragen_pl.models.truncation import KeptIds, Truncation
from ragen_pl.modules.credit import assign_credit, kl_penalty, write_credit
from ragen_pl.modules.critic import CriticModule, last_values, score_together
from ragen_pl.modules.forward import ReferenceStates
from ragen_pl.modules.losses import KLPlace, UpdateLoss
from ragen_pl.modules.masking import (
    Masks,
    TokenMasks,
    keep_important,
    keep_top_entropy,
    record_importance,
    token_masks,
)
from ragen_pl.modules.policy import PolicyModule, StateReadout, TokenReadout, TokenScores
from ragen_pl.modules.reference import ReferencePolicy
from ragen_pl.modules.saliency import SaliencyReadout
from ragen_pl.modules.sharding import gradients_inside
from ragen_pl.trajectory import Span

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle


# of a rank, in the host's memory and in a checkpoint inside an update
REFERENCE_GIB = 16.0
KEPT_GIB = 4.0
# of models whose numbers overflow
_REMEDY = "set trainer.precision=32-true, or resume from an earlier checkpoint"


@dataclass(slots=True)
class Scorer:
    """Policy, critic and reference, which score the same samples.

    Where sampling was truncated, each scores the distribution over the ids that it kept.
    """

    policy: PolicyModule
    critic: CriticModule | None
    reference: ReferencePolicy | None
    loss: UpdateLoss
    truncation: Truncation | None = None

    def score(
        self,
        samples: Samples,
        images: Sequence[Tensor],
        *,
        microbatches: list[Tensor],
        reference: ReferenceStates | None = None,
    ) -> TokenScores:
        """Return log-probs, the ids that the engine kept and, with a critic, values of the sampled tokens."""
        return score_together(
            self.policy,
            self.critic,
            samples,
            images,
            reference=reference,
            microbatches=microbatches,
            truncation=self.truncation,
        )

    def score_minibatch(self, batch: Minibatch) -> TokenScores:
        """Return the scores that the update's loss needs, with the full divergence if the loss uses it."""
        return score_together(
            self.policy,
            self.critic,
            batch.samples,
            batch.images,
            microbatches=batch.microbatches,
            reference=self.reference_states(batch.reference),
            entropy_gradient=self.loss.entropy_weight(batch.entropy) != 0,
            kept=batch.kept,
        )

    def reference_states(self, scores: Tensor | None) -> ReferenceStates | None:
        """Return the reference's states and head if the divergence is over the vocabulary.

        Args:
            scores: Return value of `vocabulary_reference` or `token_reference`.
        """
        if scores is None or self.reference is None or scores.ndim == 1:
            return None
        return ReferenceStates(self.reference, scores)

    def bootstrap(self, batch: TrajectoryBatch, *, tokens_per_forward: int) -> None:
        """Set the value of the state after the last turn of truncated episodes. All ranks must call it."""
        if self.critic is None:
            return
        final = batch.final
        own = [] if final is None else split_for_scoring(final.length, tokens_per_forward)
        microbatches = with_equal_count(own)
        if not microbatches:
            return
        # a rank without truncated episodes computes what others wait for
        samples = batch.samples if final is None else final
        values = last_values(
            self.policy, self.critic, samples, batch.images, microbatches=microbatches
        )
        if final is not None:
            batch.episodes.bootstrap[final.episode] = values.float()

    def vocabulary_reference(
        self, samples: Samples, images: Sequence[Tensor], *, microbatches: list[Tensor]
    ) -> Tensor | None:
        """Return the reference's states by token number, `[tokens, hidden]`, for a divergence over the vocabulary.

        Log-probs of the whole vocabulary would take up to a hundred times their memory. None for other divergences,
        and if there is no penalty at present.

        Raises:
            RolloutError: The states take more than `REFERENCE_GIB`.
        """
        if self.reference is None or self.loss.kl is None or self.loss.kl.coefficient == 0:
            return None
        if self.loss.kl.estimator is not KLEstimator.FULL:
            return None
        _check_reference_size(samples, self.policy.bundle)
        states: Tensor = self.reference(
            samples, images, microbatches=microbatches, readout=StateReadout()
        )
        return states

    def token_reference(
        self,
        samples: Samples,
        images: Sequence[Tensor],
        *,
        microbatches: list[Tensor],
        kept: KeptIds | None,
    ) -> Tensor | None:
        """Return the reference's log-probs by token number, `[tokens]`, for a divergence estimated from them.

        None for the divergence over the vocabulary, and if there is no penalty at present.

        Args:
            samples: Sequences.
            images: Images that `samples.image_index` refers to.
            microbatches: Rows that are computed together.
            kept: Ids that sampling kept, by token number.
        """
        if self.reference is None or self.loss.kl is None or self.loss.kl.coefficient == 0:
            return None
        if self.loss.kl.estimator is KLEstimator.FULL:
            return None
        readout = TokenReadout(logits_mib=self.policy.logits_mib, kept=kept)
        scores: TokenScores = self.reference(
            samples, images, microbatches=microbatches, readout=readout
        )
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
    importance: ImportanceStatistics | None = None,
    correction: Correction | None = None,
) -> PreparationStatistics:
    """Fill in masks, values, reference log-probs, advantages and returns.

    Args:
        batch: Changed in place.
        scorer: Policy, critic and reference.
        estimator: Estimator of advantages and returns.
        masks: M_loss and M_adv.
        tokens_per_forward: Positions of a forward pass, padding included.
        normalizer: Normalizer of the episodes' returns.
        importance: Statistics of importance masks, changed in place.
        correction: Correction of the engine's distribution to the trainer's.

    Returns:
        Statistics of log-probs, returns and values.

    Raises:
        NonFiniteError: A score, a reward, an advantage or a weight is not finite.
        RolloutError: An average of the loss depends on how the history of an episode divides it into samples.
    """
    samples, loss, layout = batch.samples, scorer.loss, CreditLayout.of(batch)
    loss.check_division(layout, batch.episodes.advances)
    microbatches = with_equal_count(split_for_scoring(samples.length, tokens_per_forward))
    reference = scorer.vocabulary_reference(samples, batch.images, microbatches=microbatches)
    in_reward = loss.kl is not None and loss.kl.place is KLPlace.REWARD
    scores = _score(batch, scorer, microbatches, reference=reference if in_reward else None)
    if rank() == 0:
        loss.report_rows(rows=len(samples), episodes=len(batch.episodes.turns))
    if reference is None:
        reference = scorer.token_reference(
            samples, batch.images, microbatches=microbatches, kept=batch.kept
        )

    scorer.bootstrap(batch, tokens_per_forward=tokens_per_forward)
    _check_scores(batch, scores, reference)

    kept = token_masks(batch, layout, masks, kl=None if loss.kl is None else loss.kl.mask)
    if masks.importance is not None:
        _narrow_by_importance(batch, layout, kept, masks, scorer.policy, microbatches, importance)
    keep_top_entropy(kept, layout.gather(scores.entropy), fraction=masks.top_entropy)

    penalty = kl_penalty(samples, layout, kept, scores, reference, loss) if in_reward else None
    if penalty is not None:
        require_finite(penalty, "algorithm.loss.kl: the penalties on the reward", remedy=_REMEDY)
    batch.reference = None if in_reward else reference
    estimates = assign_credit(
        batch,
        layout,
        kept,
        estimator,
        whiten_advantages=loss.whiten,
        normalizer=normalizer,
        penalty=penalty,
    )
    if correction is not None:
        behavior = layout.gather(samples.behavior_logprobs)
        weight = correction(layout.gather(scores.logprobs), behavior, layout.turn)
        require_finite(weight, f"algorithm.loss.mismatch: the weights of {class_path(correction)}")
        estimates.advantages = estimates.advantages * weight
    write_credit(samples, layout, kept, estimates)

    entropies = scores.entropy[samples.loss_mask].double()
    statistics = _statistics(samples, scores, entropies)
    if correction is not None:
        # the ratio of the loss is taken to the trainer's own log-probs before the update
        samples.behavior_logprobs = torch.where(samples.turn >= 0, scores.logprobs, 0.0)
    batch.entropy = _mean_over_ranks(entropies)
    return statistics


def _score(
    batch: TrajectoryBatch, scorer: Scorer, microbatches: list[Tensor], *, reference: Tensor | None
) -> TokenScores:
    """Score the samples and set their values, the kept ids and the log-probs of shown text."""
    samples = batch.samples
    scores = scorer.score(
        samples,
        batch.images,
        microbatches=microbatches,
        reference=scorer.reference_states(reference),
    )
    if scores.values is not None:
        samples.values = scores.values
    if scores.kept is not None:
        _check_kept_size(scores.kept)
        batch.kept = scores.kept
    # shown text was not sampled: its log-probs before the update serve as those of the behavior policy
    shown = samples.spans == Span.SHOWN
    samples.behavior_logprobs = torch.where(shown, scores.logprobs, samples.behavior_logprobs)
    return scores


def _check_scores(batch: TrajectoryBatch, scores: TokenScores, reference: Tensor | None) -> None:
    """Check the models' values for the sampled tokens, before anything is estimated from them."""
    samples, sampled = batch.samples, batch.samples.sampled
    require_finite(
        samples.behavior_logprobs[sampled],
        "rollout.engine: the sampled log-probs",
        remedy="check the engine",
    )
    computed = {
        "the policy's log-probs before the update": scores.logprobs[sampled],
        "the critic's values": samples.values[sampled],
        "the critic's values after truncated episodes": batch.episodes.bootstrap,
        "algorithm.loss.kl: the reference's scores": reference,
    }
    for name, values in computed.items():
        if values is not None:
            require_finite(values, name, remedy=_REMEDY)


def _narrow_by_importance(
    batch: TrajectoryBatch,
    layout: CreditLayout,
    kept: TokenMasks,
    masks: Masks,
    policy: PolicyModule,
    microbatches: list[Tensor],
    statistics: ImportanceStatistics | None,
) -> None:
    assert masks.importance is not None
    samples = batch.samples
    with gradients_inside(policy):
        scores: Tensor = policy(
            samples,
            batch.images,
            microbatches=microbatches,
            readout=SaliencyReadout(logits_mib=policy.logits_mib),
        )
    before = layout.scatter(kept.loss, like=samples.loss_mask)
    keep_important(kept, scores, batch, layout, keep=masks.importance)
    if statistics is not None:
        after = layout.scatter(kept.loss, like=samples.loss_mask)
        token = policy.bundle.image_token_id
        record_importance(
            statistics, samples, scores, before=before, after=after, image_token=token
        )


def _check_reference_size(samples: Samples, bundle: ModelBundle) -> None:
    tokens, width = int((samples.turn >= 0).sum()), bundle.hidden_size
    size = tokens * width * bundle.model.dtype.itemsize / 2**30
    if size > REFERENCE_GIB:
        raise RolloutError(
            f"algorithm.loss.kl.estimator=full: the reference's states of {tokens} tokens take {size:.0f} GiB, more "
            f"than {REFERENCE_GIB:.0f}; set algorithm.loss.kl.estimator=k3, or a smaller rollout.groups"
        )


def _check_kept_size(kept: KeptIds) -> None:
    size = kept.nbytes / 2**30
    if size > KEPT_GIB:
        raise RolloutError(
            f"rollout.top_p: the ids that sampling kept at {len(kept)} tokens take {size:.0f} GiB, more than "
            f"{KEPT_GIB:.0f}; set rollout.top_k=1000, or a smaller rollout.groups"
        )


def _mean_over_ranks(values: Tensor) -> float:
    """Return the mean of the values of all ranks, 0 without any."""
    sums = torch.stack([values.sum(), values.new_tensor(float(len(values)))])
    total, count = sum_over_ranks(sums).tolist()
    return total / max(count, 1.0)


def _statistics(samples: Samples, scores: TokenScores, entropies: Tensor) -> PreparationStatistics:
    """Return the statistics of this rank; `entropies` are those of its trained tokens, in nats."""
    # text that was shown has no log-probs of the engine
    sampled = samples.sampled & (samples.spans != Span.SHOWN)
    # returns and values are compared where a critic gives values
    compared = samples.advantage_mask & (scores.values is not None)
    delta = (scores.logprobs - samples.behavior_logprobs)[sampled].double()
    returns = samples.returns[compared].double()
    errors = (samples.returns - samples.values)[compared].double()
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
            "entropy": entropies.sum(),
            "trained": len(entropies),
        }
    )
    return statistics
