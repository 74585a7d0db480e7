"""The small models' pass over new tokens of cached sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.tiny_models import TEXT, VISION
from torch.nn import functional

from ragen_pl.engines.in_process.kv_cache import InPlaceCache
from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.models.inputs import continued_inputs, run_decoder, token_inputs

SETTINGS = {
    "one head of keys": {"num_key_value_heads": 1},
    "heads in groups": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "a head each": {},
    "deep": {"num_hidden_layers": 4},
    "scaled positions": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e3}
    },
}
BUILDERS = {
    "text": build_small_lm,
    "images": lambda text: build_small_vlm(text=text, vision=VISION),
}
ROWS, LONGEST, STEPS = 5, 9, 6


@torch.inference_mode()
def sampled_states(bundle, *, ragged: bool, shared: int = 0) -> tuple[torch.Tensor, list]:
    """Return the states of the last prompt token and of `STEPS` tokens after it, and the cache's keys and values.

    Args:
        bundle: Model.
        ragged: Whether prompts differ in length.
        shared: Number of tokens that all prompts begin with, computed once.
    """
    rng = np.random.default_rng(0)
    cache, valid = InPlaceCache(), torch.zeros(ROWS, 0, dtype=torch.bool)
    positions = torch.zeros(ROWS, dtype=torch.int64)
    if shared:
        inputs, valid, positions = continued_inputs(
            bundle,
            [rng.integers(20, 100, shared)],
            valid=valid[:1],
            next_position=positions[:1],
            features=None,
        )
        run_decoder(bundle, inputs, cache=cache, first=shared - 1)
        cache = cache.select(torch.zeros(ROWS, dtype=torch.int64))
        valid, positions = valid.expand(ROWS, -1), positions.expand(ROWS)
    lengths = [LONGEST - row * ragged for row in range(ROWS)]
    inputs, valid, positions = continued_inputs(
        bundle,
        [rng.integers(20, 100, length) for length in lengths],
        valid=valid,
        next_position=positions,
        features=None,
    )
    states = [run_decoder(bundle, inputs, cache=cache, first=LONGEST - 1, shared_slots=shared)]
    for step in range(STEPS):
        ids = torch.from_numpy(rng.integers(20, 100, ROWS))
        valid = functional.pad(valid, (0, 1), value=True)
        slots = valid if ragged else None
        inputs = token_inputs(bundle, ids, positions=positions + step, valid=slots)
        states.append(run_decoder(bundle, inputs, cache=cache, shared_slots=shared))
    return torch.stack(states), [
        part for layer in cache.layers for part in (layer.keys, layer.values)
    ]


@pytest.mark.parametrize("shared", [0, 11], ids=["own prompts", "shared prefix"])
@pytest.mark.parametrize("ragged", [False, True], ids=["alike", "ragged"])
@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_states_are_those_of_the_model(kind, text, ragged, shared) -> None:
    bundle = BUILDERS[kind](text=TEXT | text)
    with torch.no_grad():
        for name, weight in bundle.model.named_parameters():
            # norms and biases would have no effect
            if weight.ndim == 1:
                weight.add_(
                    torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    calls = []

    def noted(decoder, inputs, **keywords):
        calls.append(inputs.ids.shape[1])
        return bundle.token_pass(decoder, inputs, **keywords)

    settings = {"ragged": ragged, "shared": shared}
    passed, written = sampled_states(replace(bundle, token_pass=noted), **settings)
    # a prompt that nothing comes before takes the model's own pass
    assert calls == [LONGEST] * bool(shared) + [1] * STEPS
    expected, own = sampled_states(replace(bundle, token_pass=None), **settings)
    torch.testing.assert_close(passed, expected, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(written, own, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert (passed[0] - passed[-1]).abs().max() > 0.1


def test_other_computation_takes_the_models_own_pass() -> None:
    def refused(*_, **__):
        raise AssertionError("the pass is for float32 without a gradient")

    bundle = replace(build_small_lm(text=TEXT), token_pass=refused)
    with pytest.raises(AssertionError):
        sampled_states(bundle, ragged=True)
    with torch.autocast("cpu", torch.bfloat16):
        sampled_states(bundle, ragged=True)
    sampled_states(
        replace(build_small_lm(text=TEXT, dtype="bfloat16"), token_pass=refused), ragged=True
    )
