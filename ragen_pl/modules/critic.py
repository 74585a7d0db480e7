"""CriticModule: the value of the state before each sampled token.

It reads the policy's own states (`backbone=None`, one forward pass for both) or runs a backbone of
its own; alone in a plain `Trainer` it regresses the batch's returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from ragen_pl.data.batch import Minibatch, Samples
from ragen_pl.models.value_head import ValueHead
from ragen_pl.modules.forward import decoder_states, sampled_states, split_by_length
from ragen_pl.modules.policy import OptimizerFactory, PolicyModule, TokenScores

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle


class CriticModule(pl.LightningModule):
    """A value head on decoder states.

    Args:
        hidden_size: of the states that the head reads.
        backbone: the critic's own model; None to read the policy's states.
        detach: keep the value loss from changing what the states come from.
        optimizer: makes the optimizer from parameters, for use in a plain `Trainer`.
        length_buckets: parts that a batch's rows are split into by length.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        backbone: ModelBundle | None = None,
        detach: bool = False,
        optimizer: OptimizerFactory | None = None,
        length_buckets: int = 2,
    ) -> None:
        super().__init__()
        self.head = ValueHead(hidden_size)
        self.backbone = backbone
        self.model: nn.Module | None = None if backbone is None else backbone.model
        self.detach_states = detach
        self.optimizer_factory = optimizer
        self.length_buckets = length_buckets

    @property
    def shares_trunk(self) -> bool:
        """Whether the critic reads the policy's states."""
        return self.backbone is None

    def read(self, hidden: Tensor) -> Tensor:
        """Return values `[…]` of states `[…, hidden]`."""
        return self.head(hidden.detach() if self.detach_states else hidden)

    def values(
        self, samples: Samples, pixel_values: Tensor, *, parts: list[Tensor] | None = None
    ) -> Tensor:
        """Return V(s_t) at sampled tokens and 0 elsewhere, `[rows, time]`, from the critic's own backbone."""
        result = torch.zeros_like(samples.input_ids, dtype=torch.float32)
        parts = parts or split_by_length(samples.length, self.length_buckets)
        for states in sampled_states(self._own_backbone(), samples, pixel_values, parts):
            result = result.index_put((states.rows, states.columns), self.read(states.hidden))
        return result

    def last_values(self, samples: Samples, pixel_values: Tensor, *, trunk: ModelBundle) -> Tensor:
        """Return the value of the state after each row's last token, `[rows]`."""
        bundle = self.backbone or trunk
        result = []
        for row in range(len(samples)):
            hidden = decoder_states(bundle, samples, pixel_values, torch.tensor([row]))
            result.append(self.read(hidden[0, -1:]))
        return torch.cat(result)

    def on_fit_start(self) -> None:
        """Leave the eval mode that models are built and loaded in; Lightning does not."""
        self.train()

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Regress the returns of the sampled tokens inside the advantage mask."""
        mask = batch.samples.advantage_mask & batch.real
        errors = (
            self.values(batch.samples, batch.pixel_values) - batch.samples.returns
        ) ** 2 * mask
        loss = errors.sum() * batch.scale / batch.credited
        self.log("train/value_loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer for a critic trained alone: AdamW at 1e-4 unless another was given."""
        if self.optimizer_factory is None:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)
        return self.optimizer_factory(list(self.parameters()))

    def _own_backbone(self) -> ModelBundle:
        if self.backbone is None:
            raise ValueError(
                "this critic reads the policy's states; give it a backbone to use it alone"
            )
        return self.backbone


def score_together(
    policy: PolicyModule,
    critic: CriticModule | None,
    samples: Samples,
    pixel_values: Tensor,
    *,
    reference: Tensor | None = None,
    parts: list[Tensor] | None = None,
) -> TokenScores:
    """Score samples with the policy and value them with the critic, in one pass where they share a trunk.

    The arguments are those of `PolicyModule.score`.
    """
    shared = critic if critic is not None and critic.shares_trunk else None
    scores = policy.score(samples, pixel_values, critic=shared, reference=reference, parts=parts)
    if critic is not None and shared is None:
        scores.values = critic.values(samples, pixel_values, parts=parts)
    return scores
