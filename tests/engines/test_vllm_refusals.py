"""Refusals of the engine on vLLM, without it; `tests/vllm` has the tests with it."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
from support.runs.composing import composed

from ragen_pl.config import ConfigError
from ragen_pl.engines.protocol import check_asynchronous
from ragen_pl.engines.vllm import rules
from ragen_pl.engines.vllm.engine import VLLMEngine
from ragen_pl.modules.policy import PolicyModule

MISSING = (
    r"rollout/engine=vllm: vllm is not installed; pip install 'ragen_pl\[vllm\]' .*"
    r"rollout/engine=transformers"
)


SPLIT = ["env=frozenlake", "rollout.engine.settings={tensor_parallel_size: 2}"]


def check(*overrides: str) -> None:
    composed("rollout/engine=vllm", *overrides)


@pytest.fixture
def installed(monkeypatch):
    """Let vLLM seem to be installed."""
    found = importlib.util.find_spec

    def find_spec(name, package=None):
        return SimpleNamespace() if name == "vllm" else found(name, package)

    monkeypatch.setattr(rules, "find_spec", find_spec)


def test_a_missing_vllm_is_named_before_a_model_is_built(lm, monkeypatch):
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=MISSING):
        check("env=frozenlake")
    with pytest.raises(ModuleNotFoundError, match=MISSING):
        VLLMEngine(PolicyModule(lm), max_tokens=64)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=frozenlake_visual"], r"model=small_vlm: vLLM does not know .*rollout/engine="),
        (
            ["env=frozenlake_visual", "model=pretrained", "context.leave_out.patches=0.5"],
            r"context\.leave_out: vLLM shows whole prompts; set context\.leave_out\.patches=0",
        ),
        (["env=frozenlake", "rollout.engine.memory_fraction=2"], r"memory_fraction=2: expected"),
        (["env=frozenlake", "rollout.engine.dtype=int8"], r"dtype=int8: expected"),
        (
            SPLIT,
            r"tensor_parallel_size=2: so many ranks share an engine, .* number, 1; set it to 1, other",
        ),
        (
            [*SPLIT, "trainer.devices=3"],
            r"tensor_parallel_size=2: .* expected a divisor of their number, 3; .*engine=vllm_server",
        ),
        ([*SPLIT, "trainer.devices=[0]", "trainer.num_nodes=3"], r"of their number, 3; set"),
        (
            ["env=frozenlake", "rollout.engine.settings={tensor_parallel_size: two}"],
            r"tensor_parallel_size=two: expected a whole number, at least 1",
        ),
        (
            ["env=frozenlake", "rollout.engine.settings={pipeline_parallel_size: 2}"],
            r"pipeline_parallel_size=2: ranks share an engine by tensor_parallel_size.*vllm_server",
        ),
        (
            ["env=frozenlake", "rollout/engine=vllm_server", "trainer.num_nodes=2"],
            r"urls=\[\]: .* its own machine reaches only, and trainer\.num_nodes=2; start servers",
        ),
        (
            ["env=frozenlake", "rollout.temperature=2.5"],
            r"rollout\.temperature=2\.5: vLLM samples at temperatures from 0\.01 to 2; set one",
        ),
        (
            ["env=frozenlake", "rollout/engine=vllm_server", "rollout.temperature=0.005"],
            r"rollout\.temperature=0\.005: vLLM samples at temperatures from 0\.01",
        ),
        (
            [
                "env=frozenlake",
                "rollout.adaptive_temperature={_target_: "
                "ragen_pl.rollout.temperature.AdaptiveTemperature, high: 3}",
            ],
            r"rollout\.adaptive_temperature\.high=3: vLLM samples",
        ),
    ],
)
def test_settings_that_vllm_cannot_serve_are_refused(installed, overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(
            "model.build.path=folder" if "model=pretrained" in overrides else "seed=0", *overrides
        )


def test_the_shipped_settings_pass(installed):
    check("env=frozenlake", "rollout.engine.settings={max_num_seqs: 64, tensor_parallel_size: 1}")


@pytest.mark.parametrize("devices", ["2", "6", "[0,1]", "auto", "-1"])
def test_ranks_may_share_an_engine(installed, devices):
    check(*SPLIT, f"trainer.devices={devices}", "trainer.strategy=ddp")


def test_one_rank_can_share_no_engine(installed, lm):
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: .* number, 1; set it to 1"):
        VLLMEngine(PolicyModule(lm), max_tokens=64, settings={"tensor_parallel_size": 2})


@pytest.mark.parametrize(
    "preset", ["gpu_24gb", "gpu_80gb", "gpus_8x80gb", "ragen_2026", "vagen_2026"]
)
@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_presets_for_pretrained_models_take_any_engine(installed, preset, engine):
    check("env=frozenlake_visual", f"experiment={preset}", f"rollout/engine={engine}")


def test_vllm_in_process_is_refused_for_rollouts_ahead():
    """It uses the global generators, which the update's dropout draws from."""
    with pytest.raises(ValueError, match=r"iterations_ahead=1: VLLMEngine can't .*=vllm_server"):
        check_asynchronous(VLLMEngine)


def test_quantized_weights_are_refused(installed, fresh_lm):
    fresh_lm.model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError, match="quantized weights can't be copied into vLLM"):
        VLLMEngine(PolicyModule(fresh_lm), max_tokens=64)
