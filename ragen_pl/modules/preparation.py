"""Preparation of an iteration's batch before its update: scores, masks, rewards and advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragen_pl.algorithms.credit import Estimator
from ragen_pl.algorithms.mismatch import Correction
from ragen_pl.algorithms.normalization import RewardNormalizer
from ragen_pl.base.distributed import rank, sum_over_ranks
from ragen_pl.base.finite import class_path, require_finite
from ragen_pl.data.batch import CreditLayout, Samples, TrajectoryBatch
from ragen_pl.data.microbatches import split_for_scoring, with_equal_count
from ragen_pl.engines.errors import RolloutError
from ragen_pl.metrics.update import TURNS, PreparationStatistics
from ragen_pl.models.distribution import TopLogprobs
from ragen_pl.models.truncation import KeptIds
from ragen_pl.modules.credit import assign_credit, kl_penalty, write_credit
from ragen_pl.modules.masking import Masks, TokenMasks, compute_token_masks, keep_top_entropy
from ragen_pl.modules.policy import PolicyModule, TokenScores
from ragen_pl.modules.scorer import Scorer
from ragen_pl.modules.sharding import gradients_inside
from ragen_pl.trajectory import Role, Span

if TYPE_CHECKING:
    from ragen_pl.metrics.importance import ImportanceStatistics

# of a rank, in the host's memory and in a checkpoint inside an update
KEPT_GIB = 4.0
# of models whose numbers overflow
_REMEDY = "set trainer.precision=32-true, or resume from an earlier checkpoint"


def scores_needed(
    scorer: Scorer, masks: Masks, correction: Correction | None, *, has_values: bool = False
) -> bool:
    """Return whether the credit or the update reads scores of the policy or the critic before the update.

    Without, the log-probs of the rollout engine are all that the update compares the policy with.

    Args:
        scorer: Policy, critic and reference.
        masks: M_loss and M_adv.
        correction: Correction of the engine's distribution to the trainer's.
        has_values: Whether the engine has read the critic's values.
    """
    loss = scorer.loss
    return (
        (scorer.critic is not None and not has_values)
        or scorer.truncation is not None
        or correction is not None
        or masks.observations
        or masks.top_entropy < 1
        or loss.entropy_target is not None
        or loss.echo is not None
        or (loss.kl is not None and loss.kl.changes_rewards)
    )


@torch.no_grad()
def prepare_batch(
    batch: TrajectoryBatch,
    scorer: Scorer,
    *,
    estimator: Estimator,
    masks: Masks,
    tokens_per_forward: int,
    normalizers: Sequence[RewardNormalizer] = (),
    importance: ImportanceStatistics | None = None,
    correction: Correction | None = None,
    score: bool = True,
) -> PreparationStatistics:
    """Fill in masks, values, reference log-probs, advantages and returns.

    Args:
        batch: Changed in place.
        scorer: Policy, critic and reference.
        estimator: Estimator of advantages and returns.
        masks: M_loss and M_adv.
        tokens_per_forward: Positions of a forward pass, padding included.
        normalizers: Normalizer of the episodes' returns of each environment; empty to leave them.
        importance: Statistics of importance masks, changed in place.
        correction: Correction of the engine's distribution to the trainer's.
        score: Whether policy and critic score the samples. Otherwise the samples have values where there is a critic,
            and nothing else is read of the scores, see `scores_needed`.

    Returns:
        Statistics of returns and values, and of log-probs where the policy has scored the samples.

    Raises:
        NonFiniteError: A score, a reward, an advantage or a weight is not finite.
        RolloutError: An average of the loss depends on how the history of an episode divides it into samples.
    """
    samples, loss, layout = batch.samples, scorer.loss, CreditLayout.of(batch)
    loss.check_division(layout, batch.episodes.advances)
    microbatches = with_equal_count(split_for_scoring(samples.length, tokens_per_forward))
    # a teacher that reads hints has other prompts before the same responses
    read, its_microbatches = samples, microbatches
    if batch.hinted is not None:
        read, batch.hinted = batch.hinted, None
        its_microbatches = with_equal_count(split_for_scoring(read.length, tokens_per_forward))
    reference = scorer.vocabulary_reference(read, batch.images, microbatches=its_microbatches)
    if isinstance(reference, TopLogprobs):
        batch.reference_ids, reference = reference
    in_reward = loss.kl is not None and loss.kl.changes_rewards
    scores = None
    if score:
        scores = _score(batch, scorer, microbatches, reference=reference if in_reward else None)
    if rank() == 0:
        loss.report_rows(rows=len(samples), episodes=len(batch.episodes.turns))
    if reference is None:
        reference = scorer.token_reference(
            read, batch.images, microbatches=its_microbatches, kept_ids=batch.kept_ids
        )

    scorer.bootstrap(batch, tokens_per_forward=tokens_per_forward)
    _check_scores(batch, scores, reference)

    token_masks = compute_token_masks(
        batch, layout, masks, kl=None if loss.kl is None else loss.kl.mask
    )
    if masks.importance is not None:
        _narrow_by_importance(
            batch, layout, token_masks, masks, scorer.policy, microbatches, importance
        )
    penalty, of_text = None, dict[str, Tensor]()
    if scores is not None:
        keep_top_entropy(token_masks, layout.gather(scores.entropy), fraction=masks.top_entropy)
        if in_reward:
            penalty = kl_penalty(samples, layout, token_masks, scores, reference, loss)
    if penalty is not None:
        require_finite(penalty, "algorithm.loss.kl: the penalties on the reward", remedy=_REMEDY)
    if scores is not None and scores.text_logprobs is not None and loss.echo is not None:
        from ragen_pl.algorithms.echo import role_weights

        # all text was measured; from here on it is what the loss has a weight for
        of_text = _nll_by_role(samples, scores.text_logprobs)
        samples.text = torch.where(
            role_weights(samples.text, samples.text > 0, loss.echo.weights) > 0, samples.text, 0
        )
    batch.reference = None if in_reward else reference
    batch.kl_weight = _kl_weight(batch, layout, token_masks, scorer, reference)
    estimates = assign_credit(
        batch,
        layout,
        token_masks,
        estimator,
        whiten_advantages=loss.whiten,
        normalizers=normalizers,
        penalty=penalty,
    )
    if batch.shares:
        # of mixtures only
        from ragen_pl.algorithms.mixture import environment_weights

        token_masks.loss_weight = environment_weights(
            token_masks.loss_weight,
            batch.episodes.environment,
            [*batch.shares.values()],
            all_reduce=sum_over_ranks,
        )
    if correction is not None and scores is not None:
        rollout = layout.gather(samples.rollout_logprobs)
        # text that was shown has no log-probs of the engine
        turn = torch.where(layout.gather(samples.spans) == Span.SHOWN, -1, layout.turn)
        weight = correction(layout.gather(scores.logprobs), rollout, turn)
        require_finite(weight, f"algorithm.loss.mismatch: the weights of {class_path(correction)}")
        estimates.advantages = estimates.advantages * weight
    write_credit(samples, layout, token_masks, estimates)

    statistics = PreparationStatistics().to(samples.returns.device)
    statistics.update(of_text)
    if scorer.critic is not None:
        _add_returns(statistics, samples)
    if scores is None:
        return statistics
    add_scores(statistics, samples, scores)
    if correction is not None:
        samples.old_logprobs = torch.where(samples.turn >= 0, scores.logprobs, 0.0)
    batch.entropy = _mean_over_ranks(scores.entropy[samples.loss_mask].double())
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
        kept_ids=batch.kept_ids,
    )
    if scores.values is not None:
        samples.values = scores.values
    if scores.kept_ids is not None:
        batch.kept_ids = scores.kept_ids
    if batch.kept_ids is not None:
        _check_kept_size(batch.kept_ids)
    shown = samples.spans == Span.SHOWN
    samples.old_logprobs = torch.where(shown, scores.logprobs, samples.old_logprobs)
    return scores


def _check_scores(
    batch: TrajectoryBatch, scores: TokenScores | None, reference: Tensor | None
) -> None:
    """Check the models' values for the sampled tokens, before anything is estimated from them."""
    samples, sampled = batch.samples, batch.samples.sampled
    require_finite(
        samples.rollout_logprobs[sampled],
        "rollout.engine: the sampled log-probs",
        remedy="check the engine",
    )
    computed = {
        "the policy's log-probs before the update": None
        if scores is None
        else scores.logprobs[sampled],
        "the policy's log-probs of the environment's text": None
        if scores is None
        else scores.text_logprobs,
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
    token_masks: TokenMasks,
    masks: Masks,
    policy: PolicyModule,
    microbatches: list[Tensor],
    statistics: ImportanceStatistics | None,
) -> None:
    from ragen_pl.modules.saliency import SaliencyReadout, keep_important, record_importance

    assert masks.importance is not None
    samples = batch.samples
    with gradients_inside(policy):
        scores: Tensor = policy(
            samples,
            batch.images,
            microbatches=microbatches,
            readout=SaliencyReadout(logits_mib=policy.logits_mib),
        )
    before = layout.scatter(token_masks.loss, like=samples.loss_mask)
    keep_important(token_masks, scores, batch, layout, keep=masks.importance)
    if statistics is not None:
        after = layout.scatter(token_masks.loss, like=samples.loss_mask)
        token = policy.bundle.image_token_id
        record_importance(
            statistics, samples, scores, before=before, after=after, image_token=token
        )


def _kl_weight(
    batch: TrajectoryBatch,
    layout: CreditLayout,
    token_masks: TokenMasks,
    scorer: Scorer,
    reference: Tensor | None,
) -> Tensor | None:
    """Return the weight of the divergence by token number, `[tokens]`; None for 1 each."""
    kl, samples = scorer.loss.kl, batch.samples
    if kl is None or kl.weights is None or reference is None or token_masks.kl is None:
        return None
    entropy = samples.temperature.new_zeros(len(reference))
    if kl.weights.confidence:
        entropy = scorer.reference_entropy(samples, reference, kept_ids=batch.kept_ids)
    sampled = samples.turn >= 0
    order = samples.token[sampled].argsort()
    of_kl = layout.scatter(token_masks.kl, like=samples.loss_mask)
    bundle = scorer.policy.bundle
    return kl.weights(
        entropy,
        samples.turn[sampled][order],
        of_kl[sampled][order],
        log_vocabulary=math.log(bundle.logit_count - len(bundle.banned(entropy.device))),
        all_reduce=sum_over_ranks,
    )


def _nll_by_role(samples: Samples, logprobs: Tensor) -> dict[str, Tensor]:
    """Return tokens of the environment's text and sums of their negative log-probs, for `PreparationStatistics`."""
    sums = {}
    for role, name in ((Role.OBSERVATION, "observation"), (Role.RESULT, "result")):
        of_role = (samples.text == role) & (samples.weight > 0)[:, None]
        sums[f"{name}_tokens"] = of_role.sum()
        sums[f"{name}_nll"] = -logprobs[of_role].double().sum()
    return sums


def _check_kept_size(kept_ids: KeptIds) -> None:
    size = kept_ids.nbytes / 2**30
    if size > KEPT_GIB:
        raise RolloutError(
            f"rollout.top_p: the ids that sampling kept at {len(kept_ids)} tokens take {size:.0f} GiB, more than "
            f"{KEPT_GIB:.0f}; set rollout.top_k=1000, or a smaller rollout.groups"
        )


def _mean_over_ranks(values: Tensor) -> float:
    """Return the mean of the values of all ranks, 0 without any."""
    sums = torch.stack([values.sum(), values.new_tensor(float(len(values)))])
    total, count = sum_over_ranks(sums).tolist()
    return total / max(count, 1.0)


def _add_returns(statistics: PreparationStatistics, samples: Samples) -> None:
    """Add the returns of samples, and their differences from the critic's values, to the statistics of this rank."""
    credited = samples.advantage_mask
    returns = samples.returns[credited].double()
    errors = (samples.returns - samples.values)[credited].double()
    statistics.update(
        {
            "credited": len(returns),
            "returns": returns.sum(),
            "returns_square": returns.square().sum(),
            "errors": errors.sum(),
            "errors_square": errors.square().sum(),
        }
    )


def add_scores(statistics: PreparationStatistics, samples: Samples, scores: TokenScores) -> None:
    """Add log-probs and entropies by the weights that the update begins with to the statistics of this rank."""
    # text that was shown has no log-probs of the engine
    sampled = samples.sampled & (samples.spans != Span.SHOWN)
    delta = (scores.logprobs.detach() - samples.rollout_logprobs)[sampled].double()
    # on a GPU, sums by index depend on the order of threads
    turn, size = samples.turn[sampled].clamp(max=TURNS).cpu(), TURNS + 1
    by_turn = {
        "tokens": torch.bincount(turn, minlength=size).tolist(),
        "mismatch": torch.bincount(turn, weights=delta.abs().cpu(), minlength=size).tolist(),
    }
    entropies = scores.entropy.detach()[samples.loss_mask].double()
    statistics.update(
        {
            "tokens": len(delta),
            "mismatch": delta.abs().sum(),
            "mismatch_max": delta.abs().max() if len(delta) else 0.0,
            "mismatch_kl": (delta.exp() - 1 - delta).sum(),
            "entropy": entropies.sum(),
            "trained": len(entropies),
            **{
                f"{name}_turn_{turn + 1}": values[turn]
                for name, values in by_turn.items()
                for turn in range(TURNS)
            },
        }
    )


def check_mismatch(metrics: Mapping[str, float], *, limit: float) -> None:
    """Check that an exact engine and the trainer give the sampled tokens equal log-probs, but for rounding.

    Args:
        metrics: Of `PreparationStatistics`.
        limit: Largest mean difference in nats a token.

    Raises:
        RolloutError: The difference is larger.
    """
    found, name = metrics["logprob_mismatch"], "logprob_mismatch_turn_"
    if found <= limit or math.isnan(found):
        return
    turns = {key.removeprefix(name): value for key, value in metrics.items() if name in key}
    by_turn = ", ".join(f"turn {turn}: {value:.3g}" for turn, value in turns.items())
    raise RolloutError(
        f"update.max_mismatch={limit:g}: the engine's log-probs of the sampled tokens differ by {found:.3g} nats a "
        f"token from the trainer's ({by_turn or 'late turns'}), which in float32 is no rounding: it has sampled with "
        "other weights or other inputs than are trained; set another rollout/engine, or update.max_mismatch=null to "
        "train on anyway"
    )
