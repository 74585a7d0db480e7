"""Plans for GPUs and for sharded training, and the report of a run that does not fit."""

from __future__ import annotations

import io

import pytest
import torch
from omegaconf import DictConfig
from rich.console import Console
from support.runs.composing import composed
from support.runs.memory_plans import HALF, LOADED, ONE_PASS, TEXT, on_cpu

from ragen_pl.base.machine import GPUMemory, gpu_memory
from ragen_pl.config import ConfigError
from ragen_pl.memory import dry_run
from ragen_pl.memory import plan as memory_plan
from ragen_pl.memory.dry_run import is_for_gpu
from ragen_pl.memory.live_memory import LiveMemory
from ragen_pl.memory.plan import Counts, Sharding, device_of, plan_memory
from ragen_pl.memory.remedies import remedies
from ragen_pl.memory.report import check_memory, show_plan
from ragen_pl.memory.tensors import TensorWithoutData
from ragen_pl.models.build import build_small_lm


def gpu_plan(monkeypatch, folder, *overrides: str, free: int = 80):
    """Plan a run on a machine of eight GPUs of 80 GB, of which GPU 2 has less free."""
    asked = []

    def answer(indices):
        asked.extend(indices)
        return [
            GPUMemory(index, "GPU", (free if index == 2 else 80) * 10**9, 80 * 10**9)
            for index in indices or range(8)
        ]

    monkeypatch.setattr(dry_run, "choose_accelerator", lambda name: "cuda")
    monkeypatch.setattr(memory_plan, "gpu_memory", answer)
    cfg = on_cpu("env=frozenlake", *LOADED, *ONE_PASS, f"model.build.path={folder}", *overrides)
    return cfg, device_of(cfg), asked


def test_only_the_gpus_of_the_run_are_asked_for_their_memory(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for devices, expected in (("1", [0]), ("3", [0, 1, 2]), ("[1]", [1]), ("[2,5]", [2, 5])):
        _, device, asked = gpu_plan(monkeypatch, folder, f"trainer.devices={devices}", free=30)
        assert asked == expected
        assert device.size == 80 * 10**9
        assert device.in_use == (50 * 10**9 if 2 in expected else 0)


def test_memory_that_other_processes_use_is_reported_and_refuses_no_run(
    folder, monkeypatch, caplog
):
    cfg, _, _ = gpu_plan(monkeypatch, folder, "trainer.devices=[2]", free=0)
    caplog.set_level("WARNING")
    assert check_memory(cfg).fits
    expected = "other processes use 80.0 GB of GPU 2 now, which leaves less than the run needs"
    assert expected in caplog.text
    fits, text = shown(cfg)
    assert fits and expected[1:] in text


def test_a_gpu_that_is_not_there_has_no_memory():
    assert gpu_memory([torch.cuda.device_count()]) is None


def shown(cfg) -> tuple[bool, str]:
    text = io.StringIO()
    fits = show_plan(cfg, console=Console(file=text, width=120))
    return fits, text.getvalue()


def test_report_of_a_run_that_does_not_fit_names_what_makes_it_fit(folder):
    overrides = ("env=frozenlake", "algorithm=grpo", *LOADED, f"model.build.path={folder}")
    fits, text = shown(on_cpu(*overrides))
    assert fits and "What makes it smaller" not in text
    assert "optimizer state" in text and "16 samples" not in text

    # the update is the highest phase
    small = (*overrides, "memory.device_gb=0.04", "update.tokens_per_forward=1024")
    fits, text = shown(on_cpu(*small))
    assert not fits and "and a device of 0.04 GB has" in text
    line = next(line for line in text.splitlines() if line.startswith("It fits with: "))
    added = line.removeprefix("It fits with: ")
    assert added.startswith("model.build.dtype=bfloat16 update.")
    assert "'model.build.lora={r: 16, lora_alpha: 32}'" in added
    made = [
        word.strip("'")
        for word in added.replace(" 'model", "\nmodel").replace("' ", "\n").split("\n")
    ]
    words = [part for word in made for part in (word.split(" ") if "{" not in word else [word])]
    assert shown(on_cpu(*small, *words))[0]


def test_run_that_cannot_fit_is_refused_unless_told_otherwise(folder, monkeypatch):
    overrides = ("env=frozenlake", *LOADED, *ONE_PASS, f"model.build.path={folder}")
    check_memory(on_cpu(*overrides))
    with pytest.raises(
        ConfigError, match=r"^memory: the update needs .* has 0\.0 GB; .*ragen_pl\.doctor"
    ):
        check_memory(on_cpu(*overrides, "memory.device_gb=0.001"))
    check_memory(on_cpu(*overrides, "memory.device_gb=0.001", "memory.check=false"))
    # a model that is built here is small
    check_memory(on_cpu("env=frozenlake", "memory.device_gb=0.001"))


def test_model_of_unknown_sizes_is_started_and_not_planned(caplog):
    cfg = on_cpu("env=frozenlake", "model=pretrained", "model.build.path=somebody/model")
    caplog.set_level("INFO")
    check_memory(cfg)
    assert "memory: not planned" in caplog.text and "known to the hub only" in caplog.text
    with pytest.raises(ConfigError, match="known to the hub only"):
        show_plan(cfg)


HYBRID = {"_target_": "ragen_pl.run.strategy.FSDP2Strategy"}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("auto", Sharding(buckets=True)),
        ("ddp", Sharding(buckets=True)),
        ("fsdp2", Sharding(optimizer=8, gradients=8, weights=8)),
        (DictConfig({**HYBRID, "shard_size": 4}), Sharding(optimizer=4, gradients=4, weights=4)),
        (DictConfig({**HYBRID, "shard_size": None}), Sharding(optimizer=8, gradients=8, weights=8)),
    ],
)
def test_strategies_share_the_state_of_training(strategy, expected):
    assert Sharding.of(strategy, ranks=8) == expected
    assert Sharding.of(strategy, ranks=1) == Sharding()


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ((), 0.0),
        (("+optimizer.foreach=true",), 1.0),
        # without fused kernels: on a GPU its own choice are lists too
        (("optimizer._target_=torch.optim.NAdam",), 1.0),
    ],
)
@pytest.mark.parametrize("dtype", [(), (HALF,)], ids=["float32", "bfloat16"])
def test_a_plan_counts_the_step_of_the_kernels_that_a_gpu_runs(
    folder, monkeypatch, overrides, share, dtype
):
    """Lists of all weights need a float32 number for each of them, fused kernels none."""
    cfg, _, _ = gpu_plan(
        monkeypatch, folder, "algorithm=grpo", "~optimizer.weight_decay", *overrides, *dtype
    )
    plan = plan_memory(cfg)
    assert plan.phases[-1].parts["step"] == pytest.approx(share * plan.trained * 4, rel=0.01)


def test_a_plan_counts_what_norms_keep_on_a_gpu(folder, monkeypatch):
    """The input, which is a state that other operations keep too, and a number for each row."""
    cfg = on_cpu(
        "env=frozenlake", "algorithm=grpo", *LOADED, *ONE_PASS, f"model.build.path={folder}", HALF
    )
    peaks = {}
    for name in ("cpu", "cuda"):
        monkeypatch.setattr(dry_run, "choose_accelerator", lambda _, name=name: name)
        (parts,) = (phase.parts for phase in plan_memory(cfg).phases if phase.name == "update")
        peaks[name] = sum(parts.get(kind, 0) for kind in ("activations", "head", "gradients"))
    assert peaks["cuda"] < 0.9 * peaks["cpu"]


def test_the_memory_of_another_device_is_planned_as_that_of_a_gpu(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    overrides = ("env=frozenlake", *LOADED, f"model.build.path={folder}")
    found = {
        name: is_for_gpu(composed(*overrides, f"trainer.accelerator={name}", *more))
        for name, more in (("auto", ["memory.device_gb=80"]), ("cpu", ["memory.device_gb=80"]))
    }
    assert found == {"auto": True, "cpu": False}
    assert not is_for_gpu(composed(*overrides))


def test_sharding_divides_what_a_device_holds(folder):
    overrides = ("env=frozenlake", "algorithm=grpo", *LOADED, f"model.build.path={folder}")
    counts = Counts()
    alone = plan_memory(on_cpu(*overrides), counts).phases[-1].parts
    ranks = ("trainer.devices=4", "trainer.strategy=fsdp2")
    shared = plan_memory(on_cpu(*overrides, *ranks), counts).phases
    for part in ("weights", "optimizer state", "gradients"):
        assert shared[-1].parts[part] == pytest.approx(alone[part] / 4, rel=0.01)
    whole = alone["weights"]
    assert shared[0].parts["gathered weights"] == whole
    # two of three layers, and what is outside of them
    assert 0.6 * whole < shared[1].parts["gathered weights"] < 0.9 * whole
    assert shared[2].parts["gathered weights"] == shared[1].parts["gathered weights"]


def test_a_sharded_reference_keeps_its_head_whole_for_a_full_divergence(folder):
    overrides = ("env=frozenlake", *LOADED, f"model.build.path={folder}", "algorithm=trico")
    ranks = ("trainer.devices=4", "trainer.strategy=fsdp2")
    counts = Counts()
    reference = {
        estimator: plan_memory(
            on_cpu(*overrides, *ranks, f"algorithm.loss.kl.estimator={estimator}"), counts
        ).phases[0].parts["reference"]
        for estimator in ("full", "k3")
    }  # fmt: skip
    alone = plan_memory(on_cpu(*overrides), counts).phases[0].parts["reference"]
    assert reference["k3"] == pytest.approx(alone / 4, rel=0.01)
    head = build_small_lm(text=TEXT).model.get_output_embeddings().weight
    assert reference["full"] - reference["k3"] == pytest.approx(head.nbytes * 3 / 4, rel=0.01)


def test_an_opponent_is_planned_with_the_pool_in_checkpoints(folder):
    overrides = ("env=kuhn_poker", *LOADED, f"model.build.path={folder}")
    counts = Counts()
    alone = plan_memory(on_cpu(*overrides), counts)
    plan = plan_memory(on_cpu(*overrides, "opponents=pool", "opponents.size=5"), counts)
    rollout, without = plan.phases[0].parts, alone.phases[0].parts
    # all weights are trained, tables of positions aside
    assert rollout["opponent"] == pytest.approx(without["weights"], rel=1e-3)
    assert without["opponent"] == 0
    assert rollout["keys and values"] == int(1.5 * without["keys and values"])
    assert plan.checkpoint == alone.checkpoint + 5 * rollout["opponent"]


def test_a_teacher_of_another_size_is_planned_without_its_weights(folder, tmp_path):
    teacher = build_small_lm(text=TEXT | {"hidden_size": 48, "num_hidden_layers": 4})
    teacher.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    overrides = ("env=frozenlake", *LOADED, f"model.build.path={folder}", "algorithm=opd")
    cfg = on_cpu(*overrides, f"algorithm.loss.kl.reference.path={tmp_path}")
    phases = plan_memory(cfg, Counts()).phases
    size = sum(weight.nbytes for weight in teacher.model.parameters())
    # and tables of positions
    assert phases[0].parts["reference"] == pytest.approx(size, rel=1e-3)
    assert phases[0].parts["weights"] != pytest.approx(size, rel=0.1)


def test_the_copy_of_vllm_is_planned(folder, monkeypatch):
    monkeypatch.setattr("ragen_pl.engines.vllm.rules.find_spec", lambda name: object())
    overrides = (
        "env=frozenlake",
        "algorithm=grpo",
        *LOADED,
        *ONE_PASS,
        f"model.build.path={folder}",
    )
    overrides += ("rollout.max_response_tokens=24",)
    counts = Counts()
    vllm = ("rollout/engine=vllm", "rollout.engine.cache_bytes=1000000")
    plain, copied = (plan_memory(on_cpu(*overrides, *more), counts).phases for more in ((), vllm))
    weights = plain[-1].parts["weights"]
    for phase in copied:
        assert phase.parts["vLLM"] == pytest.approx(weights + 1_000_000, rel=1e-3)
    assert "keys and values" in plain[0].parts and "keys and values" not in copied[0].parts
    cfg = on_cpu(*overrides, *vllm, "rollout.engine.dtype=bfloat16")
    half = plan_memory(cfg, counts).phases
    assert half[0].parts["vLLM"] == pytest.approx(weights // 2 + 1_000_000, rel=1e-3)
    # on a GPU it is a share of the device, which sleeps in other phases
    monkeypatch.setattr(dry_run, "choose_accelerator", lambda name: "cuda")
    cfg = on_cpu(*overrides, "rollout/engine=vllm", "memory.device_gb=10")
    phases = plan_memory(cfg, counts).phases
    assert phases[0].parts["vLLM"] == int(0.4 * 10e9)
    assert all("vLLM" not in phase.parts for phase in phases[1:])
    large = on_cpu(
        *overrides,
        "rollout/engine=vllm",
        "rollout.engine.memory_fraction=0.99",
        "memory.device_gb=1",
    )
    (step,) = remedies(large, plan_memory(large, counts), counts)
    assert step.plan.fits and step.overrides[0].startswith("rollout.engine.memory_fraction=0.")


def test_live_memory_counts_storages_once_and_until_they_are_freed():
    live = LiveMemory(vocabulary=10)
    weight = torch.zeros(10, 4, requires_grad=True)
    with live:
        weight.detach()
        assert not live.now.total()
        states = torch.zeros(6, 4)
        view = states.view(3, 8)[1:]
        logits = states @ weight.T
        assert live.now == {"activations": 6 * 4 * 4, "head": 6 * 10 * 4}
        del states, view
        logits.sum().backward()
        peak = live.peak.total()
        del logits
    # the states are saved for the gradient, and one number is the sum
    assert peak >= 6 * 14 * 4 + 10 * 4 * 4
    weight.grad = None
    assert live.now.total() == 0


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(
    "model",
    # deepstack features and M-RoPE, linear attention, tiles and convolutions, features by layer
    ["qwen3_vl size=2B", "qwen3_5 size=0.8B", "lfm2_vl size=450M", "gemma4 size=E2B"],
)
def test_families_with_images_are_planned(model):
    name, size = model.split(" size=")
    cfg = on_cpu(
        "env=frozenlake_visual", "algorithm=grpo", f"model={name}", f"model.size={size}", HALF,
        "rollout.groups=1", "rollout.group_size=2", "env.max_turns=2", "warm_start=none",
    )  # fmt: skip
    plan = plan_memory(cfg)
    assert len(plan.workload.images) == 1
    assert plan.highest.total > 2 * plan.parameters


def test_a_model_that_does_not_run_without_data_is_named_without_a_traceback(capfd):
    empty = TensorWithoutData(torch.empty(2, 3, device="meta"))
    with pytest.raises(RuntimeError):
        empty @ empty
    assert capfd.readouterr() == ("", "")
