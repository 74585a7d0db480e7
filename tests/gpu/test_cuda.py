"""Differences on a GPU: kernels, the allocator, and runs that choose it. `make test-gpu` runs these."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import move_data_to_device
from support.models.family_models import MODELS, tiny
from support.runs.composing import composed
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode

from ragen_pl.assembly.build import assemble_agent, build_bundle, build_critic, build_policy
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, Prompt, generate
from ragen_pl.memory.dry_run import minibatch_of
from ragen_pl.memory.plan import plan_memory
from ragen_pl.memory.workload import workload_of
from ragen_pl.models import attention
from ragen_pl.models.build import build_small_lm
from ragen_pl.models.inputs import DecoderInputs, run_decoder
from ragen_pl.models.norms import own_norms
from ragen_pl.models.packed_rows import packed_states, packs
from ragen_pl.models.prefix_tree import SortedRows, tree_states
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_agreement

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _full_precision():
    # cuDNN rounds the inputs of convolutions to TF32 by default
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_engine_and_trainer_agree_with_the_models_own_forward(name):
    bundle = tiny(name)
    bundle.model.to(DEVICE)
    context = ContextManager(bundle, window="all", max_tokens=4096)
    engine = TransformersEngine(PolicyModule(bundle).eval())
    size = None if bundle.images is None or MODELS[name].single_image else (56, 84)
    assert check_agreement(context, engine, image_size=size) < 1e-4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(16, 16, 80), (16, 2, 128), (8, 4, 256)])
def test_sequences_of_unequal_lengths_in_one_kernel(heads, key_heads, width, causal, monkeypatch):
    """In bfloat16, against float32 by `sdpa`, of the same rounded inputs."""
    lengths = [64, 16, 1, 64, 300]
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    generator = torch.Generator(DEVICE).manual_seed(0)
    rounded = [
        torch.randn(1, count, sum(lengths), width, device=DEVICE, generator=generator).bfloat16()
        for count in (heads, key_heads, key_heads)
    ]
    factors = torch.randn(1, sum(lengths), heads, width, device=DEVICE, generator=generator)

    def attended(dtype):
        tensors = [each.to(dtype).requires_grad_() for each in rounded]
        output, _ = attention.packed_attention(
            torch.nn.Identity(),
            *tensors,
            cu_seq_lens_q=bounds,
            max_length_q=max(lengths),
            scaling=width**-0.5,
            is_causal=causal,
        )
        assert output.dtype == dtype
        return [output, *torch.autograd.grad((output * factors.to(dtype)).sum(), tensors)]

    expected = attended(torch.float32)
    monkeypatch.setattr(attention, "_by_length", None)
    for found, exact in zip(attended(torch.bfloat16), expected, strict=True):
        assert float((found.float() - exact).abs().max()) < 0.02 * float(exact.abs().max())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5_vl"])
def test_features_of_packed_windows_are_those_of_sdpa(name, monkeypatch):
    bundle, calls = tiny(name), []

    def counted(*arguments, **settings):
        calls.append(1)
        return varlen_attn(*arguments, **settings)

    monkeypatch.setattr(attention, "varlen_attn", counted)
    config = bundle.model.get_encoder(modality="image").config
    images = [np.full((140, 84, 3), 40 * n, dtype=np.uint8) for n in range(6)]

    def encoded(dtype, implementation):
        bundle.model.to(DEVICE, dtype)
        config._attn_implementation = implementation
        return bundle.images.encode(images).tokens.float()

    packed, looped = (encoded(torch.bfloat16, each) for each in (attention.PACKED, "sdpa"))
    # results may be equal to the bit: the kernels are of one kind
    assert calls
    # from the same rounded weights
    exact = encoded(torch.float32, "sdpa")
    errors = [float((each - exact).norm() / exact.norm()) for each in (packed, looped)]
    assert errors[0] < 1.5 * errors[1] + 1e-3


def requests_of(bundle, *, temperature=1.0, count=20):
    rng = np.random.default_rng(0)
    last = min(200, bundle.logit_count - 1)
    prompts = [rng.integers(20, last, 30 + n % 7).astype(np.int64) for n in range(count)]
    return [
        GenerationRequest(
            session=n,
            prompt=Prompt(ids=ids, unexpanded_ids=ids),
            max_tokens=20 + 3 * n,
            temperature=temperature,
            seed=n,
        )
        for n, ids in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    "name", [name for name in MODELS if not MODELS[name].recurrent and "experts" not in name]
)
def test_graphs_sample_what_the_model_samples_without_them(name):
    """Rows are dropped and graphs are used in later calls, with new weights in their place."""
    bundle = tiny(name)
    bundle.model.to(DEVICE)
    policy = PolicyModule(bundle).eval()
    critic = CriticModule(bundle.hidden_size).to(DEVICE)
    torch.nn.init.normal_(critic.head.layers[-1].weight, std=0.3)
    engines = TransformersEngine(policy, static_step=False), TransformersEngine(policy)
    for engine in engines:
        engine.read_values(critic)
    for call in range(3):
        plain, graphs = (
            generate(engine, requests_of(bundle), keep=call == 1) for engine in engines
        )
        for one, other in zip(plain, graphs, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            np.testing.assert_allclose(one.values, other.values, atol=1e-4)
            assert np.abs(one.values).max() > 1e-3
        with torch.no_grad():
            for weight in (*bundle.model.parameters(), *critic.parameters()):
                weight.mul_(1.01)
        for engine in engines:
            engine.load_weights(call)
    assert engines[1].graphs > 1
    engines[1].sleep()
    assert engines[1].graphs == 0 and engines[1].static_bytes == 0


def test_graphs_under_autocast_are_of_one_call():
    bundle = tiny("qwen2_5")
    bundle.model.to(DEVICE)
    policy = PolicyModule(bundle).eval()
    engines = [
        TransformersEngine(
            policy,
            forward_context=lambda: torch.autocast(DEVICE, torch.bfloat16),
            static_step=wanted,
        )
        for wanted in (False, None)
    ]
    for _ in range(2):
        plain, graphs = (
            generate(engine, requests_of(bundle, temperature=0.0), keep=False) for engine in engines
        )
        first = [
            (one.logprobs[0], other.logprobs[0]) for one, other in zip(plain, graphs, strict=True)
        ]
        assert engines[1].graphs == 0
        np.testing.assert_allclose(*np.array(first).T, atol=1e-2)
        # most tokens are the same where rounding differs
        pairs = [
            zip(one.ids, other.ids, strict=False) for one, other in zip(plain, graphs, strict=True)
        ]
        assert np.mean([a == b for pair in pairs for a, b in pair]) > 0.5
        with torch.no_grad():
            for weight in bundle.model.parameters():
                weight.mul_(1.01)


@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "qwen2_5_vl", "qwen3_vl", "internvl"])
def test_packed_rows_are_as_near_to_float32_as_padded_rows(name):
    bundle = tiny(name)
    lengths = torch.tensor([40, 7, 23], device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, (3, 40), generator=generator)
    ids[ids == bundle.image_token_id] = 7
    inputs = DecoderInputs(ids=ids.to(DEVICE))
    kept = torch.arange(40, device=DEVICE) < lengths[:, None]
    bundle.model.to(DEVICE, torch.bfloat16)
    device = inputs.ids.device
    assert packs(bundle, device)
    packed = packed_states(bundle, inputs, lengths).float()
    padded = run_decoder(bundle, inputs)[kept].float()
    bundle.model.float()
    assert not packs(bundle, device)
    exact = run_decoder(bundle, inputs)[kept]
    errors = [float((each - exact).norm() / exact.norm()) for each in (packed, padded)]
    assert errors[0] < 1.5 * errors[1] + 1e-3


@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "qwen2_5_vl", "qwen3_vl", "internvl"])
def test_trees_of_rows_are_as_near_to_float32_as_padded_rows(name):
    bundle = tiny(name)
    ids = torch.randint(5, 60, (5, 40), generator=torch.Generator().manual_seed(0))
    ids[ids == bundle.image_token_id] = 7
    ids[:, :20], ids[2:, :30] = ids[0, :20], ids[2, :30]
    device = torch.device(DEVICE)
    inputs = DecoderInputs(ids=ids.to(device))
    tree = SortedRows.of(ids.numpy()[..., None], np.full(5, 40)).tree(
        [0, 20, 30, 40], first=0, device=device
    )
    assert len(tree.source) == 20 + 3 * 10 + 5 * 10
    bundle.model.to(DEVICE, torch.bfloat16)
    attention.pack_rows(bundle.model.config.get_text_config())

    def update(states) -> tuple[torch.Tensor, torch.Tensor]:
        bundle.model.zero_grad()
        hidden = states()
        hidden.float().square().sum().backward()
        gradients = [
            weight.grad for weight in bundle.decoder.parameters() if weight.grad is not None
        ]
        return hidden.detach().float(), torch.cat([each.float().flatten() for each in gradients])

    shared = update(lambda: tree_states(bundle, inputs, tree)[tree.place])
    padded = update(lambda: run_decoder(bundle, inputs))
    bundle.model.float()
    exact = update(lambda: run_decoder(bundle, inputs))
    for one, other, true in zip(shared, padded, exact, strict=True):
        errors = [float((each - true).norm() / true.norm()) for each in (one, other)]
        assert errors[0] < 1.5 * errors[1] + 1e-3


class Launches(TorchDispatchMode):
    """Counts operations with a result of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3", "gemma3"])
def test_norms_in_one_kernel_are_as_exact_as_those_of_several(name):
    """In bfloat16, states and gradients against those of the same rounded weights in float32."""
    bundle = tiny(name)
    ids = torch.randint(5, 60, (3, 40), generator=torch.Generator().manual_seed(0))
    ids[ids == bundle.image_token_id] = 7
    inputs = DecoderInputs(ids=ids.to(DEVICE))
    model = bundle.model.to(DEVICE, torch.bfloat16)
    norms = [part for part in bundle.decoder.modules() if "forward" in vars(part)]
    assert norms

    def update():
        model.zero_grad()
        with Launches() as launched:
            states = run_decoder(bundle, inputs)
        states.float().pow(3).sum().backward()
        gradients = [norm.weight.grad.float() for norm in norms]
        return launched.count, [states.detach().float(), *gradients]

    fewer, fused = update()
    with own_norms(model):
        more, several = update()
        model.float()
        _, exact = update()
    assert fewer <= more - 3 * len(norms)
    errors = [
        sum(
            float((one - other).norm() / other.norm())
            for one, other in zip(each, exact, strict=True)
        )
        for each in (fused, several)
    ]
    assert errors[0] < 1.3 * errors[1]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_planned_peak_of_an_update_is_that_of_the_gpu(precision):
    overrides = ["env=frozenlake_visual", "algorithm=trico", "warm_start=none", "rollout.groups=64"]
    sizes = ["model.build.text.hidden_size=512", "model.build.text.intermediate_size=1536"]
    cfg = composed(*overrides, *sizes, f"trainer.precision={precision}")
    phases = {phase.name: phase.total for phase in plan_memory(cfg).phases}
    planned = max(phases["update"], phases["optimizer step"])
    # the first update of a process leaves workspaces of its kernels, which the second one finds
    first, second = (peak_of_an_update(cfg, precision) for _ in range(2))
    assert planned == pytest.approx(second, rel=0.15), f"{first:,} bytes in the first update"


def peak_of_an_update(cfg, precision) -> int:
    gc.collect()
    before = torch.cuda.memory_allocated()
    bundle = build_bundle(cfg)
    agent = assemble_agent(cfg, build_policy(bundle, cfg["update"]), build_critic(cfg, bundle)).to(
        DEVICE
    )
    agent.trainer = pl.Trainer(precision=precision, max_epochs=1, barebones=True)
    agent.cast_reference()
    batch = move_data_to_device(minibatch_of(agent, workload_of(cfg, bundle)), torch.device(DEVICE))
    optimizer = agent.configure_optimizers()["optimizer"]
    agent.train()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with agent.trainer.precision_plugin.forward_context():
            loss = agent.loss(agent.scorer.score_minibatch(batch), batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kernels", "expected"),
    [((), (True, None)), (("+optimizer.foreach=true",), (None, True))],
    ids=["fused by default", "foreach"],
)
def test_planned_memory_of_an_optimizer_step_is_that_of_the_gpu(kernels, expected, dtype, tmp_path):
    build_small_lm(text={"hidden_size": 1024, "intermediate_size": 4096}).save(tmp_path)
    cfg = composed(
        "env=frozenlake", "algorithm=grpo", "algorithm.loss.kl=null", "warm_start=none", "rollout.groups=2",
        "model=pretrained", f"model.build.path={tmp_path}", f"model.build.dtype={dtype}", *kernels,
    )  # fmt: skip
    (parts,) = (phase.parts for phase in plan_memory(cfg).phases if phase.name == "optimizer step")
    bundle = build_bundle(cfg)
    agent = assemble_agent(cfg, build_policy(bundle, cfg["update"]), None).to(DEVICE)
    agent.trainer = pl.Trainer(max_epochs=1, barebones=True)
    before = torch.cuda.memory_allocated()
    optimizer = agent.configure_optimizers()["optimizer"]
    assert {(group["fused"], group["foreach"]) for group in optimizer.param_groups} == {expected}
    # the second step makes no state
    for _ in range(2):
        for weight in agent.parameters():
            weight.grad = torch.ones_like(weight, dtype=weight.grad_dtype)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        step = torch.cuda.max_memory_allocated() - held
        optimizer.zero_grad()
    state = parts["optimizer state"]
    assert torch.cuda.memory_allocated() - before == pytest.approx(state, rel=0.02)
    assert step == pytest.approx(parts["step"], abs=0.02 * state)


def fit(folder: Path, *overrides: str) -> dict[str, float]:
    """Run `ragen_pl.fit` and return its last metrics."""
    done = subprocess.run(
        [sys.executable, "-m", "ragen_pl.fit", *overrides, "logger=none", "paths.run_dir=run"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    metrics: dict[str, float] = json.loads((folder / "run" / "metrics.json").read_text())
    return metrics


@pytest.mark.parametrize(
    "overrides", [[], ["trainer.precision=bf16-mixed"]], ids=["float32", "mixed"]
)
def test_the_main_job_learns(tmp_path, overrides):
    metrics = fit(tmp_path, "env=frozenlake_visual", "trainer.max_epochs=60", *overrides)
    assert metrics["val/success"] > 0.9
    assert metrics["rollout/logprob_mismatch_max"] < (0.5 if overrides else 1e-3)
