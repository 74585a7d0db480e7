"""Speed and memory of models of real sizes on a GPU, by the trainer's own rollout and update.

    python benchmarks/gpu.py

For each case the script prints
- sampled tokens per second of the rollout engine, and of transformers' `generate` on the same dialogue;
- trained tokens per second of the update, and the share of the GPU's peak that its matrix products reach (MFU;
  Chowdhery et al., 2022, PaLM, appendix B). Recomputed activations do not count;
- the measured peak of memory in rollout and update, beside that of the plan (`python -m ragen_pl.doctor`).

The weights are random, so the model need not be downloaded. The tokenizer is the small model's, and the vocabulary has
the real size. Invalid responses do not end an episode.

Overrides of the config change the cases, so a smaller one runs anywhere (see the test):
`python benchmarks/gpu.py --cases text model.size=small '+model.sizes.small={hidden_size: 64, …}'`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from dialogue import Dialogue, Response, endless, engine_response, generate_response
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from timing import CLOCKS, Stopwatch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ragen_pl.config.paths import config_dir
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.memory.abstract import FakeKernels
from ragen_pl.memory.dry_run import abstract_agent, minibatch_of
from ragen_pl.memory.named import named_config
from ragen_pl.memory.plan import MemoryPlan, plan_memory
from ragen_pl.memory.workload import workload_of
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.small_vlm.tokenizer import load_tokenizer
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.run.build import assemble, build_agent, build_datamodule, plain
from ragen_pl.run.train import quieten
from ragen_pl.run.trainer import build_trainer

CASES = {
    "text": ("env=frozenlake", "experiment=gpu_80gb", "model=qwen2_5", "model.size=0.5B"),
    "images": ("env=frozenlake_visual", "experiment=gpu_80gb"),
}
"""Overrides of each case: Qwen2.5 of 0.5B and Qwen2.5-VL of 3B, with the preset for one GPU of 80 GB."""
PLAYED_TO_THE_END = ("env.invalid_ends=false", "validation.episodes=1", "memory.check=false")
# tensor cores in bfloat16 without sparsity, in units of 1e12 operations a second, from NVIDIA's data sheets
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "4090": 165}
IMAGE_SLOT = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGE_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


# ---- a model of real size with random weights


def write_model(model: Mapping[str, Any], folder: Path, *, device: str) -> None:
    """Write a named model with random weights in bfloat16, as a Hugging Face folder.

    Args:
        model: The node `model` of a config.
        folder: Where to write it.
        device: Where the weights are drawn.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    config, tokenizer = named_config(model), load_tokenizer()
    has_images = type(config) in AutoModelForImageTextToText._model_mapping
    if has_images:
        tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_TOKENS.values()]})
        tokenizer.chat_template = tokenizer.chat_template.replace("<|image|>", IMAGE_SLOT)
        for name, token in IMAGE_TOKENS.items():
            setattr(config, name, tokenizer.convert_tokens_to_ids(token))
        processor = Qwen2_5_VLProcessor(
            Qwen2VLImageProcessor(**model["processor"]), tokenizer, chat_template=tokenizer.chat_template,
            video_processor=Qwen2VLVideoProcessor(),
        )  # fmt: skip
        processor.save_pretrained(folder)
    decoder = config.get_text_config()
    decoder.eos_token_id, decoder.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    with torch.device(device):
        weights = kind.from_config(config, dtype=torch.bfloat16)
    weights.generation_config.eos_token_id = tokenizer.eos_token_id
    weights.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- rollout and update of a run


@dataclass
class Phase:
    """One phase of an iteration."""

    seconds: float = 0.0
    tokens: int = 0
    """Sampled tokens of a rollout, positions of an update's samples."""
    peak: int = 0
    """Most bytes of the GPU at once; 0 on the CPU."""


@dataclass
class PhaseMeter(RolloutCallback):
    """Keep time, tokens and peak of memory of each iteration's rollout and update."""

    rollouts: list[Phase] = field(default_factory=list)
    updates: list[Phase] = field(default_factory=list)
    positions: int = 0
    _began: float = 0.0

    def on_rollout_start(self, *_: Any) -> None:
        """Begin a rollout."""
        self._begin()

    def on_rollout_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, trajectories: Any
    ) -> None:
        """End a rollout."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        self.rollouts.append(self._end(sum(len(turn.response_ids) for turn in turns)))

    def on_train_epoch_start(self, *_: Any) -> None:
        """Begin an update."""
        self.positions = 0
        self._begin()

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, *_: Any
    ) -> None:
        """Count the positions of a minibatch."""
        self.positions += int(batch.samples.length.sum())

    def on_train_epoch_end(self, *_: Any) -> None:
        """End an update."""
        self.updates.append(self._end(self.positions))

    def _begin(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def _end(self, tokens: int) -> Phase:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return Phase(time.perf_counter() - self._began, tokens, peak)


def run(cfg: DictConfig, *, iterations: int) -> tuple[PhaseMeter, ModelBundle]:
    """Run iterations of a config, and return their figures and the model on its device."""
    parts = assemble(cfg)
    agent, meter = build_agent(parts), PhaseMeter()
    trainer = build_trainer(
        plain(cfg.trainer) | {"max_epochs": iterations, "limit_val_batches": 0},
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[RolloutUpdate(validate_first=False), meter],
    )  # fmt: skip
    trainer.fit(agent, datamodule=build_datamodule(parts))
    agent.eval().to(trainer.strategy.root_device)
    return meter, parts.bundle


def flops_of_a_position(cfg: DictConfig) -> float:
    """Return the operations of an update for each position of a sample, counted without data.

    Nothing is recomputed but the head, whose logits are never kept.
    """
    cfg = OmegaConf.merge(cfg, {"update": {"gradient_checkpointing": False}})  # type: ignore[assignment]
    agent = abstract_agent(cfg)
    work = replace(workload_of(cfg, agent.policy.bundle), rows=1)
    batch = minibatch_of(agent, work)
    agent.train()
    # torch 2.14 does not count a fused attention without data
    math = sdpa_kernel(SDPBackend.MATH)
    with FakeKernels(), math, FlopCounterMode(display=False) as counter:
        with agent.trainer.precision_plugin.forward_context():
            loss = agent.loss(agent.scorer.score_minibatch(batch), batch).loss
        loss.backward()
    return counter.get_total_flops() / work.length


# ---- the engine and transformers' generate


def tokens_per_second(
    dialogue: Dialogue, bundle: ModelBundle, response: Response, tokens: int
) -> float:
    """Return the sampled tokens of a dialogue per second, after one turn that is not timed."""
    replace(dialogue, turns=1).play(bundle, response)
    began = time.perf_counter()
    # the ids come to the host, so nothing is under way at the end
    dialogue.play(bundle, response)
    return dialogue.num_envs * dialogue.turns * tokens / (time.perf_counter() - began)


# ---- report


def report(case: str, args: argparse.Namespace) -> None:
    """Measure a case and print its figures."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = composed([*CASES[case], *args.overrides])
        began = time.perf_counter()
        write_model(plain(cfg.model), Path(folder), device=args.device)
        print(f"\n{case}: weights drawn and written in {time.perf_counter() - began:.0f} s")
        cfg.model.build.path = folder
        if args.device == "cuda":
            torch.cuda.empty_cache()  # of the drawn weights, which the plan would not find free
        plan = plan_memory(cfg)
        meter, bundle = run(cfg, iterations=args.iterations)
        peak = args.peak_tflops or known_peak()
        report_run(cfg, meter, plan, peak=peak)
        model = endless(bundle)
        watch = Stopwatch(CLOCKS["wall"])
        dialogue = Dialogue(num_envs=args.num_envs, turns=args.turns, rules=True, watch=watch)
        engine = TransformersEngine(PolicyModule(model))
        engine.load_weights(0)
        tokens = args.response_tokens
        sides = (
            partial(engine_response, engine, tokens),
            partial(generate_response, model, tokens),
        )
        ours, theirs = (tokens_per_second(dialogue, model, side, tokens) for side in sides)
        print(
            f"  dialogue  {dialogue.num_envs} environments, {dialogue.turns} turns, {tokens} tokens a response: engine "
            f"{ours:,.0f} tokens/s, generate {theirs:,.0f}, ratio {ours / theirs:.1f}"
        )


def report_run(cfg: DictConfig, meter: PhaseMeter, plan: MemoryPlan, *, peak: float | None) -> None:
    """Print speed and memory of the last iteration; the first one also compiles and allocates."""
    rollout, update = meter.rollouts[-1], meter.updates[-1]
    speed = update.tokens / update.seconds
    share = ""
    if peak is not None:
        share = f", MFU {speed * flops_of_a_position(cfg) / (peak * 1e12):.1%} of {peak:g} TFLOP/s"
    planned = {phase.name: phase.total for phase in plan.phases}
    in_update = max(planned["update"], planned["optimizer step"])
    print(
        f"  rollout   {rollout.tokens / rollout.seconds:,.0f} sampled tokens/s in {rollout.seconds:.1f} s"
    )
    print(f"  update    {speed:,.0f} tokens/s in {update.seconds:.1f} s{share}")
    for name, phase, expected in (
        ("rollout", rollout, planned["rollout"]),
        ("update", update, in_update),
    ):
        measured = f"{phase.peak / 1e9:.2f} GB" if phase.peak else "not measured on a CPU"
        print(f"  memory    {name}: {measured}, planned {expected / 1e9:.2f} GB")


def known_peak() -> float | None:
    """Return the GPU's peak from the table, None for another one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the config of a run."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("fit", [*PLAYED_TO_THE_END, "logger=none", *overrides])


def main() -> None:
    """Print the figures of the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--iterations", type=int, default=2, help="the last one counts")
    parser.add_argument("--num-envs", type=int, default=64, help="of the dialogue")
    parser.add_argument("--turns", type=int, default=5, help="of the dialogue")
    parser.add_argument("--response-tokens", type=int, default=128, help="of the dialogue")
    parser.add_argument(
        "--peak-tflops", type=float, help="of the GPU in bfloat16, if it is not in the table"
    )
    parser.add_argument("overrides", nargs="*", help="of the config, such as model.size=7B")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    quieten()
    device = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU: the CPU"
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}")
    for case in args.cases:
        report(case, args)


if __name__ == "__main__":
    main()
