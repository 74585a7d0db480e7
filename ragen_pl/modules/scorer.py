"""Policy, critic and reference, which score the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragen_pl.algorithms.kl import KLEstimator
from ragen_pl.data.batch import Minibatch, Samples, TrajectoryBatch
from ragen_pl.data.microbatches import split_for_scoring, with_equal_count
from ragen_pl.engines.errors import RolloutError
from ragen_pl.models.distribution import TopLogprobs, score_distributions
from ragen_pl.models.truncation import KeptIds, Truncation
from ragen_pl.modules.critic import CriticModule, last_values, score_together
from ragen_pl.modules.forward import ReferenceStates, tokens_per_chunk
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss
from ragen_pl.modules.policy import PolicyModule, StateReadout, TokenReadout, TokenScores
from ragen_pl.modules.reference import ReferencePolicy, ServedReference

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle


# of a rank, in the host's memory and in a checkpoint inside an update
REFERENCE_GIB = 16.0


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
        kept_ids: KeptIds | None = None,
    ) -> TokenScores:
        """Return log-probs and, with a critic, values of the sampled tokens.

        Args:
            samples: Sequences.
            images: Images that `samples.image_index` refers to.
            microbatches: Rows that are computed together.
            reference: The reference's states, see `TokenReadout`.
            kept_ids: Ids that sampling kept, by token number. Without them, those that the present weights keep are
                found and returned too.
        """
        return score_together(
            self.policy,
            self.critic,
            samples,
            images,
            reference=reference,
            microbatches=microbatches,
            kept_ids=_by_place(kept_ids, samples),
            truncation=self.truncation if kept_ids is None else None,
            text=self.loss.echo is not None,
        )

    def score_minibatch(self, batch: Minibatch) -> TokenScores:
        """Return the scores that the update's loss needs, with the full divergence if the loss uses it."""
        return score_together(
            self.policy,
            self.critic,
            batch.samples,
            batch.images,
            microbatches=batch.microbatches,
            reference=self.reference_states(batch.reference, batch.reference_ids),
            entropy_gradient=self.loss.entropy_weight(batch.entropy) != 0,
            kept_ids=batch.kept_ids,
            text=self.loss.trains_text,
        )

    def reference_states(
        self, scores: Tensor | None, ids: Tensor | None = None
    ) -> ReferenceStates | None:
        """Return the reference's states and head if the divergence is over the vocabulary.

        Args:
            scores: Return value of `vocabulary_reference` or `token_reference`.
            ids: The most likely ids, where `scores` are their log-probs.
        """
        kl = self.loss.kl
        if scores is None or self.reference is None or kl is None or scores.ndim == 1:
            return None
        reverse = kl.estimator is KLEstimator.FULL_REVERSE
        return ReferenceStates(self.reference, scores, ids, reverse=reverse, top=kl.top)

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
    ) -> Tensor | TopLogprobs | None:
        """Return the reference's states by token number, `[tokens, hidden]`, for a divergence over the vocabulary.

        Log-probs of the whole vocabulary would take up to a hundred times their memory. Of a reference behind a server,
        return those of its most likely ids. None for other divergences, and if there is no penalty at present.

        Raises:
            RolloutError: The states take more than `REFERENCE_GIB`, or a server gives no scores.
        """
        if self.reference is None or self.loss.kl is None or self.loss.kl.coefficient == 0:
            return None
        if not self.loss.reads_reference_head:
            return None
        if isinstance(self.reference, ServedReference):
            assert self.loss.kl.top is not None
            return self.reference.top_logprobs(samples, self.loss.kl.top.number)
        _check_reference_size(samples, self.reference.bundle, self.loss.kl)
        states: Tensor = self.reference(
            samples, images, microbatches=microbatches, readout=StateReadout()
        )
        return states

    @torch.no_grad()
    def reference_entropy(
        self, samples: Samples, states: Tensor, *, kept_ids: KeptIds | None
    ) -> Tensor:
        """Return the entropy of the reference's distributions by token number, nats, `[tokens]`.

        Args:
            samples: Sequences.
            states: Return value of `vocabulary_reference`.
            kept_ids: Ids that sampling kept, by token number.
        """
        assert self.reference is not None
        sampled, device = samples.turn >= 0, samples.turn.device
        temperature = samples.temperature.new_ones(len(states))
        temperature[samples.token[sampled]] = samples.temperature[sampled]
        chunk = tokens_per_chunk(self.policy.bundle, self.policy.logits_mib)
        found = [temperature.new_zeros(0)]
        for start in range(0, len(states), chunk):
            place = torch.arange(start, min(start + chunk, len(states)), device=device)
            scores = score_distributions(
                self.reference.lm_head(states[place.to(states.device)].to(device)),
                torch.zeros_like(place),
                temperature=temperature[place][:, None],
                banned=self.policy.bundle.banned(device),
                kept=None if kept_ids is None else kept_ids.select(place).to(device),
                entropy_gradient=False,
            )
            found.append(scores.entropy.to(temperature.dtype))
        return torch.cat(found)

    def token_reference(
        self,
        samples: Samples,
        images: Sequence[Tensor],
        *,
        microbatches: list[Tensor],
        kept_ids: KeptIds | None,
    ) -> Tensor | None:
        """Return the reference's log-probs by token number, `[tokens]`, for a divergence estimated from them.

        None for the divergence over the vocabulary, and if there is no penalty at present.

        Args:
            samples: Sequences.
            images: Images that `samples.image_index` refers to.
            microbatches: Rows that are computed together.
            kept_ids: Ids that sampling kept, by token number.
        """
        if self.reference is None or self.loss.kl is None or self.loss.kl.coefficient == 0:
            return None
        if self.loss.reads_reference_head:
            return None
        readout = TokenReadout(
            logits_mib=self.policy.logits_mib, kept_ids=_by_place(kept_ids, samples)
        )
        scores: TokenScores = self.reference(
            samples, images, microbatches=microbatches, readout=readout
        )
        sampled = samples.turn >= 0
        result = scores.logprobs.new_zeros(int(sampled.sum()))
        result[samples.token[sampled]] = scores.logprobs[sampled]
        return result


def _by_place(kept_ids: KeptIds | None, samples: Samples) -> KeptIds | None:
    """Return kept ids by row and column."""
    return None if kept_ids is None else kept_ids.select(samples.token[samples.turn >= 0])


def _check_reference_size(samples: Samples, bundle: ModelBundle, kl: ReferenceKL) -> None:
    tokens, width = int((samples.turn >= 0).sum()), bundle.hidden_size
    size = tokens * width * bundle.model.dtype.itemsize / 2**30
    if size > REFERENCE_GIB:
        raise RolloutError(
            f"algorithm.loss.kl.estimator={kl.estimator}: the reference's states of {tokens} tokens take {size:.0f} "
            f"GiB, more than {REFERENCE_GIB:.0f}; set algorithm.loss.kl.estimator={kl.estimator.from_tokens}, or a "
            "smaller rollout.groups"
        )
