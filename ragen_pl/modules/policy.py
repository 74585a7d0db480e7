"""PolicyModule: the language or vision-language model that acts.

Used by itself in a plain `Trainer` it learns conversations by cross-entropy; inside the agent it
scores sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from torch import Tensor

from ragen_pl.algorithms.kl import full_kl
from ragen_pl.data.batch import Minibatch, Samples
from ragen_pl.models.distribution import entropy, log_distribution
from ragen_pl.modules.forward import sampled_states, split_by_length

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle
    from ragen_pl.modules.critic import CriticModule

OptimizerFactory = Callable[[Iterable[object]], torch.optim.Optimizer]


@dataclass(slots=True)
class TokenScores:
    """What the policy (and a critic on its states) says of the sampled tokens, 0 elsewhere."""

    logprobs: Tensor  # float32 [rows, time]
    entropy: Tensor  # float32 [rows, time], nats
    values: Tensor | None = None  # float32 [rows, time]
    kl: Tensor | None = (
        None  # float32 [rows, time]: KL(reference ‖ policy) over the whole vocabulary
    )


class PolicyModule(pl.LightningModule):
    """Wrap a model bundle.

    Args:
        bundle: model, tokenizer and processor.
        optimizer: makes the optimizer from parameters, for use in a plain `Trainer`.
        length_buckets: parts that a batch's rows are split into by length.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        *,
        optimizer: OptimizerFactory | None = None,
        length_buckets: int = 2,
    ) -> None:
        super().__init__()
        self.bundle = bundle
        self.model = bundle.model
        self.optimizer_factory = optimizer
        self.length_buckets = length_buckets
        self.banned: Tensor
        self.register_buffer(
            "banned", torch.tensor(bundle.banned_token_ids, dtype=torch.int64), persistent=False
        )

    def score(
        self,
        samples: Samples,
        pixel_values: Tensor,
        *,
        critic: CriticModule | None = None,
        reference: Tensor | None = None,
        parts: list[Tensor] | None = None,
    ) -> TokenScores:
        """Score the sampled tokens of these samples with the present weights.

        Args:
            samples: what to score.
            images: that the samples' image indices refer to.
            critic: reads values from the same states, where it shares the policy's trunk.
            reference: float32 `[sampled tokens, vocab]`, row-major: adds the divergence from it.
            parts: rows computed together; by default the module's own length buckets.
        """
        shape, device = samples.input_ids.shape, samples.input_ids.device
        flat: list[list[Tensor]] = []
        number = _numbers(samples) if reference is not None else None
        for states in sampled_states(
            self.bundle,
            samples,
            pixel_values,
            parts or split_by_length(samples.length, self.length_buckets),
        ):
            at = (states.rows, states.columns)
            log_probs = log_distribution(
                self.bundle.lm_head(states.hidden),
                temperature=samples.temperature[at][:, None],
                banned=self.banned,
            )
            token = samples.input_ids[at][:, None]
            place = states.rows * shape[1] + states.columns
            columns = [place, log_probs.gather(-1, token).squeeze(-1), entropy(log_probs)]
            columns.append(columns[-1] if critic is None else critic.read(states.hidden))
            if reference is not None and number is not None:
                columns.append(full_kl(reference[number[at]], log_probs))
            flat.append(columns)
        index, *values = (torch.cat(column) for column in zip(*flat, strict=True))

        def spread(column: Tensor) -> Tensor:
            empty = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
            return empty.index_put((index,), column).view(shape)

        return TokenScores(
            logprobs=spread(values[0]),
            entropy=spread(values[1]),
            values=None if critic is None else spread(values[2]),
            kl=None if reference is None else spread(values[3]),
        )

    @torch.no_grad()
    def reference_logprobs(
        self, samples: Samples, pixel_values: Tensor, parts: list[Tensor]
    ) -> Tensor:
        """Return this policy's log-probabilities at the sampled tokens, float32 `[tokens, vocab]`, by token number."""
        pieces: list[Tensor] = []
        numbers: list[Tensor] = []
        for states in sampled_states(self.bundle, samples, pixel_values, parts):
            at = (states.rows, states.columns)
            pieces.append(
                log_distribution(
                    self.bundle.lm_head(states.hidden),
                    temperature=samples.temperature[at][:, None],
                    banned=self.banned,
                )
            )
            numbers.append(samples.token[at])
        result = torch.empty_like(torch.cat(pieces))
        result[torch.cat(numbers)] = torch.cat(pieces)
        return result

    def supervised_loss(self, batch: Minibatch) -> Tensor:
        """Return the cross-entropy of the responses, averaged over all trained tokens of the optimizer step."""
        scores = self.score(batch.samples, batch.pixel_values)
        return -(scores.logprobs * batch.samples.loss_mask).sum() * batch.scale / batch.tokens

    def on_fit_start(self) -> None:
        """Leave the eval mode that models are built and loaded in; Lightning does not."""
        self.train()

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Learn to give the batch's responses."""
        loss = self.supervised_loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer for a policy trained alone: AdamW at 1e-4 unless another was given."""
        if self.optimizer_factory is None:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)
        return self.optimizer_factory(list(self.parameters()))


def _numbers(samples: Samples) -> Tensor:
    """Return the row-major number of each sampled token among those of these samples, `[rows, time]`."""
    sampled = samples.turn >= 0
    return (sampled.flatten().cumsum(0) - 1).view_as(sampled)
