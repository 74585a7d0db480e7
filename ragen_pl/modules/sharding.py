"""FSDP2: policy, critic and reference sharded over ranks, and the policy's weights gathered for rollouts.

A module's layers are gathered one at a time, in their own forward pass. All else of it (embeddings, the head, an image
encoder) is gathered for a whole call of the module, so within a call ranks may differ in chunks of the head and in
images, but not in microbatches (Zhao et al., 2023, PyTorch FSDP, arXiv 2304.11277).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ragen_pl.base.distributed import all_ranks_do, whole

if TYPE_CHECKING:
    from ragen_pl.engines.protocol import EnginePolicy, RolloutEngine
    from ragen_pl.models.bundle import ModelBundle

T = TypeVar("T")

HYBRID = ("replicate", "shard")
"""Dimensions of the mesh of hybrid sharding: copies of the state, and the ranks that share one."""


def is_sharded(module: nn.Module | None) -> bool:
    """Return whether a module's weights are sharded over ranks."""
    return isinstance(module, FSDPModule)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks of a strategy's mesh, each with samples of its own: one dimension, or those of `HYBRID`."""
    return mesh if mesh.mesh_dim_names == HYBRID else mesh["data_parallel"]


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    layers: Iterable[nn.Module] = (),
    kept: Iterable[nn.Parameter] = (),
) -> None:
    """Shard a module's weights over ranks. Only a call of the module may use them afterwards.

    Args:
        module: Module, changed in place.
        mesh: Ranks, one dimension, or those of `HYBRID`.
        layers: Parts that are gathered one at a time. All ranks have to run each of them equally often.
        kept: Frozen weights that stay whole on every rank.
    """
    # weights in bfloat16 have their gradients added up in float32
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    ignored = set(kept)
    for part in (*layers, module):
        sharded = fully_shard(
            part, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=ignored
        )
    # an image encoder may have had images on some ranks only
    sharded.set_reduce_scatter_unused_params(True)


@contextmanager
def gradients_inside(module: nn.Module) -> Iterator[None]:
    """Allow a call of a sharded module to take gradients of its inputs: they leave the module gathered.

    Args:
        module: Module that is called; nothing is done if it is not sharded.
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    # a gradient would otherwise end with the weights' reduction, and give back what the call still needs
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        module.set_reshard_after_backward(True, recurse=False)
        module.set_requires_gradient_sync(True)


class GatheredPolicy:
    """Sharded policy as a rollout engine reads it: a copy of its model, or its weights one layer at a time.

    Its model is a copy, which ranks may run independently of each other. It is made before the policy is sharded, and
    has weights only between `gather` and `release`.

    Args:
        policy: Policy that will be sharded.
    """

    def __init__(self, policy: EnginePolicy) -> None:
        self._policy, bundle = policy, policy.bundle
        self._iterator: Iterator[tuple[str, Tensor]] | None = None
        # what the engine takes in each load
        self._only_adapters = False
        weights = bundle.model.parameters()
        model = copy.deepcopy(
            bundle.model, memo={id(weight): _without_data(weight) for weight in weights}
        )
        self.bundle = bundle.with_model(model.eval())
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        names = {weight: name for name, weight in model.named_parameters()}
        for part in model.modules():
            for name, weight in part.named_parameters(recurse=False):
                self._places.setdefault(names[weight], []).append((part, name))

    @property
    def is_empty(self) -> bool:
        """Whether the copy has no weights."""
        return next(self.bundle.model.parameters()).is_meta

    @torch.inference_mode(False)
    @torch.no_grad()
    def gather(self) -> None:
        """Take over the policy's present weights. All ranks must call it."""
        weights = dict(self._policy.bundle.model.named_parameters())
        self._replace(lambda name: whole(weights[name].detach()))
        # the buffers
        nn.Module.to(self.bundle.model, self.bundle.device)

    def weights(self, *, adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the present weights, gathered one layer at a time; see `EnginePolicy`."""
        from ragen_pl.models.checkpoint_weights import weights_for_engine

        state = self._policy.bundle.model.state_dict()
        self._only_adapters = adapters
        self._iterator = weights_for_engine(
            self.bundle.model, adapters=adapters, value=lambda name: whole(state[name].detach())
        )
        return self._iterator

    @contextmanager
    def exhausting_weights(self) -> Iterator[None]:
        """Exhaust the iterator of `weights` on every rank, also after an error: the other ranks gather on."""
        self._iterator = None
        try:
            yield
        finally:
            for _ in self._iterator or self.weights(adapters=self._only_adapters):
                pass
            self._iterator = None

    def compute(self, work: Callable[[ModelBundle], T]) -> T:
        """Return the result of a function of the present weights; see `EnginePolicy`."""
        return self._policy.compute(work) if self.is_empty else work(self.bundle)

    def release(self) -> None:
        """Free the weights."""
        weights = dict(self.bundle.model.named_parameters())
        self._replace(lambda name: torch.empty_like(weights[name], device="meta"))

    def _replace(self, values: Callable[[str], Tensor]) -> None:
        for name, places in self._places.items():
            weight = nn.Parameter(values(name), requires_grad=False)
            for part, attribute in places:
                part._parameters[attribute] = weight


@torch.inference_mode(False)
@torch.no_grad()
def load_engine(engine: RolloutEngine, policy: EnginePolicy, *, version: int) -> None:
    """Have an engine use a policy's present weights. All ranks must call it.

    Args:
        engine: Engine.
        policy: Policy that it was built with.
        version: Number of optimizer steps that the weights have taken.

    Raises:
        Exception: The engine's error, on all ranks where it fails on one.
    """
    exhausting_weights: AbstractContextManager[None] = nullcontext()
    if isinstance(policy, GatheredPolicy):
        if engine.in_place:
            policy.gather()
        else:
            exhausting_weights = policy.exhausting_weights()

    def load() -> None:
        with exhausting_weights:
            engine.load_weights(version)

    all_ranks_do(load)


def _without_data(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
