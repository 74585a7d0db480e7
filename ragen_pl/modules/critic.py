"""CriticModule: the value of the state before each sampled token.

It reads the policy's states (`backbone=None`, one forward pass for both) or runs a backbone of its own. In a plain
`Trainer` it regresses the batch's returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragen_pl.data.batch import Minibatch, Samples
from ragen_pl.models.inputs import run_decoder
from ragen_pl.models.truncation import KeptIds, Truncation
from ragen_pl.models.value_head import ValueHead
from ragen_pl.modules.empty_steps import LeavesEmptySteps
from ragen_pl.modules.forward import (
    Readout,
    ReferenceStates,
    sample_inputs,
    sampled_states,
    shared_images,
)
from ragen_pl.modules.optimizers import OptimizerFactory, build_optimizer, module_groups
from ragen_pl.modules.policy import PolicyModule, TokenReadout, TokenScores
from ragen_pl.modules.sharding import data_mesh, is_sharded, shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ragen_pl.models.bundle import ModelBundle


class CriticModule(LeavesEmptySteps):
    """A value head on decoder states.

    Args:
        hidden_size: Width of the states.
        backbone: Model of its own; None to read the policy's states.
        detach: Whether the value loss leaves the weights behind the states unchanged.
        gradient_checkpointing: Compute the activations of each of the backbone's layers again in the backward pass.
        optimizer: Builds the optimizer from parameters, for use in a plain `Trainer`; AdamW at 1e-4 by default.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        backbone: ModelBundle | None = None,
        detach: bool = False,
        gradient_checkpointing: bool = False,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        super().__init__()
        if gradient_checkpointing and backbone is not None:
            backbone.checkpoint_layers()
        self.head = ValueHead(hidden_size)
        self.backbone = backbone
        self.model: nn.Module | None = None if backbone is None else backbone.model
        self.detach_states = detach
        self.optimizer_factory = optimizer

    @property
    def shares_trunk(self) -> bool:
        """Whether the critic reads the policy's states."""
        return self.backbone is None

    def configure_model(self) -> None:
        """Shard the weights if the Trainer's strategy shards models."""
        if self.device_mesh is not None and not is_sharded(self):
            self.shard(data_mesh(self.device_mesh))

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the weights over ranks."""
        if self.backbone is None:
            # read inside a call of the policy
            shard(self.head, mesh)
        else:
            shard(self, mesh, layers=self.backbone.layers)

    def read(self, hidden: Tensor) -> Tensor:
        """Return values `[…]` of hidden states `[…, hidden]`."""
        return self.head(hidden.detach() if self.detach_states else hidden)

    def forward(
        self,
        samples: Samples,
        images: Sequence[Tensor],
        *,
        microbatches: Sequence[Tensor] | None = None,
        readout: Readout | None = None,
    ) -> Any:
        """Run the critic's own backbone over samples.

        Args:
            samples: Sequences.
            images: Images that `samples.image_index` refers to, each uint8 `[height, width, 3]`.
            microbatches: Rows that are computed together; all by default.
            readout: What is computed; `ValueReadout` by default, which returns values `[rows, time]`.

        Raises:
            ValueError: The critic has no backbone.
        """
        if self.backbone is None:
            raise ValueError(
                "this critic reads the policy's states; give it a backbone to use it alone"
            )
        readout = readout or ValueReadout(self)
        rows = microbatches or [torch.arange(len(samples))]
        return readout(self.backbone, samples, images, rows)

    def on_fit_start(self) -> None:
        """Switch to train mode: models are built and loaded in eval mode, and Lightning keeps the mode."""
        self.train()

    def has_tokens(self, batch: Minibatch) -> dict[str, Tensor]:
        """Return whether the step has a token of the critic."""
        return {"critic": batch.counted[1]}

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Regress the returns of the critic's tokens."""
        mask = batch.samples.value_mask & batch.non_padding
        values: Tensor = self(batch.samples, batch.images, microbatches=batch.microbatches)
        errors = (values - batch.samples.returns) ** 2 * mask
        loss = errors.sum() * batch.scale / batch.value_tokens
        self.log("train/value_loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of a critic that is trained alone."""
        factory = self.optimizer_factory or partial(torch.optim.AdamW, lr=1e-4)
        return build_optimizer(factory, module_groups(self))


@dataclass(frozen=True, slots=True)
class ValueReadout:
    """Reads V(s_t) at the sampled tokens."""

    critic: CriticModule

    def __call__(
        self,
        bundle: ModelBundle,
        samples: Samples,
        images: Sequence[Tensor],
        microbatches: Sequence[Tensor],
    ) -> Tensor:
        """Return float32 `[rows, time]`, 0 off the sampled tokens."""
        result = torch.zeros_like(samples.input_ids, dtype=torch.float32)
        for states in sampled_states(bundle, samples, images, microbatches):
            values = self.critic.read(states.hidden)
            result = result.index_put((states.rows, states.columns), values)
        return result


@dataclass(frozen=True, slots=True)
class LastValueReadout:
    """Reads the value of the state after each row's last token."""

    critic: CriticModule

    def __call__(
        self,
        bundle: ModelBundle,
        samples: Samples,
        images: Sequence[Tensor],
        microbatches: Sequence[Tensor],
    ) -> Tensor:
        """Return float32 `[rows]`."""
        result = torch.zeros(len(samples), device=samples.input_ids.device)
        shared = shared_images(bundle, samples, images, microbatches)
        for rows in microbatches:
            last_columns = samples.length[rows] - 1
            first = int(last_columns.min())
            hidden = run_decoder(bundle, sample_inputs(bundle, samples, shared, rows), first=first)
            last = torch.arange(len(rows), device=hidden.device), last_columns - first
            result[rows] = self.critic.read(hidden[last])
        return result


def last_values(
    policy: PolicyModule,
    critic: CriticModule,
    samples: Samples,
    images: Sequence[Tensor],
    *,
    microbatches: Sequence[Tensor],
) -> Tensor:
    """Return the value of the state after each row's last token, float32 `[rows]`.

    Args:
        policy: Policy.
        critic: Critic.
        samples: Sequences.
        images: Images that `samples.image_index` refers to, each uint8 `[height, width, 3]`.
        microbatches: Rows that are computed together.
    """
    module = policy if critic.shares_trunk else critic
    values: Tensor = module(
        samples, images, microbatches=microbatches, readout=LastValueReadout(critic)
    )
    return values


def score_together(
    policy: PolicyModule,
    critic: CriticModule | None,
    samples: Samples,
    images: Sequence[Tensor],
    *,
    reference: ReferenceStates | None = None,
    microbatches: Sequence[Tensor] | None = None,
    entropy_gradient: bool = False,
    kept_ids: KeptIds | None = None,
    truncation: Truncation | None = None,
    text: bool = False,
) -> TokenScores:
    """Score samples with the policy and the critic, in one forward pass if they share a trunk.

    Args:
        policy: Policy.
        critic: Critic; None for scores without values.
        samples: Sequences.
        images: Images that `samples.image_index` refers to, each uint8 `[height, width, 3]`.
        reference: Reference's states, see `TokenReadout`.
        microbatches: Rows that are computed together; all by default.
        entropy_gradient: Whether the entropy has a gradient.
        kept_ids: Ids that sampling kept, see `TokenReadout`.
        truncation: Truncation of the engine, see `TokenReadout`.
        text: Whether the environment's text is scored too, see `TokenReadout`.
    """
    shared = critic if critic is not None and critic.shares_trunk else None
    readout = TokenReadout(
        critic=shared,
        reference=reference,
        entropy_gradient=entropy_gradient,
        logits_mib=policy.logits_mib,
        kept_ids=kept_ids,
        truncation=truncation,
        text=text,
    )
    scores: TokenScores = policy(samples, images, microbatches=microbatches, readout=readout)
    if critic is None or shared is not None:
        return scores
    return scores._replace(values=critic(samples, images, microbatches=microbatches))
