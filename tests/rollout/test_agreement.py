"""The check at the start of a run that engine, trainer and model agree."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support.models.family_models import tiny
from support.models.tiny_families import tiny_bundle
from torch import nn
from transformers import LlamaForCausalLM

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.models.adapters import choose_trained_weights
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.sharding import GatheredPolicy
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout import agreement
from ragen_pl.rollout.agreement import check_agreement, check_trainer

LONGEST = 400


def check(bundle: ModelBundle, *, window: int | str = "all", max_tokens: int = LONGEST) -> float:
    context = ContextManager(bundle, window=window, system_prompt=None, max_tokens=max_tokens)
    engine = TransformersEngine(PolicyModule(bundle))
    return check_agreement(context, engine, image_size=(56, 84) if bundle.images else None)


@pytest.mark.parametrize("window", [1, "all"])
@pytest.mark.parametrize("name", ["llama3_2", "qwen3_vl"])
def test_models_that_agree_pass(name, window):
    bundle = tiny(name)
    bundle.model.train()
    modes = {module: module.training for module in bundle.model.modules()}
    state = torch.get_rng_state()
    assert check(bundle, window=window) < 1e-4
    assert modes == {module: module.training for module in bundle.model.modules()}
    assert state.equal(torch.get_rng_state())


def test_an_engine_of_its_own_is_compared_where_the_gathered_copy_is_empty():
    bundle = tiny("llama3_2")
    engine, copy = TransformersEngine(PolicyModule(bundle)), GatheredPolicy(PolicyModule(bundle))
    copy.release()
    context = ContextManager(copy.bundle, system_prompt=None, max_tokens=LONGEST)
    assert check_agreement(context, engine, image_size=None, policy=copy) < 1e-4


def test_one_conversation_is_as_long_as_the_context_allows(monkeypatch):
    lengths = []
    own = agreement._own_logprobs

    def noted(bundle, response):
        lengths.append(len(response.prompt.ids) + len(response.ids))
        return own(bundle, response)

    monkeypatch.setattr(agreement, "_own_logprobs", noted)
    check(tiny("llama3_2"), max_tokens=1000)
    assert 1000 - 100 < max(lengths) <= 1000
    assert sorted(lengths)[-2] < 400


def test_conversations_end_where_the_context_does():
    bundle = tiny("llama3_2")
    with pytest.raises(
        ValueError, match=r"context\.max_tokens=20: .* set at least (\d+)"
    ) as refused:
        check(bundle, max_tokens=20)
    least = int(str(refused.value).rpartition(" ")[2])
    # one response, and some
    for longest in (least, least + 60):
        assert check(bundle, max_tokens=longest) < 1e-4


def test_frequencies_that_depend_on_the_length_of_a_call_are_refused():
    bundle = tiny("llama3_2")
    config = bundle.model.config
    config.rope_parameters |= {"rope_type": "dynamic", "factor": 4.0}
    config.max_position_embeddings = 400
    changed = LlamaForCausalLM(config)
    changed.load_state_dict(bundle.model.state_dict())
    longer = ModelBundle(changed.eval(), bundle.tokenizer)
    assert check(longer) < 1e-4
    with pytest.raises(ValueError, match=r"log-probs of the rollout engine differ"):
        check(longer, max_tokens=1000)


def test_layers_that_compress_the_padding_of_a_long_row_are_refused():
    """DeepSeek-V4 compresses 128 tokens at a time, padding included; shorter rows are exact."""
    bundle = tiny_bundle("deepseek_v4", images=False)
    assert check(bundle, max_tokens=120) < 1e-4
    with pytest.raises(ValueError, match=r"rollout engine differ by .*deepseek_v4"):
        check(bundle)


def test_what_depends_on_the_mode_is_refused():
    bundle = tiny("llama3_2")
    first = bundle.model.model.layers[0].mlp
    first.act_fn = nn.Sequential(first.act_fn, nn.Dropout(0.3))
    with pytest.raises(ValueError, match=r"train mode differ by .* from those of eval mode.*llama"):
        check(bundle.with_model(bundle.model.eval()))


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
        check_agreement(ContextManager(bundle, max_tokens=LONGEST), engine, image_size=None)


def test_a_trainer_that_differs_is_refused_with_and_without_an_engine(monkeypatch):
    bundle = tiny("qwen2_5_vl")
    context = ContextManager(bundle, system_prompt=None, max_tokens=LONGEST)
    alone = partial(check_trainer, context, image_size=(56, 84), policy=PolicyModule(bundle))
    assert alone(alone=True) < 1e-4
    inputs = agreement.whole_inputs

    def without_positions(*arguments, **named):
        made = inputs(*arguments, **named)
        made.positions = None
        return made

    monkeypatch.setattr(agreement, "whole_inputs", without_positions)
    for compare in (alone, partial(check, bundle)):
        with pytest.raises(ValueError, match=r"trainer differ by .*qwen2_5_vl"):
            compare()


def test_the_precision_of_the_run_is_compared():
    """Under autocast the differences are those of 16 bits, and a mean is compared."""
    bundle = tiny("llama3_2")
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    found = {}
    for precision, around in (("32-true", nullcontext), ("bf16-mixed", autocast)):
        engine = TransformersEngine(PolicyModule(bundle), forward_context=around)
        found[precision] = check_agreement(
            ContextManager(bundle, max_tokens=LONGEST),
            engine,
            image_size=None,
            forward_context=around,
        )
    assert found["32-true"] < 1e-4 and 1e-3 < found["bf16-mixed"] < 0.3


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["all weights", "adapters"])
def test_a_trainer_that_does_not_read_its_images_is_refused(monkeypatch, lora):
    bundle = tiny("qwen2_5_vl")
    choose_trained_weights(bundle.model, lora=lora)
    context = ContextManager(bundle, system_prompt=None, max_tokens=LONGEST)
    compare = partial(check_trainer, context, image_size=(56, 84), policy=PolicyModule(bundle))
    gradients = [weight.grad for weight in bundle.model.parameters()]
    compare(alone=True)
    assert [weight.grad for weight in bundle.model.parameters()] == gradients
    inputs = agreement.whole_inputs
    read = agreement._batch_logprobs

    def without_images(bundle, ids, *, images, **named):
        return inputs(bundle, ids, images=[torch.zeros_like(one) for one in images], **named)

    def detached(bundle, responses):
        """Rows with the images in their values, and black ones in their gradients."""
        if not torch.is_grad_enabled():
            return read(bundle, responses)
        with torch.no_grad():
            values = read(bundle, responses)
        with monkeypatch.context() as patched:
            patched.setattr(agreement, "whole_inputs", without_images)
            return [
                row + (value - row).detach()
                for row, value in zip(read(bundle, responses), values, strict=True)
            ]

    with monkeypatch.context() as patched:
        patched.setattr(agreement, "_batch_logprobs", detached)
        with pytest.raises(ValueError, match=r"^model\.build: gradients of a response stay .*qwen"):
            compare(alone=True)
    # the model's own forward does not read them either
    own = ModelBundle.own_inputs
    monkeypatch.setattr(agreement, "whole_inputs", without_images)
    monkeypatch.setattr(
        ModelBundle,
        "own_inputs",
        lambda self, ids, images: own(self, ids, [0 * one for one in images]),
    )
    with pytest.raises(ValueError, match=r"^model\.build: log-probs of a response stay .*qwen"):
        compare(alone=True)
