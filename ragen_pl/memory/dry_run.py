"""Count a run's allocations on a model without data (`ragen_pl.memory.abstract`).

Forward, loss, backward and optimizer step are the run's own code, so microbatches, checkpointing, chunks of the head,
adapters, master weights and precision count as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ragen_pl.assembly.build import (
    assemble_agent,
    build_bundle,
    build_critic,
    build_policy,
    choose_accelerator,
)
from ragen_pl.assembly.start_check import engine_class
from ragen_pl.base.instances import instances
from ragen_pl.config.nodes import plain
from ragen_pl.data.batch import Minibatch, Samples
from ragen_pl.engines.protocol import EngineMemory, RolloutSizes
from ragen_pl.memory.abstract import NormWithoutData, abstract_pretrained
from ragen_pl.memory.live_memory import LiveMemory
from ragen_pl.memory.named import is_pretrained
from ragen_pl.memory.tensors import without_data
from ragen_pl.memory.workload import Workload
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.images import HELD_BYTES
from ragen_pl.models.inputs import DecoderInputs, run_decoder
from ragen_pl.models.norms import fuse_norms
from ragen_pl.modules.agent import AgentModule
from ragen_pl.modules.optimizers import OptimizerFactory, fuse
from ragen_pl.modules.reference import ServedReference
from ragen_pl.modules.separate_gradients import SeparateGradients

MAX_ROWS = 16
"""Samples of a microbatch that are run; the bytes of more are extrapolated."""


def abstract_bundle(cfg: DictConfig) -> ModelBundle:
    """Return the run's model on the meta device.

    Raises:
        UnknownSizesError: The sizes of the model are known to the hub only.
    """
    on_gpu = is_for_gpu(cfg)
    if is_pretrained(cfg):
        bundle: ModelBundle = abstract_pretrained(plain(cfg.model), on_gpu=on_gpu)
    else:
        with torch.device("meta"):
            bundle = build_bundle(cfg)
    if on_gpu:
        fuse_norms(bundle.model, kernel=NormWithoutData.apply)
    return bundle


def is_for_gpu(cfg: DictConfig) -> bool:
    """Return whether memory is planned for a GPU: with `trainer.accelerator=auto` also for any `memory.device_gb`."""
    name = cfg.trainer.accelerator
    is_elsewhere = name == "auto" and cfg.memory.device_gb is not None
    return is_elsewhere or choose_accelerator(name) != "cpu"


def abstract_agent(cfg: DictConfig) -> AgentModule:
    """Return the run's agent with weights without data, attached to a Trainer that does not run.

    Raises:
        UnknownSizesError: The sizes of the model are known to the hub only.
    """
    bundle = abstract_bundle(cfg)
    with torch.device("meta"):
        critic = build_critic(cfg, bundle, build=abstract_bundle)
    agent = assemble_agent(cfg, build_policy(bundle, cfg["update"]), critic)
    # whole rows with padding take as much or more
    bundle.packs_rows = bundle.shares_prefix = False
    agent.trainer = pl.Trainer(
        accelerator="cpu",
        precision=cfg.trainer.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    agent.cast_reference()
    without_data(agent)
    return agent


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; those that share storage count once."""
    # held while they are counted: another tensor could get the id of one that is gone
    held = list(tensors)
    return sum({id(tensor): tensor.nbytes for tensor in held}.values())


@dataclass(frozen=True, slots=True)
class CountedUpdate:
    """Bytes of an optimizer step."""

    peaks: Mapping[int, Counter[str]]
    """By number of rows that were run and by kind, at the peak of forward and backward pass: `activations`, `head` and
    `gradients`. With `copies`, which are part of the optimizer's state."""
    copies: int
    """Master weights."""
    gradients: int
    """After the backward pass."""
    state: int
    """What the optimizer keeps."""
    step: int
    """What the step itself makes and frees."""

    def peak(self, rows: int) -> Counter[str]:
        """Return the peak of this number of rows from those of one or two smaller numbers, on a line."""
        copies = Counter(activations=self.copies)
        if len(self.peaks) == 1:
            return self.peaks[rows] - copies
        (fewer, low), (more, high) = self.peaks.items()
        steps = (rows - more) / (more - fewer)
        kinds = {kind: high[kind] + steps * (high[kind] - low[kind]) for kind in high | low}
        # with more rows the peak may be at another moment, when a kind is freed: the total counts
        positive = {kind: max(0.0, size) for kind, size in kinds.items()}
        scale = sum(kinds.values()) / sum(positive.values())
        return Counter({kind: round(scale * size) for kind, size in positive.items()}) - copies


def rows_to_run(rows: int) -> list[int]:
    """Return the numbers of rows that are run to count a microbatch: masks of images hold data, so not all rows are.

    The peak grows evenly with the rows.
    """
    return [rows] if rows <= MAX_ROWS else [MAX_ROWS // 2, MAX_ROWS]


def count_update(agent: AgentModule, workload: Workload, *, on_gpu: bool = False) -> CountedUpdate:
    """Run one optimizer step on a microbatch and count; where a step adds up several, gradients are already there.

    Args:
        agent: Agent without data.
        workload: Sizes.
        on_gpu: Whether the device is a GPU, on which optimizers step by other kernels.
    """
    trained = [weight for weight in agent.parameters() if weight.requires_grad]
    live = LiveMemory(vocabulary=vocabulary_of(agent), weights=[weight.shape for weight in trained])
    agent.train()
    with live:
        optimizer: Any = agent.configure_optimizers()["optimizer"]  # type: ignore[index,call-overload]
    copies = live.now.total()
    peaks = {
        rows: _count_passes(agent, live, replace(workload, rows=rows))
        for rows in rows_to_run(workload.rows)
    }
    gradients = size_of(weight.grad for weight in trained if weight.grad is not None)
    with live:
        if on_gpu:
            _choose_kernels(optimizer)
        state, step = _count_step(agent, optimizer, live)
    return CountedUpdate(peaks, copies, gradients, copies + state, step)


def _count_passes(agent: AgentModule, live: LiveMemory, workload: Workload) -> Counter[str]:
    """Run forward and backward pass and return their peak memory; leaves the gradients."""
    trained = [weight for weight in agent.parameters() if weight.requires_grad]
    batch = minibatch_of(agent, workload)
    for weight in trained:
        weight.grad = None
        if workload.accumulates:
            # of an earlier microbatch
            weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    live.reset_peak()
    with live:
        with agent.trainer.precision_plugin.forward_context():
            result = agent.loss(agent.scorer.score_minibatch(batch), batch)
        separate = SeparateGradients()
        if result.separate is not None:
            separate.add(result.separate, agent)
        result.loss.backward()
        del result
        kept = _drop_unused(trained) if workload.accumulates else 0
        return live.peak + Counter(gradients=kept)


def _drop_unused(trained: Iterable[nn.Parameter]) -> int:
    """Remove earlier gradients that nothing was added to; return the bytes of the others."""
    size = 0
    for weight in trained:
        if weight.grad is not None and not weight.grad._version:
            weight.grad = None
        elif weight.grad is not None:
            size += weight.grad.nbytes
    return size


def _count_step(agent: AgentModule, optimizer: Any, live: LiveMemory) -> tuple[int, int]:
    """Return the bytes that an optimizer's first step keeps, and those that it frees."""
    before = live.now.total()
    live.reset_peak()
    try:
        optimizer.step()
    except Exception:  # kernels of 8-bit optimizers need data
        trained = sum(weight.numel() for weight in agent.parameters() if weight.requires_grad)
        return int(trained * _state_bytes(agent.optimizer_factory)), 0
    return live.now.total() - before, live.peak.total() - live.now.total()


def _state_bytes(optimizer: OptimizerFactory) -> float:
    """Return the bytes of an optimizer's state for each weight, measured on a few."""
    weight = nn.Parameter(torch.zeros(512, 512))
    weight.grad = torch.zeros_like(weight)
    stepped = optimizer([weight])
    stepped.step()
    state = instances(tree_leaves(dict(stepped.state[weight])), Tensor)
    return size_of(state) / weight.numel()


def _choose_kernels(optimizer: Optimizer) -> None:
    """Let an optimizer step as it would on a GPU: by fused kernels, or on lists of weights as torch's do there."""
    fuse(optimizer, device="cuda")
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and group.get("fused") is None:
            group["foreach"] = True


def count_prefill(agent: AgentModule, workload: Workload, *, rows: int) -> int:
    """Return the bytes that a forward pass without gradients over so many prompts makes and frees."""
    agent.eval()
    bundle = agent.policy.bundle
    live, ids = LiveMemory(), torch.full((rows, workload.prompt), bundle.pad_token_id)
    with live, torch.inference_mode(), agent.trainer.precision_plugin.forward_context():
        run_decoder(bundle, DecoderInputs(ids=ids))
    return live.peak.total()


def engine_memory(
    cfg: DictConfig,
    agent: AgentModule,
    workload: Workload,
    *,
    prefill_bytes: Callable[[int], int],
    device: int | None,
    on_gpu: bool,
) -> EngineMemory:
    """Return the memory plan of the rollout engine's class, empty where the class is unknown before it is built.

    Args:
        cfg: Config of the run.
        agent: Agent without data.
        workload: Sizes.
        prefill_bytes: As in `RolloutSizes`.
        device: Bytes of the device; None if they are unknown.
        on_gpu: Whether it is a GPU.
    """
    engine = engine_class(cfg.rollout.engine)
    if engine is None:
        return EngineMemory()
    agent.eval()
    sizes = RolloutSizes(
        bundle=agent.policy.bundle,
        weights=size_of(agent.policy.parameters()),
        forward_context=agent.trainer.precision_plugin.forward_context,
        prefill_bytes=prefill_bytes,
        episodes=workload.episodes,
        prompt=workload.prompt,
        response=workload.response,
        images=workload.images,
        device=device,
        on_gpu=on_gpu,
    )
    return engine.planned_memory(plain(cfg.rollout.engine), sizes)


@dataclass(frozen=True, slots=True)
class CountedEncoder:
    """Bytes of the image encoder without gradients.

    Attributes:
        fixed: What a call makes, whatever the number of its images.
        image: What it makes for each.
        images_per_call: Largest number of images of a call.
        features: Features of an image.
        frozen: Whether features are held for the whole run.
    """

    fixed: int = 0
    image: int = 0
    images_per_call: int = 1
    features: int = 0
    frozen: bool = False

    def computed(self, images: int) -> int:
        """Return the bytes of encoding images, call after call."""
        in_call = min(images, self.images_per_call)
        return self.fixed + in_call * self.image + (images - in_call) * self.features

    def held(self, images: int, *, iterations: int | None) -> int:
        """Return the bytes of the features that a frozen encoder holds in the end.

        Args:
            images: Images of an iteration.
            iterations: `trainer.max_epochs`; None and -1 are no limit.
        """
        if not self.frozen:
            return 0
        if iterations is None or iterations < 0:
            return HELD_BYTES
        return min(HELD_BYTES, images * iterations * self.features)


def count_encoder(agent: AgentModule, workload: Workload) -> CountedEncoder:
    """Encode one and two images of the run and count."""
    bundle, peaks = agent.policy.bundle, []
    if not workload.images:
        return CountedEncoder()
    agent.eval()
    encoder, image = bundle.images, workload.images[0]
    assert encoder is not None
    for count in (1, 2):
        live = LiveMemory()
        with live, torch.no_grad(), agent.trainer.precision_plugin.forward_context():
            features = encoder.encode_together([image] * count)
        peaks.append(live.peak.total())
        size = sum(tensor.nbytes for tensor in (features.tokens, *features.deepstack)) // count
    one, two = peaks
    return CountedEncoder(
        fixed=max(0, 2 * one - two),
        image=two - one,
        images_per_call=encoder.images_per_call(image),
        features=size,
    )


def vocabulary_of(agent: AgentModule) -> int:
    """Return the number of rows of the policy's language-model head."""
    return int(agent.policy.model.get_output_embeddings().weight.shape[0])


def minibatch_of(agent: AgentModule, workload: Workload) -> Minibatch:
    """Return a microbatch of the update, with the divergence's reference if the loss needs one."""
    samples = samples_of(agent.policy.bundle, workload, rows=workload.rows)
    tokens, reference, ids = workload.rows * workload.sampled, None, None
    kl = agent.loss.kl
    if kl is not None and kl.coefficient:
        full = kl.estimator.over_vocabulary
        assert agent.reference is not None
        width = agent.reference.bundle.hidden_size
        if full and isinstance(agent.reference, ServedReference):
            assert kl.top is not None
            width = kl.top.number + 1
            ids = torch.zeros(tokens, kl.top.number, dtype=torch.int32)
        reference = torch.zeros(tokens, width) if full else torch.zeros(tokens)
    count = torch.tensor(float(tokens))
    return Minibatch(
        samples=samples,
        images=images_of(workload, rows=workload.rows),
        reference=reference,
        reference_ids=ids,
        entropy=0.0,
        loss_tokens=count,
        value_tokens=count,
        kl_tokens=count,
        sequences=torch.tensor(float(workload.rows)),
        episodes=torch.tensor(float(workload.rows)),
        episode_tokens=samples.loss_weight.sum(1),
        microbatches=[torch.arange(workload.rows)],
        ends_step=True,
        text_tokens=torch.tensor(1.0),
        scale=1.0,
    )


def samples_of(bundle: ModelBundle, workload: Workload, *, rows: int) -> Samples:
    """Return samples of the workload's length. Images come first, and the last tokens were sampled."""
    shape = (rows, workload.length)
    ids = torch.full(shape, bundle.pad_token_id)
    # else they would begin with one prefix, which is computed once
    ids[:, 0] = torch.arange(rows) % bundle.model.get_output_embeddings().weight.shape[0]
    if workload.images:
        assert bundle.image_token_id is not None
        start = 0
        for image in workload.images:
            # with text between them: positions of several axes tell images apart by it
            ids[:, start : start + bundle.num_image_tokens(image)] = bundle.image_token_id
            start += bundle.num_image_tokens(image) + 1
    sampled = torch.zeros(shape, dtype=torch.bool)
    sampled[:, -workload.sampled :] = True
    return Samples.of_one_turn(
        ids,
        sampled,
        length=torch.full((rows,), workload.length),
        image_index=torch.arange(rows * len(workload.images)).view(rows, -1),
    )


def images_of(workload: Workload, *, rows: int) -> list[Tensor]:
    """Return the images of this number of samples."""
    return [torch.from_numpy(image) for image in workload.images] * rows
