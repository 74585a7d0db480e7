"""The check at the start of a run that engine, trainer and model agree."""

from __future__ import annotations

import pytest
from family_models import tiny

from ragen_pl.modules.policy import PolicyModule
from ragen_pl.rollout import agreement
from ragen_pl.rollout.agreement import check_agreement
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.transformers_engine import TransformersEngine


@pytest.mark.parametrize("window", [1, "all"])
@pytest.mark.parametrize("name", ["llama3_2", "qwen3_vl"])
def test_models_that_agree_pass(name, window):
    bundle = tiny(name)
    context = ContextManager(bundle, window=window, system_prompt=None)
    size = (56, 84) if bundle.images else None
    assert (
        check_agreement(context, TransformersEngine(PolicyModule(bundle)), image_size=size) < 1e-4
    )


def test_an_engine_that_differs_is_refused():
    bundle = tiny("llama3_2")
    engine = TransformersEngine(PolicyModule(bundle))
    collect = engine.collect

    def shifted():
        finished = collect()
        for _, generation in finished:
            generation.logprobs = generation.logprobs + 0.01
        return finished

    engine.collect = shifted
    with pytest.raises(ValueError, match=r"rollout engine differ by 0\.01.*llama"):
        check_agreement(ContextManager(bundle), engine, image_size=None)


def test_a_trainer_that_differs_is_refused(monkeypatch):
    bundle = tiny("qwen2_5_vl")
    engine = TransformersEngine(PolicyModule(bundle))
    inputs = agreement.whole_inputs

    def without_positions(*arguments, **named):
        made = inputs(*arguments, **named)
        made.positions = None
        return made

    monkeypatch.setattr(agreement, "whole_inputs", without_positions)
    with pytest.raises(ValueError, match=r"trainer differ by .*qwen2_5_vl"):
        check_agreement(ContextManager(bundle, system_prompt=None), engine, image_size=(56, 84))
