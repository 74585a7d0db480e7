"""Speed and memory of models of real sizes on one GPU, by the trainer's own engine, update and commands.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --steps sampling update_images

Each step is a process of its own and takes up to a minute:

- `sampling`: ms a token of the in-process engine and of transformers' `generate`, for the same prompts.
- `update_images`, `update_many_images`, `update_text`, `update_lora`: trained tokens per second of a microbatch, the
  share of the GPU's peak that its matrix products reach (MFU; Chowdhery et al., 2022, PaLM, appendix B; recomputed
  activations do not count), the first microbatch, and the peak of memory.
- `gpu_80gb`, `gpu_24gb`: iterations of the presets with short responses: the peak of memory in each phase beside that
  of the plan (`python -m ragen_pl.doctor`), and the seconds from the last iteration to the last validation. For
  `gpu_24gb`, the process may use 24 GB of the GPU.
- `head`: log-probs of a vocabulary of 152k and their gradients, beside those of Liger and cut cross-entropy where they
  are installed.
- `main_job`: `python -m ragen_pl.fit env=frozenlake_visual` from start to end.

The weights are random, so no model is downloaded. The tokenizer is the small model's, and the vocabulary has the real
size. Overrides of the config make the models smaller, so that the script runs anywhere (see the test).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import transformers
from dialogue import endless
from hydra import compose, initialize_config_dir
from lightning.pytorch.utilities import move_data_to_device
from omegaconf import DictConfig, OmegaConf
from phases import PhaseMeter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ragen_pl.assembly.build import assemble_agent, build_bundle, build_critic, build_policy
from ragen_pl.config.nodes import plain
from ragen_pl.config.paths import config_dir
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, Prompt
from ragen_pl.memory.dry_run import abstract_agent, minibatch_of
from ragen_pl.memory.named import named_config
from ragen_pl.memory.plan import plan_memory
from ragen_pl.memory.workload import Workload
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.norms import own_norms
from ragen_pl.models.small_vlm.tokenizer import load_tokenizer
from ragen_pl.modules.forward import LOGITS_MIB, score_states, tokens_per_chunk
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.run.train import quieten, train

# tensor cores in bfloat16 without sparsity, in units of 1e12 operations a second, from NVIDIA's data sheets
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "4090": 165}
IMAGE_SLOT = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGE_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
IMAGES_3B = ("env=frozenlake_visual", "experiment=gpu_80gb")
TEXT = ("env=frozenlake", "experiment=gpu_80gb")
LORA = "+model.build.lora={r: 32, lora_alpha: 64, target_modules: all-linear}"
# a run of the presets in a minute
SHORT = (
    "env.max_turns=4",
    "rollout.groups=4",
    "rollout.group_size=8",
    "rollout.max_response_tokens=64",
    "trainer.max_epochs=2",
    "validation.episodes=4",
    "validation.baselines=null",
    "memory.check=false",
    "callbacks.checkpoint=null",
    "callbacks.progress=null",
    "callbacks.trajectories=null",
    "+callbacks.phases._target_=phases.PhaseMeter",
)


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of the update.

    Attributes:
        rows: Samples.
        length: Tokens of each.
        sampled: Those that the policy sampled.
        images: Images of each.
    """

    rows: int
    length: int
    sampled: int
    images: int = 0

    @property
    def workload(self) -> Workload:
        """Its sizes. Images have 64 by 64 pixels, which Qwen2.5-VL's processor enlarges to 100 tokens."""
        return Workload(
            episodes=self.rows, prompt=self.length - self.sampled, response=self.sampled, rows=self.rows,
            length=self.length, sampled=self.sampled, images=(np.zeros((64, 64, 3), np.uint8),) * self.images,
        )  # fmt: skip


UPDATES = {
    "update_images": (IMAGES_3B, Microbatch(7, 1100, 256, images=1), "aim 10,000, then 15,000"),
    "update_many_images": (IMAGES_3B, Microbatch(7, 1100, 256, images=4), "aim 8,000"),
    "update_text": (
        (*TEXT, "model=qwen2_5", "model.size=0.5B"),
        Microbatch(8, 2048, 1024),
        "aim 12,000; prime-rl, 0.6B: 11,900",
    ),
    "update_lora": (
        (*TEXT, "model=qwen3", "model.size=4B", LORA),
        Microbatch(8, 2048, 1024),
        "aim 6,200 in 24 GB; prime-rl: 6,230 in 25 GB",
    ),
}
"""Overrides, microbatch and aim of each step that times an update."""


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


@dataclass(frozen=True)
class Bench:
    """Context of all steps: overrides of every config, the device, and a folder for the models."""

    overrides: tuple[str, ...]
    folder: Path
    device: str
    peak_tflops: float | None
    rows: int
    prompt: int
    tokens: int

    def config(self, *overrides: str) -> DictConfig:
        """Return the config of a run whose model has its weights in a folder, which is written once."""
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            cfg = compose("fit", ["logger=none", *overrides, *self.overrides])
        folder = self.folder / cfg.model.build.path.replace("/", "-")
        if not (folder / "config.json").exists():
            write_model(plain(cfg.model), folder, device=self.device)
            if self.device == "cuda":
                torch.cuda.empty_cache()
        cfg.model.build.path = str(folder)
        return cfg

    def synchronized(self) -> float:
        """Return the time at which the device has done all that it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> str:
        """Return the peak of memory since the last reset, in GB."""
        if self.device != "cuda":
            return "not measured on a CPU"
        return f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB"

    def reset_peak(self) -> None:
        """Begin to measure the peak of memory."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()


# ---- sampling


def sampling(bench: Bench) -> None:
    """Time the engine and `generate`, and print ms a token."""
    bundle = endless(build_bundle(bench.config(*IMAGES_3B)))
    bundle.model.to(bench.device).eval()
    engine = TransformersEngine(PolicyModule(bundle))
    ours = _ms_a_token(bench, lambda count: _respond(engine, bench, count))
    print(
        f"sampling: {bench.rows} rows, prompt of {bench.prompt}: engine {ours:.1f} ms a token (aim 12), ",
        end="",
    )
    print(f"{1000 * bench.rows / ours:,.0f} tokens/s, peak {bench.peak()}", flush=True)
    engine.close()
    bench.reset_peak()
    theirs = _ms_a_token(bench, lambda count: _generate(bundle, bench, count))
    print(
        f"sampling: generate {theirs:.1f} ms a token, ratio {theirs / ours:.1f} (aim 7), peak {bench.peak()}",
        flush=True,
    )


def _ms_a_token(bench: Bench, sample: Callable[[int], None]) -> float:
    """Return the milliseconds of a further token, from responses of two lengths, each the faster of two.

    NaN where the longer response was not slower: it is too short for this machine to time.
    """
    few, many = 8, 8 + bench.tokens
    # the longer one first: the graphs that it captures serve the shorter one too, which would capture none
    for count in (many, few):
        sample(count)
    seconds = {few: float("inf"), many: float("inf")}
    for count in (many, few) * 2:
        began = bench.synchronized()
        sample(count)
        seconds[count] = min(seconds[count], bench.synchronized() - began)
    print(f"  {few} tokens {seconds[few]:.2f} s, {many} tokens {seconds[many]:.2f} s", flush=True)
    further = seconds[many] - seconds[few]
    return 1000 * further / bench.tokens if further > 0 else float("nan")


def _respond(engine: TransformersEngine, bench: Bench, count: int) -> None:
    rng = np.random.default_rng(0)
    engine.load_weights(0)
    requests = []
    for row in range(bench.rows):
        # prompts are not equally long
        ids = rng.integers(100, 200, bench.prompt - row % 7).astype(np.int64)
        requests.append(
            GenerationRequest(
                session=row, prompt=Prompt(ids=ids, unexpanded_ids=ids), max_tokens=count, temperature=1.0, seed=row
            )
        )  # fmt: skip
    engine.submit(requests, keep=False)
    assert all(len(generation.ids) == count for _, generation in engine.collect())


def _generate(bundle: ModelBundle, bench: Bench, count: int) -> None:
    ids = torch.randint(100, 200, (bench.rows, bench.prompt), device=bench.device)
    # as a process of transformers alone has it; the trainer switches it off
    torch.backends.cuda.enable_cudnn_sdp(True)
    with own_norms(bundle.model):
        bundle.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
            do_sample=True, top_k=0, pad_token_id=0,
        )  # fmt: skip


# ---- update


def update(bench: Bench, name: str) -> None:
    """Time forward and backward pass of a microbatch, and print trained tokens per second."""
    overrides, shape, aim = UPDATES[name]
    cfg = bench.config(*overrides)
    bundle = build_bundle(cfg)
    agent = assemble_agent(cfg, build_policy(bundle, cfg["update"]), build_critic(cfg, bundle))
    agent.to(bench.device).train()
    agent.trainer = pl.Trainer(precision="32-true", max_epochs=1, barebones=True)
    # the float32 copies of the weights let gradients add up in float32
    optimizer = agent.configure_optimizers()["optimizer"]  # type: ignore[index,call-overload]
    batch = move_data_to_device(minibatch_of(agent, shape.workload), torch.device(bench.device))
    seconds = []
    for _ in range(5):
        bench.reset_peak()
        began = bench.synchronized()
        agent.loss(agent.scorer.score_minibatch(batch), batch).loss.backward()
        seconds.append(bench.synchronized() - began)
    tokens, best = shape.rows * shape.length, min(seconds)
    share = ""
    if bench.peak_tflops is not None:
        rate = flops_of_a_position(cfg, shape) * tokens / best
        share = f", MFU {rate / (bench.peak_tflops * 1e12):.1%} of {bench.peak_tflops:g} TFLOP/s"
    print(
        f"{name}: {shape.rows} x {shape.length} tokens, {shape.rows * shape.images} images: {tokens / best:,.0f} "
        f"tokens/s ({aim}), {best:.2f} s{share}, first {seconds[0]:.1f} s (aim 1.5), peak {bench.peak()}",
        flush=True,
    )
    del optimizer


def flops_of_a_position(cfg: DictConfig, shape: Microbatch) -> float:
    """Return the operations of an update for each position of a sample, counted without data.

    Nothing is recomputed but the head, whose logits are never kept.
    """
    cfg = OmegaConf.merge(cfg, {"update": {"gradient_checkpointing": False}})  # type: ignore[assignment]
    agent = abstract_agent(cfg)
    batch = minibatch_of(agent, replace(shape.workload, rows=1))
    agent.train()
    # torch 2.14 does not count a fused attention without data
    math = sdpa_kernel(SDPBackend.MATH)
    with math, FlopCounterMode(display=False) as counter:
        with agent.trainer.precision_plugin.forward_context():
            loss = agent.loss(agent.scorer.score_minibatch(batch), batch).loss
        loss.backward()
    return counter.get_total_flops() / shape.length


# ---- head

HEAD = (16_384, 151_936, 2048)
"""Tokens, vocabulary and width of the head that is timed."""


def head(bench: Bench) -> None:
    """Time log-probs of a head and their gradients, ours beside the fused kernels of other packages.

    Each token's log-prob has a weight of its own, as in a policy loss. Errors are relative, of 256 tokens against
    float32.
    """
    tokens, vocabulary, width = HEAD
    generator = torch.Generator(bench.device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=bench.device)
    hidden = draw(tokens, width).bfloat16().requires_grad_()
    weight = (draw(vocabulary, width) / width**0.5).bfloat16().requires_grad_()
    targets = torch.randint(
        vocabulary, (tokens,), generator=generator, device=bench.device, dtype=torch.int64
    )
    weights = draw(tokens)
    few = slice(0, min(256, tokens))
    exact = hidden[few].detach().float().requires_grad_()
    logprobs = (exact @ weight.detach().float().T).log_softmax(-1)
    expected = logprobs.gather(-1, targets[few, None])[:, 0]
    (expected * weights[few]).sum().backward()
    for name, score in _heads(bench.device).items():
        seconds = []
        for _ in range(4):
            hidden.grad = weight.grad = None
            bench.reset_peak()
            began = bench.synchronized()
            found = score(hidden, weight, targets)
            (found * weights).sum().backward()
            seconds.append(bench.synchronized() - began)
        assert hidden.grad is not None and exact.grad is not None
        errors = [
            float((own.detach().float() - other.detach()).norm() / other.detach().norm())
            for own, other in ((found[few], expected), (hidden.grad[few], exact.grad))
        ]
        print(
            f"head: {name}: {tokens:,} tokens x {vocabulary:,}: {1000 * min(seconds):.0f} ms, peak {bench.peak()}, "
            f"error of log-probs {errors[0]:.1e}, of gradients {errors[1]:.1e}",
            flush=True,
        )


Scores = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _heads(device: str) -> dict[str, Scores]:
    """Return functions of hidden states, the head's weights and tokens that return log-probs, by name."""

    def ours(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        model = SimpleNamespace(
            model=SimpleNamespace(get_output_embeddings=lambda: SimpleNamespace(weight=weight)),
            lm_head=lambda states: states @ weight.T,
            banned=lambda device: torch.zeros(0, dtype=torch.int64, device=device),
        )
        ones = torch.ones(len(tokens), device=hidden.device)
        chunk = tokens_per_chunk(model, LOGITS_MIB)  # type: ignore[arg-type]
        scores = score_states(model, hidden, tokens, temperature=ones, chunk=chunk, recompute=True)  # type: ignore[arg-type]
        return scores.logprobs

    found: dict[str, Scores] = {"ours, with entropies": ours}
    # their kernels are Triton's
    if device == "cuda" and find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["Liger"] = lambda hidden, weight, tokens: (
            -liger_fused_linear_cross_entropy(
                hidden, weight, tokens, reduction="none", accum_dtype=torch.float32
            )
        )
    if device == "cuda" and find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        found["cut cross-entropy"] = lambda hidden, weight, tokens: (
            -linear_cross_entropy(hidden, weight, tokens, reduction="none")
        )
    return found


# ---- runs


def preset(bench: Bench, name: str, *, limit_gb: float | None = None) -> None:
    """Run two iterations of a preset, and print peaks of memory beside the plan and the seconds at the end."""
    if limit_gb is not None and bench.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gb * 1e9 / total))
    cfg = bench.config(
        "env=frozenlake_visual",
        f"experiment={name}",
        *SHORT,
        f"paths.run_dir={bench.folder}/{name}",
    )
    planned = {phase.name: phase.total for phase in plan_memory(cfg).phases}
    began = time.perf_counter()
    train(cfg)
    ended, meter = time.perf_counter(), PhaseMeter.last
    for phase, measured in meter.phases.items():
        found = f"{measured.peak / 1e9:.1f} GB" if measured.peak else "not measured on a CPU"
        ratio = f", {measured.peak / planned[phase]:.0%} of it" if measured.peak else ""
        print(
            f"{name}: {phase} {measured.seconds:.1f} s, peak {found}, planned {planned[phase] / 1e9:.1f} GB{ratio}"
        )
    waited, validation = (
        meter.last_validation - meter.last_iteration,
        meter.validated - meter.last_validation,
    )
    print(
        f"{name}: {waited:.1f} s from the last iteration to the last validation (aim 5), {validation:.1f} s in it, "
        f"{ended - meter.validated:.1f} s from there to the end; {ended - began:.0f} s in all",
        flush=True,
    )


def main_job(bench: Bench) -> None:
    """Run the main job as a command, and print its seconds and its success."""
    folder = bench.folder / "main_job"
    arguments = [
        "env=frozenlake_visual",
        "logger=none",
        f"paths.run_dir={folder}",
        *bench.overrides,
    ]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "ragen_pl.fit", *arguments],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    metrics = json.loads((folder / "metrics.json").read_text())
    times = {
        key: round(value, 2) for key, value in sorted(metrics.items()) if key.startswith("time/")
    }
    print(
        f"main_job: {seconds:.0f} s in all (aim 60), success {metrics['val/success']:.3f}; {times}",
        flush=True,
    )


STEPS: dict[str, Callable[[Bench], None]] = {
    "sampling": sampling,
    **{name: lambda bench, name=name: update(bench, name) for name in UPDATES},  # type: ignore[misc]
    "head": head,
    "gpu_80gb": lambda bench: preset(bench, "gpu_80gb"),
    "gpu_24gb": lambda bench: preset(bench, "gpu_24gb", limit_gb=24.0),
    "main_job": main_job,
}


def known_peak() -> float | None:
    """Return the GPU's peak from the table, None for another one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def run_steps(args: argparse.Namespace, folder: Path) -> None:
    """Run each step in a process of its own, so that its memory and its failure are its own."""
    given = [word for word in sys.argv[1:] if word not in STEPS and word != "--steps"]
    for step in args.steps:
        began = time.perf_counter()
        command = [sys.executable, __file__, *given, "--folder", str(folder), "--step", step]
        try:
            code = subprocess.run(command, check=False, timeout=args.limit).returncode
            ending = "" if code == 0 else f", failed with code {code}"
        except subprocess.TimeoutExpired:
            ending = f", stopped after {args.limit} s"
        print(f"  ({step}: {time.perf_counter() - began:.0f} s{ending})", flush=True)


def main() -> None:
    """Print the figures of the steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", nargs="*", choices=STEPS, default=list(STEPS))
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--folder", type=Path, help="for models and runs; by default a temporary one"
    )
    parser.add_argument("--limit", type=int, default=90, help="seconds of a step")
    parser.add_argument("--rows", type=int, default=64, help="of sampling")
    parser.add_argument("--prompt", type=int, default=600, help="tokens, of sampling")
    parser.add_argument("--tokens", type=int, default=64, help="timed tokens of a response")
    parser.add_argument(
        "--peak-tflops", type=float, help="of the GPU in bfloat16, if it is not in the table"
    )
    parser.add_argument("overrides", nargs="*", help="of every config, such as model.size=small")
    args = parser.parse_args()
    if args.step is None:
        with tempfile.TemporaryDirectory() as temporary:
            run_steps(args, args.folder or Path(temporary))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quieten()
    name = torch.cuda.get_device_name() if device == "cuda" else "no GPU: the CPU"
    print(
        f"{args.step} on {name}, torch {torch.__version__}, transformers {transformers.__version__}",
        flush=True,
    )
    peak = args.peak_tflops or known_peak()
    STEPS[args.step](
        Bench(tuple(args.overrides), args.folder, device, peak, args.rows, args.prompt, args.tokens)
    )


if __name__ == "__main__":
    main()
