"""PolicyModule: the language or vision-language model that acts.

In a plain `Trainer` it learns conversations by cross-entropy. Inside the agent it scores sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from ragen_pl.algorithms.kl import full_kl
from ragen_pl.constraints import Count, checked
from ragen_pl.data.batch import Minibatch, Samples
from ragen_pl.models.distribution import entropy
from ragen_pl.modules.forward import Readout, sampled_states, split_by_length
from ragen_pl.optimizers import OptimizerFactory, build_optimizer

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle
    from ragen_pl.modules.critic import CriticModule


class TokenScores(NamedTuple):
    """Scores of the sampled tokens, float32 `[rows, time]`, 0 elsewhere.

    A tuple, because FSDP looks for tensors in tuples, lists and dictionaries that a forward returns.
    """

    logprobs: Tensor
    entropy: Tensor
    """Entropy of the distribution over the vocabulary in nats."""
    values: Tensor | None = None
    """V(s_t) of a critic."""
    kl: Tensor | None = None
    """KL(reference ‖ policy) over the vocabulary."""


class PolicyModule(pl.LightningModule):
    """A model that acts.

    Every use of the model in training and scoring is a call of the module, because DDP and FSDP hook that call.

    Args:
        bundle: Model, tokenizer and processor.
        optimizer: Builds the optimizer from parameters, for use in a plain `Trainer`; AdamW at 1e-4 by default.
        length_buckets: Number of microbatches that a batch's rows are split into by length.
    """

    @checked
    def __init__(
        self,
        bundle: ModelBundle,
        *,
        optimizer: OptimizerFactory | None = None,
        length_buckets: Count = 2,
    ) -> None:
        super().__init__()
        self.bundle = bundle
        self.model = bundle.model
        self.optimizer_factory = optimizer
        self.length_buckets = length_buckets

    def forward(
        self,
        samples: Samples,
        images: Sequence[Tensor],
        *,
        microbatches: Sequence[Tensor] | None = None,
        readout: Readout | None = None,
    ) -> Any:
        """Run the model over samples with the present weights.

        Args:
            samples: Sequences.
            images: Images that `samples.image_index` refers to, each uint8 `[height, width, 3]`.
            microbatches: Rows that are computed together; the module's length buckets by default.
            readout: What is computed; `TokenReadout()` by default, which returns `TokenScores`.
        """
        readout = readout or TokenReadout()
        rows = microbatches or split_by_length(samples.length, self.length_buckets)
        return readout(self.bundle, samples, images, rows)

    def supervised_loss(self, batch: Minibatch) -> Tensor:
        """Return the cross-entropy of the responses, averaged over all trained tokens of the optimizer step."""
        scores: TokenScores = self(batch.samples, batch.images)
        return -(scores.logprobs * batch.samples.loss_mask).sum() * batch.scale / batch.loss_tokens

    def on_fit_start(self) -> None:
        """Switch to train mode: models are built and loaded in eval mode, and Lightning keeps the mode."""
        self.train()

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Learn the batch's responses."""
        loss = self.supervised_loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of a policy that is trained alone."""
        factory = self.optimizer_factory or partial(torch.optim.AdamW, lr=1e-4)
        return build_optimizer(factory, [{"params": self.parameters(), "name": "policy"}])


@dataclass(frozen=True, slots=True)
class TokenReadout:
    """Reads `TokenScores` of the sampled tokens.

    Attributes:
        critic: Critic that shares the policy's states and reads values from them.
        reference: float32 `[sampled tokens, vocab]` by row and column: the reference's log-probs, for the divergence
            over the vocabulary.
    """

    critic: CriticModule | None = None
    reference: Tensor | None = None

    def __call__(
        self,
        bundle: ModelBundle,
        samples: Samples,
        images: Sequence[Tensor],
        microbatches: Sequence[Tensor],
    ) -> TokenScores:
        """Return the scores."""
        places: list[Tensor] = []
        parts: dict[str, list[Tensor]] = {}
        numbers = _numbers(samples)
        for states in sampled_states(bundle, samples, images, microbatches):
            at = (states.rows, states.columns)
            log_probs = bundle.log_probs(
                states.hidden, temperature=samples.temperature[at][:, None]
            )
            token = samples.input_ids[at][:, None]
            scores = {
                "logprobs": log_probs.gather(-1, token).squeeze(-1),
                "entropy": entropy(log_probs),
            }
            if self.critic is not None:
                scores["values"] = self.critic.read(states.hidden)
            if self.reference is not None:
                scores["kl"] = full_kl(self.reference[numbers[at]], log_probs)
            places.append(states.rows * samples.input_ids.shape[1] + states.columns)
            for name, values in scores.items():
                parts.setdefault(name, []).append(values)
        index = torch.cat(places)
        flat = {name: torch.cat(values) for name, values in parts.items()}
        zeros = torch.zeros(samples.input_ids.numel(), dtype=torch.float32, device=index.device)
        return TokenScores(
            **{
                name: zeros.index_put((index,), values).view(samples.input_ids.shape)
                for name, values in flat.items()
            }
        )


@dataclass(frozen=True, slots=True)
class VocabularyReadout:
    """Reads the log-probs of the whole vocabulary at the sampled tokens."""

    def __call__(
        self,
        bundle: ModelBundle,
        samples: Samples,
        images: Sequence[Tensor],
        microbatches: Sequence[Tensor],
    ) -> Tensor:
        """Return float32 `[sampled tokens, vocab]` by `samples.token`."""
        log_probs: list[Tensor] = []
        numbers: list[Tensor] = []
        for states in sampled_states(bundle, samples, images, microbatches):
            at = (states.rows, states.columns)
            temperature = samples.temperature[at][:, None]
            log_probs.append(bundle.log_probs(states.hidden, temperature=temperature))
            numbers.append(samples.token[at])
        result = torch.empty_like(torch.cat(log_probs))
        result[torch.cat(numbers)] = torch.cat(log_probs)
        return result


def _numbers(samples: Samples) -> Tensor:
    """Return the number of each sampled token by row and column, int64 `[rows, time]`."""
    sampled = samples.turn >= 0
    return (sampled.flatten().cumsum(0) - 1).view_as(sampled)
