"""Engines on vLLM with settings of their own, and what they leave alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.models.vllm_models import build, gap, play

from ragen_pl.engines.vllm.engine import VLLMEngine
from ragen_pl.models.adapters import add_lora
from ragen_pl.models.build import build_small_vlm
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_agreement

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("settings", [{"r": 4}, {"r": 4, "use_dora": True}])
def test_adapters_are_merged(start_engine, settings):
    bundle = build("text")
    torch.manual_seed(0)
    add_lora(bundle.model, settings)
    with torch.no_grad():
        for name, weight in bundle.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    engine = start_engine(bundle)
    assert gap(bundle, play(engine)) < 1e-4
    with torch.no_grad():
        for name, weight in bundle.model.named_parameters():
            if "lora_B" in name:
                weight.zero_()
    assert gap(bundle, play(engine)) > 0.01
    engine.load_weights(1)
    assert gap(bundle, play(engine)) < 1e-4


def test_bfloat16_is_close(start_engine):
    bundle = build("text")
    engine = start_engine(bundle, dtype="bfloat16")
    assert engine.dtype == torch.bfloat16
    found = check_agreement(ContextManager(bundle, max_tokens=512), engine, image_size=None)
    assert 1e-3 < found < 0.5


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match=r"vLLM can't run this ragen_small_vlm model \(.*\); set"):
        VLLMEngine(PolicyModule(build_small_vlm()), max_tokens=512)


def test_global_generators_and_threads_stay_as_they_are(start_engine):
    def state():
        return (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
            torch.get_num_threads(),
            torch.set_num_threads,
        )

    bundle = build("text")
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = state()
    engine = start_engine(bundle)
    play(engine)
    engine.sleep()
    engine.load_weights(1)
    play(engine)
    assert state() == before
