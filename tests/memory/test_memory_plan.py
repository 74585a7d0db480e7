"""A run's memory is planned without loading its model, close to what the run then allocates."""

from __future__ import annotations

import io
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from support.models.family_models import tiny
from support.runs.memory_plans import FEW, HALF, LOADED, ONE_PASS, TEXT, on_cpu
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ragen_pl.assembly.build import assemble_agent, build_bundle, build_critic, build_policy
from ragen_pl.data.microbatches import split_by_tokens
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, Prompt
from ragen_pl.memory import dry_run
from ragen_pl.memory import plan as memory_plan
from ragen_pl.memory.dry_run import (
    abstract_agent,
    abstract_bundle,
    images_of,
    minibatch_of,
    samples_of,
    size_of,
)
from ragen_pl.memory.plan import Counts, plan_memory
from ragen_pl.memory.workload import workload_of
from ragen_pl.models.build import build_small_lm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule

SMALL = (*(f"model.build.text.{name}={value}" for name, value in TEXT.items()), *FEW)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    """A folder with a small mixture of experts."""
    path = tmp_path_factory.mktemp("experts")
    tokenizer = build_small_lm().tokenizer
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=256, moe_intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=6, num_experts_per_tok=2,
    )  # fmt: skip
    ModelBundle(Qwen3MoeForCausalLM(config), tokenizer).save(path)
    return path


def allocated(action) -> int:
    """Return the most bytes that the CPU's allocator had given to an action at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    sizes: list[tuple[int, int]] = []

    def collect(events) -> None:
        for event in events:
            if event.tag == _EventType.Allocation:
                sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
            collect(event.children)

    collect(profiled.profiler.kineto_results.experimental_event_tree())
    total = highest = 0
    for _, size in sorted(sizes):
        total += size
        highest = max(highest, total)
    return highest


def stepped(cfg):
    """Return an agent and its optimizer after a step, and a function that does the step."""
    bundle = build_bundle(cfg)
    agent = assemble_agent(cfg, build_policy(bundle, cfg["update"]), build_critic(cfg, bundle))
    agent.trainer = pl.Trainer(
        accelerator="cpu", precision=cfg.trainer.precision, max_epochs=1, barebones=True
    )
    agent.cast_reference()
    workload = workload_of(cfg, bundle)
    batch = minibatch_of(agent, workload)
    optimizer = agent.configure_optimizers()["optimizer"]
    agent.train()

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(1 + workload.accumulates):
            with agent.trainer.precision_plugin.forward_context():
                loss = agent.loss(agent.scorer.score_minibatch(batch), batch).loss
            loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    return agent, optimizer, step


def measured_update(cfg) -> int:
    """Return the bytes of an agent's weights, of its optimizer's state and of its second step."""
    agent, optimizer, step = stepped(cfg)
    state = [value for one in optimizer.state.values() for value in one.values()]
    held = size_of([*agent.parameters(), *agent.buffers(), *filter(torch.is_tensor, state)])
    return held + allocated(step)


# bfloat16 is slow on processors without instructions for it
SLOW = ("rollout.groups=2", "rollout.group_size=2")
TOP = (
    "algorithm.loss.kl.hint=null", "algorithm.loss.kl.top_k=20", "algorithm.loss.kl.top_k_of=reference",
    "+algorithm.loss.kl.reference={_target_: ragen_pl.assembly.teacher_server.TeacherServer, urls: [x]}",
)  # fmt: skip
CASES = {
    "critic and divergence": ("env=frozenlake", "algorithm=trico", *SMALL, "rollout.groups=32"),
    "images": ("env=frozenlake_visual", "algorithm=grpo", *SMALL, "rollout.groups=4"),
    "adapters": ("env=frozenlake", "algorithm=grpo", "+model.build.lora.r=8", HALF, *LOADED, *SLOW),
    "own critic": ("env=frozenlake", "algorithm=starpo", "algorithm.critic=own", *SMALL, "rollout.groups=32"),
    "accumulated": (
        "env=frozenlake", "algorithm=grpo", "trainer.accumulate_grad_batches=2", *SMALL, "rollout.groups=4",
    ),
    "microbatches": (
        "env=frozenlake", "algorithm=grpo", "update.tokens_per_microbatch=400",
        "update.gradient_checkpointing=true", *SMALL,
    ),
    "whole history": ("env=frozenlake", "algorithm=grpo", "context.window=all", *SMALL, "rollout.groups=4"),
    "eager": ("env=frozenlake", "algorithm=grpo", "model.build.attn_implementation=eager", *LOADED, "rollout.groups=4"),
    "mixed precision": ("env=frozenlake", "algorithm=grpo", "trainer.precision=bf16-mixed", *LOADED, *SLOW),
    "bfloat16 weights": ("env=frozenlake", "algorithm=grpo", HALF, *LOADED, *SLOW),
    "served teacher": ("env=frozenlake", "algorithm=opsd", *TOP, *SMALL, "rollout.groups=32"),
    "experts": ("env=frozenlake", "algorithm=grpo", *LOADED, "rollout.groups=2"),
}  # fmt: skip
FAST = ("critic and divergence", "served teacher", "images", "adapters", "experts")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES]
)
def test_planned_peak_of_an_update_is_the_measured_one(case, folder, experts):
    overrides = CASES[case]
    if "model=pretrained" in overrides:
        overrides = (*overrides, f"model.build.path={experts if case == 'experts' else folder}")
    cfg = on_cpu(*overrides)
    phases = {phase.name: phase.total for phase in plan_memory(cfg).phases}
    planned = max(phases["update"], phases["optimizer step"])
    assert planned == pytest.approx(measured_update(cfg), rel=0.05)


@pytest.mark.parametrize("kernels", ["fused", "foreach"])
def test_planned_memory_of_a_step_is_the_measured_one(kernels, folder):
    cfg = on_cpu(
        "env=frozenlake", "algorithm=grpo", HALF, *LOADED, *ONE_PASS, f"model.build.path={folder}",
        "update.minibatches=8", f"+optimizer.{kernels}=true",
    )  # fmt: skip
    (parts,) = (phase.parts for phase in plan_memory(cfg).phases if phase.name == "optimizer step")
    agent, optimizer, _ = stepped(cfg)
    weights = [weight for weight in agent.parameters() if weight.requires_grad]
    for weight in weights:
        weight.grad = torch.ones_like(weight, dtype=weight.grad_dtype)
    trained = sum(weight.numel() for weight in weights)
    assert parts["step"] == (4 * trained if kernels == "foreach" else 0)
    # numbers of steps and the like
    assert allocated(optimizer.step) == pytest.approx(parts["step"], abs=0.05 * 4 * trained)


def test_planned_peak_of_a_preparation_with_images_is_the_measured_one(tmp_path):
    tiny("qwen2_5_vl").save(tmp_path)
    cfg = on_cpu(
        "env=frozenlake_visual", "env.kwargs.image_scale=2", "env.max_turns=4", "algorithm=grpo",
        "model=pretrained", f"model.build.path={tmp_path}", "warm_start=none", "context.window=all",
        "context.max_tokens=8192", "rollout.groups=2", "rollout.group_size=4",
    )  # fmt: skip
    plan = plan_memory(cfg)
    work = plan.workload
    assert (work.samples, len(work.images), work.all_images) == (8, 4, 32)
    (parts,) = (phase.parts for phase in plan.phases if phase.name == "preparation")
    bundle = build_bundle(cfg)
    samples = samples_of(bundle, work, rows=work.samples)
    images = images_of(work, rows=work.samples)
    policy, rows = PolicyModule(bundle).eval(), split_by_tokens(samples.length, 16_384)
    with torch.no_grad():
        measured = allocated(lambda: policy(samples, images, microbatches=rows))
    # the encoder needs more than the decoder, which would need less than half of it
    planned = parts["activations"] + parts["head"] + parts["images"]
    assert planned == pytest.approx(measured, rel=0.15)


def test_features_of_a_frozen_encoder_are_planned(tmp_path):
    tiny("qwen2_5_vl").save(tmp_path)
    cfg = on_cpu(
        "env=frozenlake_visual", "algorithm=grpo", "model=pretrained", f"model.build.path={tmp_path}",
        "warm_start=none", *ONE_PASS, "env.max_turns=4", "model.build.freeze_vision=true", "context.max_tokens=8192",
        "model.build.freeze_projector=true", "trainer.max_epochs=3",
    )  # fmt: skip
    plan = plan_memory(cfg)
    bundle = build_bundle(cfg)
    (image,) = plan.workload.images
    bundle.images.encode([image])
    (features,) = bundle.images.held.by_key.values()
    expected = 3 * plan.workload.all_images * features.tokens.nbytes
    assert {phase.parts["held images"] for phase in plan.phases} == {expected}


def test_a_warm_start_trains_the_encoder_that_is_frozen_after_it():
    counts = Counts()
    plans = {
        frozen: plan_memory(
            on_cpu("env=frozenlake_visual", *ONE_PASS, f"update.freeze_vision={frozen}"), counts
        )
        for frozen in (False, True)
    }
    first, last = ({phase.name: phase.parts for phase in plan.phases} for plan in plans.values())
    assert first["warm start"]["activations"] == last["warm start"]["activations"]
    assert first["update"]["held images"] == 0 < last["update"]["held images"]


@pytest.mark.slow
def test_planned_size_of_a_checkpoint_is_the_measured_one():
    cfg = on_cpu("env=frozenlake", "algorithm=trico", *SMALL, *ONE_PASS)
    agent, optimizer, _ = stepped(cfg)
    trained = {
        name: value.detach() for name, value in agent.named_parameters() if value.requires_grad
    }
    file = io.BytesIO()
    torch.save({"state_dict": trained, "optimizer": optimizer.state_dict()}, file)
    # the rest is names and alignment
    assert 0 < file.tell() - plan_memory(cfg).checkpoint < 0.1 * file.tell() + 100_000


def test_samples_that_are_not_run_add_as_much_as_those_that_are(monkeypatch):
    cfg = on_cpu("env=frozenlake", "algorithm=trico", *SMALL, "rollout.groups=40")
    agent = abstract_agent(cfg)
    workload = workload_of(cfg, agent.policy.bundle)
    assert workload.rows > 2 * dry_run.MAX_ROWS
    reckoned = dry_run.count_update(agent, workload)
    monkeypatch.setattr(dry_run, "MAX_ROWS", workload.rows)
    run = dry_run.count_update(abstract_agent(cfg), workload)
    rows = workload.rows
    assert reckoned.peak(rows).total() == pytest.approx(run.peak(rows).total(), rel=0.05)
    assert (reckoned.gradients, reckoned.state) == (run.gradients, run.state)


def test_a_folder_of_a_model_with_images_is_planned(tmp_path):
    tiny("qwen2_5_vl").save(tmp_path)
    cfg = on_cpu(
        "env=frozenlake_visual",
        "model=pretrained",
        f"model.build.path={tmp_path}",
        *ONE_PASS,
        "context.max_tokens=8192",
    )
    bundle, loaded = abstract_bundle(cfg), build_bundle(cfg)
    workload = workload_of(cfg, bundle)
    assert workload.prompt == workload_of(cfg, loaded).prompt
    (image,) = workload.images
    assert bundle.num_image_tokens(image) < workload.prompt
    weights = sum(weight.nbytes for weight in loaded.model.parameters())
    assert plan_memory(cfg).highest.total > 4 * weights


def test_images_that_the_context_has_no_room_for_are_not_planned():
    cfg = on_cpu(
        "env=frozenlake_visual",
        "algorithm=grpo",
        *SMALL,
        *ONE_PASS,
        "context.window=all",
        "context.max_tokens=136",
    )
    bundle = build_bundle(cfg)
    workload = workload_of(cfg, bundle)
    assert workload.length <= 136
    assert 1 < len(workload.images) < cfg.env.max_turns
    assert sum(bundle.num_image_tokens(image) for image in workload.images) < workload.prompt
    assert plan_memory(cfg).workload.length == workload.length


# of templates that drop old reasoning, and that are rendered as a whole
DROPS = "{% for m in messages %}<|user|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}<|user|>"
COUNTS = "{% for m in messages %}<|user|>{{ loop.index }}{{ m.content }}<|end|>{% endfor %}<|user|>"


@pytest.mark.parametrize("template", [None, DROPS, COUNTS], ids=["keeps", "drops", "counts"])
def test_samples_of_whole_episodes_are_those_that_the_chat_template_leaves(template, tmp_path):
    bundle = build_small_lm(text=TEXT)
    if template is not None:
        bundle.tokenizer.chat_template = template
    bundle.save(tmp_path)
    cfg = on_cpu(
        "env=frozenlake",
        *LOADED,
        f"model.build.path={tmp_path}",
        "context.window=all",
        "context.max_tokens=4000",
        f"context.system_prompt={'rule ' * 100}",
    )
    workload = workload_of(cfg, abstract_bundle(cfg))
    episodes, turns = 16, cfg.env.max_turns
    assert workload.samples == (episodes if template is None else episodes * turns)
    assert workload.sampled == workload.response * (turns if template is None else 1)
    # the system prompt comes once
    system = len(bundle.tokenizer("rule " * 100)["input_ids"])
    assert system < workload.prompt < system + turns * 120


def test_summaries_divide_an_episode_into_samples():
    long = ("env=frozenlake", *SMALL, "context.window=all", "context.max_tokens=300")
    alone, divided = (
        workload_of(cfg, build_bundle(cfg))
        for cfg in (on_cpu(*long), on_cpu(*long, "context.compaction={max_summary_tokens: 8}"))
    )
    assert alone.length == divided.length and divided.samples == 2 * alone.samples


def test_planned_keys_and_values_are_those_of_the_engine(folder):
    cfg = on_cpu("env=frozenlake", *LOADED, f"model.build.path={folder}")
    agent = abstract_agent(cfg)
    workload = workload_of(cfg, agent.policy.bundle)
    engine = TransformersEngine(PolicyModule(build_bundle(cfg)))
    prompt = Prompt(ids=np.full(workload.prompt, 9), unexpanded_ids=np.full(workload.prompt, 9))
    requests = [
        GenerationRequest(
            session=session,
            prompt=prompt,
            seed=session,
            max_tokens=workload.response,
            temperature=1.0,
        )
        for session in range(workload.episodes)
    ]
    engine.submit(requests, keep=True)
    engine.collect()
    # the plan has room for a copy of three quarters of them, while finished responses are dropped
    planned = plan_memory(cfg).phases[0].parts["keys and values"] / 1.75
    assert planned == pytest.approx(engine.held_bytes, rel=0.15)


def test_plan_reads_no_weights_and_draws_no_random_numbers(folder, tmp_path):
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    state = torch.get_rng_state()
    plan = plan_memory(on_cpu("env=frozenlake", *LOADED, f"model.build.path={tmp_path}"))
    assert torch.equal(torch.get_rng_state(), state)
    weights = build_bundle(on_cpu("env=frozenlake", *LOADED, f"model.build.path={folder}")).model
    assert plan.parameters == plan.trained == weights.num_parameters()


@pytest.mark.slow
def test_plans_that_share_counts_are_those_of_plans_alone(folder, monkeypatch):
    counted, count = [], memory_plan.count_update

    def recorded(*arguments, **settings):
        counted.append(1)
        return count(*arguments, **settings)

    monkeypatch.setattr(memory_plan, "count_update", recorded)
    loaded = ("env=frozenlake", "algorithm=grpo", *LOADED, f"model.build.path={folder}")
    alike = ("rollout.num_envs=8", "update.tokens_per_forward=512", "memory.device_gb=1")
    others = ("update.gradient_checkpointing=true", HALF)
    # two have room for more samples than are run
    large, half, few = ((f"update.tokens_per_microbatch={tokens}",) for tokens in (4800, 2400, 200))
    counts = Counts()
    plan_memory(on_cpu(*loaded), counts)
    for changes, expected in ((alike, 1), (others, 2), (large, 3), (half, 3), (few, 4)):
        cfg = on_cpu(*loaded, *changes)
        shared = plan_memory(cfg, counts)
        assert len(counted) == expected
        assert shared.phases == plan_memory(cfg).phases
        del counted[expected:]
