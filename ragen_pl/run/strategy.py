"""FSDP2 as a strategy of the Trainer: `trainer.strategy=fsdp2`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from ragen_pl.distributed import sharded_like, whole
from ragen_pl.modules.frozen import without_frozen


class FSDP2Strategy(ModelParallelStrategy):
    """Shard weights, gradients and the optimizer's state over all ranks, with torch's `fully_shard`.

    The module shards itself in `configure_model`. A checkpoint is a single file with whole tensors, in the format of
    any other strategy, so a run can continue on another number of devices or with another strategy.

    Args:
        process_group_backend: Backend of torch.distributed; None for NCCL on GPUs and Gloo on CPUs.
        timeout: Longest wait for another rank.
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """Start the process group and its mesh of all ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether the Trainer restores the optimizer by `load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of a checkpoint, whole; empty on other ranks than the first. All ranks must call it."""
        assert self.lightning_module is not None
        module = self.lightning_module
        return self._on_first_rank(without_frozen(module, module.state_dict()))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, whole; empty on other ranks than the first. All ranks must call it."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        state = optimizer.state_dict()
        gathered = {number: self._on_first_rank(entry) for number, entry in state["state"].items()}
        return {**state, "state": gathered} if self.is_global_zero else {}

    def _on_first_rank(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with whole tensors in the first rank's host memory, one gathered after the other."""
        gathered = {}
        for name, value in state.items():
            value = whole(value.detach()).cpu() if isinstance(value, Tensor) else value
            if self.is_global_zero:
                gathered[name] = value
        return gathered

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint. Its tensors stay in the file until they are used."""
        path = self.broadcast(checkpoint_path)
        checkpoint: dict[str, Any] = torch.load(
            path, mmap=True, map_location="cpu", weights_only=weights_only
        )
        return checkpoint

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
