"""FSDP2 as a strategy of the Trainer: `trainer.strategy=fsdp2`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from ragen_pl.base.constraints import Count
from ragen_pl.base.distributed import on_first_rank, sharded_like
from ragen_pl.checkpoints.rank_states import folder_of_states, load_rank_states
from ragen_pl.checkpoints.sharded_checkpoint import (
    SHARDS,
    folder_for,
    layout_of,
    non_finite_entry,
    read_shards,
    remove_shards,
    save_shards,
)
from ragen_pl.config.errors import ConfigError
from ragen_pl.modules.frozen import without_frozen
from ragen_pl.modules.sharding import HYBRID


class FSDP2Strategy(ModelParallelStrategy):
    """Shard weights, gradients and the optimizer's state over all ranks, with torch's `fully_shard`.

    The module shards itself in `configure_model`. A run can continue from its checkpoints on another number of devices
    or with another strategy.

    Args:
        sharded_checkpoints: Whether every rank writes its own part of a checkpoint
            (`ragen_pl.checkpoints.sharded_checkpoint`). Otherwise a checkpoint is a single file with whole tensors,
            gathered in the memory of the first rank's host.
        shard_size: Number of neighboring ranks that share one copy of the state, such as the GPUs of a machine. It
            divides the number of ranks, and gradients are averaged over the copies. None for one copy on all ranks.
        process_group_backend: Backend of torch.distributed; None for NCCL on GPUs and Gloo on CPUs.
        timeout: Longest wait for another rank.
    """

    needs_trust = ()

    def __init__(
        self,
        *,
        sharded_checkpoints: bool = False,
        shard_size: Count | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.sharded_checkpoints, self.shard_size = sharded_checkpoints, shard_size

    def setup_environment(self) -> None:
        """Start the process group and its mesh of all ranks.

        Raises:
            ValueError: The number of ranks is no multiple of `shard_size`.
        """
        ranks = self.num_nodes * self.num_processes
        self._data_parallel_size = ranks
        if self.shard_size is not None and ranks % self.shard_size:
            raise ValueError(
                f"trainer.strategy.shard_size={self.shard_size}: expected a divisor of the {ranks} ranks"
            )
        super().setup_environment()
        if self.shard_size is not None:
            self._device_mesh = init_device_mesh(
                self.root_device.type,
                (ranks // self.shard_size, self.shard_size),
                mesh_dim_names=HYBRID,
            )
            assert self.lightning_module is not None
            self.lightning_module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each rank has data of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether the Trainer restores the optimizer by `load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of a checkpoint. All ranks must call it.

        They are sharded for a sharded checkpoint; otherwise whole, and empty on other ranks than the first.
        """
        assert self.lightning_module is not None
        module = self.lightning_module
        return self._checkpointed(without_frozen(module, module.state_dict()))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, sharded or whole as the weights are. All ranks must call it."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        state = optimizer.state_dict()
        entries = {number: self._checkpointed(entry) for number, entry in state["state"].items()}
        written = self.sharded_checkpoints or self.is_global_zero
        return {**state, "state": entries} if written else {}

    def _checkpointed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return dict(state) if self.sharded_checkpoints else on_first_rank(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint. All ranks must call it."""
        file = Path(self.broadcast(filepath))
        if self.sharded_checkpoints:
            own = folder_for(file, unique=self.broadcast(secrets.token_hex(4)))
            save_shards(checkpoint, folder_of_states() or own)
        super().save_checkpoint(checkpoint, file, storage_options)
        self.barrier()
        if self.is_global_zero and folder_of_states() is None:
            remove_shards(file, keep=checkpoint.get(SHARDS))

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint: of a sharded one each rank's part, of another one tensors that stay in the file."""
        file = Path(self.broadcast(checkpoint_path))
        checkpoint: dict[str, Any] = torch.load(
            file, mmap=True, map_location="cpu", weights_only=weights_only
        )
        if SHARDS in checkpoint:
            assert self.lightning_module is not None
            layout = layout_of(self.lightning_module.state_dict(), self.optimizers)
            checkpoint = read_shards(checkpoint, file, layout=layout)
            parameters = {name for name, _ in self.lightning_module.named_parameters()}
            if (entry := non_finite_entry(checkpoint, parameters)) is not None:
                raise ConfigError(
                    f"ckpt_path={file}: its entry {entry} has NaN or infinite values; give another checkpoint"
                )
        return dict(load_rank_states(checkpoint, folder=file.parent))

    @torch.no_grad()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load each rank's part of the weights."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        state = {
            name: sharded_like(value, own[name]) if name in own else value
            for name, value in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each rank's part of the optimizers' states."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(_sharded_as_weights(state, optimizer))


def _sharded_as_weights(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state with the tensors of a weight's shape sharded as the weight."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {
        **state,
        "state": {
            number: {
                name: sharded_like(value, weights[number])
                if isinstance(value, Tensor) and value.shape == weights[number].shape
                else value
                for name, value in entry.items()
            }
            for number, entry in state["state"].items()
        },
    }
