"""Differences on a GPU: kernels, the allocator, and runs that choose it. `make test-gpu` runs these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from composing import composed
from family_models import MODELS, tiny
from lightning.pytorch.utilities import move_data_to_device

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, Prompt, generate
from ragen_pl.memory.dry_run import minibatch_of
from ragen_pl.memory.plan import plan_memory
from ragen_pl.memory.workload import workload_of
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_agreement
from ragen_pl.run.build import assemble_agent, build_bundle, build_critic, build_policy

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
    engines = TransformersEngine(policy, static_step=False), TransformersEngine(policy)
    for call in range(3):
        plain, graphs = (
            generate(engine, requests_of(bundle), keep=call == 1) for engine in engines
        )
        for one, other in zip(plain, graphs, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        with torch.no_grad():
            for weight in bundle.model.parameters():
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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_planned_peak_of_an_update_is_that_of_the_gpu(precision):
    overrides = ["env=frozenlake_visual", "algorithm=trico", "warm_start=none", "rollout.groups=64"]
    sizes = ["model.build.text.hidden_size=512", "model.build.text.intermediate_size=1536"]
    cfg = composed(*overrides, *sizes, f"trainer.precision={precision}")
    phases = {phase.name: phase.total for phase in plan_memory(cfg).phases}
    bundle = build_bundle(cfg)
    agent = assemble_agent(cfg, build_policy(bundle, cfg["update"]), build_critic(cfg, bundle)).to(
        DEVICE
    )
    agent.trainer = pl.Trainer(precision=precision, max_epochs=1, barebones=True)
    agent.store_reference()
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
    planned = max(phases["update"], phases["optimizer step"])
    assert planned == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.15)


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
