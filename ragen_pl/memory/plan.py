"""Memory that a run needs on each device, planned from its config before a model is loaded.

What an update allocates is counted by a run without data (`ragen_pl.memory.dry_run`). The rest is arithmetic. Not
planned are the device's context and libraries, an allocator's fragmentation, and what a kernel needs inside itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from ragen_pl.base.machine import free_host_memory, gpu_memory
from ragen_pl.config.errors import config_errors
from ragen_pl.config.nodes import plain
from ragen_pl.config.relations import ranks_asked_for
from ragen_pl.engines.protocol import EngineMemory
from ragen_pl.memory.abstract import config_without_hub
from ragen_pl.memory.dry_run import (
    CountedEncoder,
    CountedUpdate,
    abstract_agent,
    count_encoder,
    count_prefill,
    count_update,
    engine_memory,
    is_for_gpu,
    rows_to_run,
    size_of,
)
from ragen_pl.memory.named import is_pretrained
from ragen_pl.memory.workload import Workload, rows_at_once, workload_of
from ragen_pl.modules.agent import AgentModule
from ragen_pl.modules.forward import SHARED_BYTES
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.run.strategy_rules import is_fsdp2, shard_size

if TYPE_CHECKING:
    from ragen_pl.data.opponents import Opponents

Count = TypeVar("Count")
# of the process that asks for a GPU's memory
_CONTEXT_BYTES = 10**9


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes at the peak of a phase of an iteration, by part."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and the bytes of it that a run may use.

    Attributes:
        name: Name.
        size: Bytes that a run may use while no other process uses any.
        in_use: Bytes that other processes have in use now.
        index: Number of a GPU.
    """

    name: str
    size: int
    in_use: int = 0
    index: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of a run on each of its devices.

    Attributes:
        phases: Phases of an iteration.
        workload: What is computed at once.
        parameters: Number of the policy's parameters.
        trained: Number of those that are trained.
        ranks: Number of devices.
        device: One of the devices; None if its memory is unknown.
    """

    phases: tuple[Phase, ...]
    workload: Workload
    parameters: int
    trained: int
    ranks: int
    device: Device | None
    checkpoint: int
    """Bytes of a checkpoint at the end of an iteration: trained weights, and the optimizer's state."""

    @property
    def highest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether the run fits on the device. True if its memory is unknown."""
        return self.device is None or self.highest.total <= self.device.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Number of devices that share the state of training, by a strategy.

    FSDP shards weights, gradients and the optimizer's state over all ranks, or over each `shard_size` of them (Zhao et
    al., 2023, arXiv 2304.11277). DDP copies gradients into buckets that are averaged (Li et al., 2020, arXiv
    2006.15704).
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    buckets: bool = False

    @classmethod
    def of(cls, strategy: object, *, ranks: int) -> Sharding:
        """Return the sharding of `trainer.strategy` on this number of devices."""
        if ranks == 1:
            return cls()
        if not is_fsdp2(strategy):
            return cls(buckets=True)
        size = shard_size(strategy) or ranks
        return cls(weights=size, gradients=size, optimizer=size)


@dataclass(frozen=True, slots=True)
class _Reads:
    """Settings that a count does not read, and sizes of a workload that it reads besides its images."""

    ignored: tuple[str, ...]
    sizes: tuple[str, ...] = ()


# numbers of episodes, samples and tokens reach a count by the workload
_IGNORED = (
    "memory",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "update.tokens_per_forward",
    "update.tokens_per_microbatch",
    "rollout.num_envs",
)
_READS = {
    "update": _Reads((*_IGNORED, "rollout"), ("length", "sampled", "accumulates")),
    "prefill": _Reads((*_IGNORED, "rollout", "update", "optimizer"), ("prompt",)),
    "encoder": _Reads((*_IGNORED, "rollout", "update", "optimizer")),
    "engine": _Reads(
        (*_IGNORED, "algorithm", "update", "optimizer"), ("episodes", "prompt", "response")
    ),
}


class Counts:
    """Results of runs without data, which plans of almost equal runs share."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def get(
        self,
        name: str,
        cfg: DictConfig,
        work: Workload,
        count: Callable[[], Count],
        *,
        more: object = None,
    ) -> Count:
        """Return a count, made once for all runs with the same values of the settings that it reads.

        Args:
            name: Name of the count in `_READS`.
            cfg: Config of the run.
            work: Sizes of the run.
            count: Makes the count.
            more: What else it reads: numbers of sequences that it runs, or the device's memory.
        """
        read = OmegaConf.create(plain(cfg))
        for key in _READS[name].ignored:
            node, _, last = key.rpartition(".")
            (OmegaConf.select(read, node) if node else read).pop(last, None)
        sizes = [getattr(work, size) for size in _READS[name].sizes]
        shapes = [image.shape for image in work.images]
        key = repr((name, plain(read), is_for_gpu(cfg), sizes, more, shapes))
        if key not in self._made:
            self._made[key] = count()
        return cast("Count", self._made[key])


def plan_memory(cfg: DictConfig, counts: Counts | None = None) -> MemoryPlan:
    """Plan the memory of a run.

    Args:
        cfg: Config of the run.
        counts: Counts of earlier plans, to which those of this one are added.

    Raises:
        UnknownSizesError: The sizes of the model are known to the hub only.
        ConfigError: The model, the algorithm or the environment cannot be built.
    """
    if is_pretrained(cfg):
        config_without_hub(plain(cfg.model))
    counts = Counts() if counts is None else counts
    device, on_gpu = device_of(cfg), is_for_gpu(cfg)
    with torch.random.fork_rng(devices=[]), config_errors("model, algorithm or environment"):
        # the warm start trains the encoder
        trained = OmegaConf.merge(cfg, {"update": {"freeze_vision": False}})
        agent = abstract_agent(cast("DictConfig", trained) if cfg.warm_start.enabled else cfg)
        workload = workload_of(cfg, agent.policy.bundle)
        update = counts.get(
            "update",
            cfg,
            workload,
            lambda: count_update(agent, workload, on_gpu=on_gpu),
            more=rows_to_run(workload.rows),
        )
        if cfg["update"].freeze_vision:
            agent.policy.freeze_vision()

        def prefill_bytes(rows: int) -> int:
            return counts.get(
                "prefill",
                cfg,
                workload,
                lambda: count_prefill(agent, workload, rows=rows),
                more=rows,
            )

        # the trainer scores about as many tokens at once
        rows = max(1, min(workload.episodes, agent.tokens_per_forward // workload.prompt))
        per_position = prefill_bytes(rows) / (rows * workload.prompt)
        size = None if device is None else device.size
        engine = counts.get(
            "engine",
            cfg,
            workload,
            lambda: engine_memory(
                cfg,
                agent,
                workload,
                prefill_bytes=prefill_bytes,
                device=size,
                on_gpu=on_gpu,
            ),
            more=size,
        )
        encoder = counts.get("encoder", cfg, workload, lambda: count_encoder(agent, workload))
        # no part of the count: plans with and without it share that
        images = agent.policy.bundle.images
        encoder = replace(encoder, frozen=images is not None and images.frozen)
    weights = list(agent.policy.parameters())
    return MemoryPlan(
        phases=plan_phases(cfg, agent, workload, update, per_position, engine, encoder),
        workload=workload,
        parameters=sum(weight.numel() for weight in weights),
        trained=sum(weight.numel() for weight in weights if weight.requires_grad),
        ranks=ranks_asked_for(cfg),
        device=device,
        checkpoint=size_of(weight for weight in agent.parameters() if weight.requires_grad)
        + update.state
        + _pool_bytes(cfg, agent),
    )


def _pool_bytes(cfg: DictConfig, agent: AgentModule) -> int:
    """Return the bytes of the weights of all opponents."""
    opponents = _opponents(cfg)
    if opponents is None:
        return 0
    snapshots = opponents.size if opponents.every else int(opponents.initial)
    return (len(opponents.files) + snapshots) * _trained_bytes(agent.policy)


def _opponents(cfg: DictConfig) -> Opponents | None:
    opponents: Opponents | None = instantiate(cfg.get("opponents"), _convert_="all")
    return opponents


def _trained_bytes(policy: PolicyModule) -> int:
    return size_of(weight for weight in policy.parameters() if weight.requires_grad)


def plan_phases(
    cfg: DictConfig,
    agent: AgentModule,
    workload: Workload,
    update: CountedUpdate,
    per_position: float,
    engine: EngineMemory,
    encoder: CountedEncoder,
) -> tuple[Phase, ...]:
    """Plan the memory that a run holds and that each of its phases adds.

    Args:
        cfg: Config of the run.
        agent: Agent without data.
        workload: Sizes.
        update: Count of an optimizer step.
        per_position: Bytes of a forward pass without gradients for each position.
        engine: Memory of the rollout engine.
        encoder: Count of the image encoder.
    """
    sharding = Sharding.of(cfg.trainer.strategy, ranks=ranks_asked_for(cfg))
    opponents = _opponents(cfg)
    own = _tensors([agent.policy, *([] if agent.critic is None else [agent.critic])])
    copies = _tensors([agent.reference] if isinstance(agent.reference, nn.Module) else [])
    weights = size_of(own)
    held = {
        "weights": weights // sharding.weights,
        "reference": size_of([*own, *copies]) - weights,
        "opponent": 0 if opponents is None else _trained_bytes(agent.policy),
        "optimizer state": update.state // sharding.optimizer,
        "held images": encoder.held(workload.all_images, iterations=cfg.trainer.max_epochs),
    }
    gradients = update.gradients // sharding.gradients
    gradients += update.gradients if sharding.buckets else 0
    in_rollout, in_call, in_backward = {}, {}, 0
    if sharding.weights > 1:
        held["reference"] = _sharded_reference(agent, ranks=sharding.weights)
        in_rollout = {"gathered weights": size_of(_tensors([agent.policy]))}
        in_call = {"gathered weights": _gathered_in_call(agent, layers=2)}
        in_backward = _gathered_in_call(agent, layers=1, trained=True)
    positions = workload.samples * workload.length
    scored = max(workload.length, min(agent.tokens_per_forward, positions))
    if agent.critic is not None:
        # the prompt after an episode that the context cuts is as long as the context at most, and is scored too
        scored = max(scored, cfg.context.max_tokens)
    # images are encoded before the decoder runs
    shared = workload.all_images * encoder.features <= SHARED_BYTES
    scored_images = scored // workload.length * len(workload.images)
    encoded = workload.all_images if shared else scored_images
    played_images = encoder.computed(workload.episodes * workload.new_images)
    counted = update.peak(workload.rows)
    peak = dict(counted)
    if encoder.frozen:
        in_update = encoder.computed(workload.rows * len(workload.images))
        peak["activations"] = max(counted["activations"], in_update)
    peak["gradients"] = counted["gradients"] * gradients // max(1, update.gradients)
    peak["gradients"] += in_backward
    peak |= in_call
    sampled = dict(engine.rollout)
    if opponents is not None and "keys and values" in sampled:
        # those of the other seats in games against it
        sampled["keys and values"] += int(opponents.fraction * sampled["keys and values"])
    sampled["activations"] = max(sampled.get("activations", 0), played_images)
    prepared = {
        "activations": max(int(per_position * scored), encoder.computed(encoded)),
        "head": peak.get("head", 0),
        "images": encoded * encoder.features,
    }
    stepped = {"gradients": gradients, "step": update.step // sharding.optimizer}
    phases = [
        Phase("rollout", held | in_rollout | sampled),
        Phase("preparation", held | in_call | prepared | engine.update),
        Phase("update", held | peak | engine.update),
        Phase("optimizer step", held | stepped | engine.update),
    ]
    if cfg.warm_start.enabled:
        rows = rows_at_once(cfg, cfg.warm_start.batch_size, workload.length)
        share = rows / workload.rows
        shown = peak | {"activations": int(peak["activations"] * share)}
        # there is no reference and no opponent yet
        phases.insert(0, Phase("warm start", held | {"reference": 0, "opponent": 0} | shown))
    return tuple(phases)


def _sharded_reference(agent: AgentModule, *, ranks: int) -> int:
    """Return the bytes of a sharded reference, which shares no weights; the head is whole for a full divergence."""
    if not isinstance(agent.reference, PolicyModule):
        return 0
    size, whole = size_of(_tensors([agent.reference])), 0
    if agent.loss.reads_reference_head:
        whole = size_of(agent.reference.model.get_output_embeddings().parameters())
    return (size - whole) // ranks + whole


def _gathered_in_call(agent: AgentModule, *, layers: int, trained: bool = False) -> int:
    """Return the bytes that FSDP2 gathers at once: all but the layers, and some of these.

    Args:
        agent: Agent.
        layers: Number of layers that are gathered at once.
        trained: Whether to count weights with a gradient only.
    """
    bundles = [agent.policy.bundle]
    if agent.critic is not None and agent.critic.backbone is not None:
        bundles.append(agent.critic.backbone)

    def size(module: nn.Module) -> int:
        return size_of(
            weight for weight in module.parameters() if weight.requires_grad or not trained
        )

    outside = sum(
        size(bundle.model) - sum(size(layer) for layer in bundle.layers) for bundle in bundles
    )
    largest = max(size(layer) for bundle in bundles for layer in bundle.layers)
    return outside + layers * largest


def _tensors(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return modules' weights and buffers."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def device_of(cfg: DictConfig) -> Device | None:
    """Return the memory of a device: `memory.device_gb`, that of the run's GPUs, or what the machine has free."""
    if cfg.memory.device_gb is not None:
        return Device(f"a device of {cfg.memory.device_gb:g} GB", int(cfg.memory.device_gb * 1e9))
    if is_for_gpu(cfg):
        gpus = gpu_memory(_own_gpus(cfg.trainer.devices))
        if not gpus:
            return None
        gpu = min(gpus, key=lambda gpu: gpu.free)
        in_use = gpu.total - gpu.free
        return Device(gpu.name, gpu.total, in_use if in_use > _CONTEXT_BYTES else 0, gpu.index)
    free_on_host = free_host_memory()
    if free_on_host is None:
        return None
    # processes on CPUs share the machine
    return Device("this machine", free_on_host // ranks_asked_for(cfg))


def _own_gpus(devices: object) -> list[int]:
    """Return the numbers of the GPUs that a run uses on this machine, as Lightning chooses them; none for all."""
    visible = torch.cuda.device_count()
    if isinstance(devices, ListConfig):
        return [index for index in devices if index < visible]
    return list(range(min(devices, visible))) if isinstance(devices, int) and devices > 0 else []
