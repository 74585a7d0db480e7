"""Loss of an update step: the policy's and the critic's loss, the penalty on the divergence, the entropy bonus."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import Tensor

from ragen_pl.algorithms.aggregation import Aggregation, aggregate
from ragen_pl.algorithms.kl import DivergenceWeights, KLEstimator
from ragen_pl.algorithms.masks import all_but_action
from ragen_pl.algorithms.mismatch import Correction
from ragen_pl.algorithms.policy_loss import PolicyLoss
from ragen_pl.algorithms.value_loss import value_loss
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, NonNegative, Positive
from ragen_pl.base.instances import instances
from ragen_pl.base.run_facts import ChecksRun, RunFacts
from ragen_pl.data.batch import CreditLayout, Minibatch
from ragen_pl.engines.errors import RolloutError
from ragen_pl.metrics.update import TURNS
from ragen_pl.models.distribution import TopTokens
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.masking import Mask
from ragen_pl.modules.policy import TokenScores
from ragen_pl.modules.reference import InitialPolicy, OfPolicy, Reference, divergence
from ragen_pl.prompts.hint import Hint
from ragen_pl.trajectory import Role

log = logging.getLogger(__name__)


class KLPlace(StrEnum):
    """Place of the penalty on the divergence: in the loss, or subtracted from the tokens' rewards."""

    LOSS = "loss"
    REWARD = "reward"


@checked
@dataclass(kw_only=True)
class ReferenceKL:
    """Penalty on the divergence from the reference policy, on the tokens of its own mask.

    The gradient of KL(policy‖reference) is that of full_reverse or k2 in the loss, or of k1 in the reward. k3 and full
    in the loss have the gradient of KL(reference‖policy), k1 in the loss has none on average. In the reward the other
    estimators have the gradient of another penalty, by exact enumeration 6% (full), 9% (k2, k3) and 143% (abs) of the
    one asked for, so only k1 is accepted there.

    With a `coefficient` of 0 the reference is kept and not scored, so the penalty can be switched on later.

    Attributes:
        coefficient: Weight of the penalty.
        estimator: Measure of the divergence.
        mask: Tokens that the penalty applies to.
        aggregation: How the divergences of tokens are averaged in the loss.
        place: In the loss or in the reward.
        reference: How the reference is built and how it follows the policy; None for no penalty, which keeps none.
        clip_norm: Largest norm of the penalty's gradient in the loss, which is then clipped apart from that of the
            other terms and takes a second backward pass; None for one norm of all terms.
        bound: Largest log ratio of a token in the reward, either way; None for no bound.
        top_k: Number of most likely tokens that a sum over the vocabulary tells apart, where all others are one
            outcome; None for all.
        top_k_of: Whose most likely tokens these are.
        weights: Weights of tokens by their turn and by how sure the reference is; None for 1 each.
        hint: What the reference reads in place of observations, so that it knows more than the policy; None for the
            policy's prompts.

    Raises:
        ValueError: The penalty is in the reward with another estimator than k1 or with `clip_norm`, in the loss with a
            `bound`, has a coefficient and no reference, or `top_k` or `weights` and no sum over the vocabulary.
    """

    needs_trust = ()

    coefficient: NonNegative
    estimator: KLEstimator = KLEstimator.FULL
    mask: Mask = all_but_action
    aggregation: Literal[
        Aggregation.TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_SUM
    ] = Aggregation.SEQ_MEAN_TOKEN_SUM
    place: KLPlace = KLPlace.LOSS
    reference: Reference | None = field(default_factory=InitialPolicy)
    clip_norm: Positive | None = None
    bound: Positive | None = None
    top_k: Count | None = None
    top_k_of: Literal["policy", "reference"] = "policy"
    weights: DivergenceWeights | None = None
    hint: Hint | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and not self.estimator.over_vocabulary:
            raise ValueError(
                f"algorithm.loss.kl.weights with estimator={self.estimator}: they are read from the reference's whole "
                "distributions; set algorithm.loss.kl.weights=null, or estimator=full_reverse"
            )
        if self.top_k is not None and not self.estimator.over_vocabulary:
            raise ValueError(
                f"algorithm.loss.kl.top_k={self.top_k}: estimator={self.estimator} reads the sampled tokens alone; set "
                "algorithm.loss.kl.top_k=null, or estimator=full_reverse"
            )
        if self.reference is None and self.coefficient:
            raise ValueError(
                f"algorithm.loss.kl.coefficient={self.coefficient:g}: there is nothing to diverge from "
                "(algorithm.loss.kl.reference=null); set "
                "algorithm.loss.kl.reference._target_=ragen_pl.modules.reference.InitialPolicy, or coefficient=0.0"
            )
        if self.place is KLPlace.LOSS and self.bound is not None:
            raise ValueError(
                f"algorithm.loss.kl.bound={self.bound:g}: bounds the penalty on the reward, and in the loss a token "
                "beyond it would have no gradient; set algorithm.loss.kl.bound=null, or place=reward estimator=k1"
            )
        if self.place is KLPlace.REWARD and self.clip_norm is not None:
            raise ValueError(
                f"algorithm.loss.kl.clip_norm={self.clip_norm}: in the reward (algorithm.loss.kl.place=reward) the "
                "penalty has no gradient of its own; set algorithm.loss.kl.clip_norm=null, or place=loss"
            )
        if self.place is KLPlace.REWARD and self.estimator is not KLEstimator.K1:
            raise ValueError(
                f"algorithm.loss.kl.estimator={self.estimator}: in the reward (algorithm.loss.kl.place=reward) it has "
                "not the gradient of the divergence; set algorithm.loss.kl.estimator=k1, or place=loss"
            )

    @property
    def top(self) -> TopTokens | None:
        """Tokens that a sum over the vocabulary tells apart; None for all."""
        return None if self.top_k is None else TopTokens(self.top_k, self.top_k_of == "reference")

    @property
    def changes_rewards(self) -> bool:
        """Whether the penalty is taken from the rewards."""
        return self.place is KLPlace.REWARD and self.coefficient > 0


@checked
@dataclass(frozen=True, kw_only=True)
class TextPrediction:
    """Cross-entropy of the environment's text that follows a response, at temperature 1 (ECHO; see `algorithms.echo`).

    It is averaged over its own tokens of the optimizer step, so more text does not weaken the policy's gradient. With
    both weights 0 it is only measured: `rollout/observation_nll`, `rollout/result_nll`.

    Attributes:
        observation: Weight of what the environment shows in the user's block.
        result: Weight of the results of tool calls.
    """

    needs_trust = ()

    observation: NonNegative = 0.05
    result: NonNegative = 0.05

    @property
    def weights(self) -> dict[int, float]:
        """Weight by role."""
        return {Role.OBSERVATION: self.observation, Role.RESULT: self.result}

    def check_run(self, facts: RunFacts) -> None:
        """Check that prompts show what the environment answers to.

        Raises:
            ValueError: They do not.
        """
        if facts.window == 1:
            raise ValueError(
                "algorithm.loss.echo with context.window=1: a prompt shows no response before an observation, so there "
                "is no action to predict it from; set context.window=all, or algorithm.loss.echo=null"
            )


@dataclass(slots=True)
class LossResult:
    """A minibatch's part of the optimizer step's loss, and sums for metrics.

    Attributes:
        loss: All terms, float `[]`.
        separate: The term among them whose gradient is clipped by itself; None for none.
        sums: Sums for metrics by name, without gradients.
    """

    loss: Tensor
    separate: Tensor | None
    sums: dict[str, Tensor]


@checked
@dataclass(kw_only=True)
class UpdateLoss:
    """Loss of an update step.

    Attributes:
        policy: Loss of the policy.
        policy_coefficient: Weight of the policy's loss; with 0 no advantage moves the policy, and another term has to.
        kl: Penalty on the divergence from a reference policy; None for no reference.
        value_coefficient: Weight of the critic's loss.
        value_clip: Largest distance of a value from that of the rollout; None for no clip.
        entropy_coefficient: Weight of the entropy bonus.
        entropy_target: Entropy in nats at which the bonus reaches 0; None for a constant bonus.
        whiten: Whiten advantages over all trained tokens of the iteration.
        mismatch: Correction of the engine's distribution to the trainer's; None for none, auto for `TruncatedWeights`
            unless compute is in float32 and the weights are the same, where both agree.
        echo: Prediction of the environment's text; None for none.
    """

    needs_trust = ()

    policy: PolicyLoss = field(default_factory=PolicyLoss)
    policy_coefficient: NonNegative = 1.0
    kl: ReferenceKL | None = None
    value_coefficient: NonNegative = 0.5
    value_clip: Positive | None = None
    entropy_coefficient: float = 0.0
    entropy_target: Positive | None = None
    whiten: bool = True
    mismatch: Correction | Literal["auto"] | None = "auto"
    echo: TextPrediction | None = None

    def __post_init__(self) -> None:
        self._reported_rows = False
        if self.kl is not None and self.kl.reference is None:
            self.kl = None
        if not (self._trains_sampled or self._has_kl or self.trains_text):
            raise ValueError(
                f"algorithm.loss.policy_coefficient={self.policy_coefficient:g}: no other term of the loss trains the "
                "policy; set 1.0, or a penalty in the loss (algorithm.loss.kl.coefficient, place=loss)"
            )
        if self.entropy_target is not None and self.entropy_coefficient == 0:
            raise ValueError(
                f"algorithm.loss.entropy_target={self.entropy_target}: there is no entropy bonus to steer; set "
                "algorithm.loss.entropy_coefficient=0.01"
            )

    @property
    def _trains_sampled(self) -> bool:
        """Whether the policy learns at the tokens of M_loss: by its own loss or the entropy bonus."""
        return self.policy_coefficient > 0 or self.entropy_coefficient != 0

    @property
    def trains_text(self) -> bool:
        """Whether the policy learns the environment's text."""
        return self.echo is not None and any(self.echo.weights.values())

    @property
    def reference(self) -> Reference | None:
        """How the reference policy is built and follows the policy; None for a run that keeps none."""
        return None if self.kl is None else self.kl.reference

    @property
    def hint(self) -> Hint | None:
        """Hint that the reference reads in place of observations; None for the policy's prompts."""
        return None if self.kl is None else self.kl.hint

    @property
    def reads_reference_head(self) -> bool:
        """Whether the divergence is computed with the head of the reference."""
        return self.kl is not None and self.kl.estimator.over_vocabulary

    def entropy_weight(self, entropy: float) -> float:
        """Return the bonus's coefficient at this entropy, `coefficient * clip(1 - entropy / target, 0, 1)`."""
        if self.entropy_target is None:
            return self.entropy_coefficient
        return self.entropy_coefficient * min(1.0, max(0.0, 1.0 - entropy / self.entropy_target))

    def adjust(
        self,
        *,
        clip_high: float | None = None,
        kl_coefficient: float | None = None,
        entropy_coefficient: float | None = None,
    ) -> dict[str, tuple[object, object]]:
        """Change settings during training, from the next step on; None keeps a setting.

        Checkpoints do not hold these settings. Apply the change again after resuming.

        Returns:
            (before, after) by the name of each changed setting.

        Raises:
            ValueError: A KL penalty in a run without a reference.
        """
        self.require_reference("kl_coefficient", kl_coefficient)
        before = self._adjustable()
        if clip_high is not None:
            self.policy.clip_high = clip_high
        if kl_coefficient is not None and self.kl is not None:
            self.kl.coefficient = kl_coefficient
        if entropy_coefficient is not None:
            self.entropy_coefficient = entropy_coefficient
        after = self._adjustable()
        return {name: (before[name], after[name]) for name in after if before[name] != after[name]}

    def require_reference(self, key: str, coefficient: float | None) -> None:
        """Check that a KL penalty has a reference.

        Args:
            key: Name of the setting, for the message.
            coefficient: Weight of the penalty.

        Raises:
            ValueError: A positive coefficient in a run without a reference.
        """
        if coefficient and self.kl is None:
            raise ValueError(
                f"{key}={coefficient:g}: this run keeps no reference policy; "
                "set algorithm.loss.kl.coefficient=0.0 and an algorithm.loss.kl.reference from the start"
            )

    def check_run(self, facts: RunFacts) -> None:
        """Check that samples of older weights are corrected for, that whitening moves no baseline, and what is learned.

        Raises:
            ValueError: They are not, it does, or nothing is.
        """
        self._check_teacher()
        how = self.policy.aggregation
        if facts.environments > 1 and how in (
            Aggregation.SEQ_MEAN_TOKEN_MEAN,
            Aggregation.EPISODE_MEAN,
        ):
            raise ValueError(
                f"algorithm.loss.policy.aggregation={how}: divides by the weights of a sequence's own tokens, which an "
                "environment's share of a mixture is made of; set token-mean or seq-mean-token-sum"
            )
        if facts.iterations_ahead:
            self.require_correction()
        if self.echo is not None:
            self.echo.check_run(facts)
        for component in instances((self.reference, self.hint), ChecksRun):
            component.check_run(facts)
        if self.whiten and facts.baseline is not None:
            facts.refuse_whitening(facts.estimator, scope=facts.baseline)

    def _check_teacher(self) -> None:
        """Check that the policy learns something from a reference that is its teacher.

        Raises:
            ValueError: It does not.
        """
        kl = self.kl
        if kl is None or not self._has_kl:
            return
        if kl.hint is not None and kl.estimator is KLEstimator.K1:
            raise ValueError(
                "algorithm.loss.kl.estimator=k1 with a hint: in the loss its gradient does not depend on what the "
                "reference reads; set full_reverse or k2"
            )
        learns_more = self._trains_sampled or self.trains_text
        if any(instances((kl.reference,), OfPolicy)) and kl.hint is None and not learns_more:
            raise ValueError(
                f"algorithm.loss.policy_coefficient={self.policy_coefficient:g}: the reference is the policy itself, "
                "from which it has nothing to learn; set algorithm.loss.kl.hint, a teacher as "
                "algorithm.loss.kl.reference, or policy_coefficient=1.0"
            )

    def require_correction(self) -> None:
        """Check that samples of older weights are corrected for.

        Raises:
            ValueError: `mismatch` is None.
        """
        if self.mismatch is None:
            raise ValueError(
                "algorithm.loss.mismatch=null: with rollout.iterations_ahead the weights that sample are older than "
                "those that are trained, which has to be corrected; set auto, or rollout.iterations_ahead=0"
            )

    def report_rows(self, *, rows: int, episodes: int) -> None:
        """Warn once where an average over rows weighs episodes by their number of rows.

        Args:
            rows: Number of samples of an iteration.
            episodes: Number of their episodes.
        """
        how = self.policy.aggregation
        if how is Aggregation.SEQ_MEAN_TOKEN_MEAN and rows > episodes and not self._reported_rows:
            self._reported_rows = True
            log.warning(
                "algorithm.loss.policy.aggregation=%s: %d episodes are %d samples here, and the mean over samples "
                "weighs an episode by its number; episode-mean or token-mean does not depend on it",
                how,
                episodes,
                rows,
            )

    def check_division(self, layout: CreditLayout, advances: Tensor) -> None:
        """Check that nothing counts rows where the history of an episode, not the context, divides it into samples.

        Args:
            layout: Credit layout of the batch.
            advances: Bool `[episodes, max turns]`, see `Episodes`.

        Raises:
            RolloutError: It does, and an episode's turns alternate between samples, or it has several samples and a
                turn that does not advance.
        """
        setting = self._setting_of_rows
        if setting is None:
            return
        several = layout.alternates | ((layout.samples > 1) & ~advances.all(dim=1))
        if bool(several.any()):
            raise RolloutError(
                f"{setting}: the history of {int(several.sum())} episodes divides them into several samples, and an "
                "average over samples would weigh them by that; set token-mean, or, for the policy, episode-mean, and "
                "no level=sequence"
            )

    def has_tokens(self, batch: Minibatch, critic: CriticModule | None) -> dict[str, Tensor]:
        """Return whether a minibatch's optimizer step has a token for a module, bool `[]`, by `policy` and `critic`.

        The value loss trains the policy too where the critic reads its states.
        """
        loss_tokens, value_tokens, kl_tokens = batch.counted[:3]
        policy = loss_tokens & self._trains_sampled
        if self._has_kl:
            policy = policy | kl_tokens
        if self.trains_text:
            policy = policy | batch.counted[3]
        if critic is None:
            return {"policy": policy}
        values = value_tokens & (self.value_coefficient > 0)
        shared = critic.shares_trunk and not critic.detach_states
        return {"policy": policy | values if shared else policy, "critic": values}

    @property
    def _has_kl(self) -> bool:
        """Whether the loss has a penalty on the divergence from the reference."""
        kl = self.kl
        return kl is not None and kl.place is KLPlace.LOSS and kl.coefficient > 0

    @property
    def separates_kl(self) -> bool:
        """Whether the gradient of the penalty is clipped apart from that of the other terms."""
        return self._has_kl and self.kl is not None and self.kl.clip_norm is not None

    @property
    def _setting_of_rows(self) -> str | None:
        """The setting that depends on how episodes are divided into rows."""
        kl, key = self.kl, "algorithm.loss"
        if self.policy.setting_of_rows is not None:
            return f"{key}.policy.{self.policy.setting_of_rows}"
        if kl is not None and self._has_kl and kl.aggregation.counts_rows:
            return f"{key}.kl.aggregation={kl.aggregation}"
        return None

    def _adjustable(self) -> dict[str, float]:
        kl = {} if self.kl is None else {"kl_coefficient": self.kl.coefficient}
        return {
            "clip_high": self.policy.clip_high,
            **kl,
            "entropy_coefficient": self.entropy_coefficient,
        }

    def __call__(self, scores: TokenScores, batch: Minibatch) -> LossResult:
        """Return the loss of a minibatch.

        Sums are divided by the optimizer step's counts over all ranks and accumulated steps, so the gradient
        does not depend on how a step's samples are split. Padding rows do not count.
        """
        samples, non_padding = batch.samples, batch.non_padding
        mask, weight = samples.loss_mask & non_padding, samples.loss_weight * non_padding
        surrogate = self.policy(
            scores.logprobs, samples.old_logprobs, samples.advantages, mask, turn=samples.turn
        )
        average: dict[str, Any] = {
            "how": self.policy.aggregation,
            "tokens": batch.loss_tokens,
            "sequences": batch.sequences,
            "constant": self.policy.constant,
            "episodes": batch.episodes,
            "episode_tokens": batch.episode_tokens,
        }
        policy = aggregate(surrogate.losses, weight, **average)
        entropy = aggregate(scores.entropy, weight, **average)
        value = self._value_loss(scores, batch)
        kl, of_kl = self._reference_kl(scores, batch)
        text = self._text_loss(scores, batch)
        loss = self.policy_coefficient * policy + self.value_coefficient * value + kl + text
        loss = loss - self.entropy_weight(batch.entropy) * entropy
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
            **of_kl,
            "echo_loss": text,
            "text_tokens": (samples.text > 0).sum(),
        }
        separate = kl if self.separates_kl and kl.requires_grad else None
        return LossResult(loss, separate, {name: value.detach() for name, value in sums.items()})

    def _value_loss(self, scores: TokenScores, batch: Minibatch) -> Tensor:
        """Return the critic's loss over its tokens."""
        if scores.values is None:
            return scores.logprobs.new_zeros(())
        samples = batch.samples
        mask = samples.value_mask & batch.non_padding
        losses = value_loss(
            scores.values, samples.returns, mask, old_values=samples.values, clip=self.value_clip
        ).losses
        return aggregate(
            losses,
            mask,
            how=Aggregation.TOKEN_MEAN,
            tokens=batch.value_tokens,
            sequences=batch.sequences,
        )

    def _text_loss(self, scores: TokenScores, batch: Minibatch) -> Tensor:
        """Return the weighted cross-entropy of the environment's text."""
        if self.echo is None or scores.text_logprobs is None:
            return scores.logprobs.new_zeros(())
        from ragen_pl.algorithms.echo import role_weights, text_loss

        text = batch.samples.text
        weight = role_weights(text, (text > 0) & batch.non_padding, self.echo.weights)
        return text_loss(scores.text_logprobs, weight, tokens=batch.text_tokens)

    def _reference_kl(
        self, scores: TokenScores, batch: Minibatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted penalty, and the plain divergence's sums and tokens, of the first turns too."""
        if self.kl is None or batch.reference is None or self.kl.coefficient == 0:
            zero = scores.logprobs.new_zeros(())
            return zero, {"kl": zero, "kl_tokens": zero}
        kl = divergence(scores, batch.samples, batch.reference, estimator=self.kl.estimator)
        mask = batch.samples.kl_mask & batch.non_padding
        weight = mask.float()
        if batch.kl_weight is not None:
            weight[batch.samples.turn >= 0] *= batch.kl_weight
        # a mean over the tokens of a sample would divide by their weights
        penalty = aggregate(
            kl * weight,
            mask,
            how=self.kl.aggregation,
            tokens=batch.kl_tokens,
            sequences=batch.sequences,
        )
        sums = {"kl": (kl * mask).sum(), "kl_tokens": mask.sum()}
        turns = torch.arange(TURNS, device=mask.device)
        of_turn = mask[:, :, None] & (batch.samples.turn[:, :, None] == turns)
        by_turn = {
            "kl": (kl.detach()[:, :, None] * of_turn).sum((0, 1)),
            "kl_tokens": of_turn.sum((0, 1)),
        }
        for name, values in by_turn.items():
            sums |= {f"{name}_turn_{turn + 1}": values[turn] for turn in range(TURNS)}
        return self.kl.coefficient * penalty, sums
