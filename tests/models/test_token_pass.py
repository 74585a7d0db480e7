"""The small models' pass over one token of each cached sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import TEXT, VISION
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
def sampled_states(bundle, *, ragged: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the states of `STEPS` tokens after prompts, and the cache's keys and values."""
    rng = np.random.default_rng(0)
    lengths = [LONGEST - row * ragged for row in range(ROWS)]
    prompts = [rng.integers(20, 100, length) for length in lengths]
    cache = InPlaceCache()
    inputs, valid, positions = continued_inputs(
        bundle,
        prompts,
        valid=torch.zeros(ROWS, 0, dtype=torch.bool),
        next_position=torch.zeros(ROWS, dtype=torch.int64),
        features=None,
    )
    run_decoder(bundle, inputs, cache=cache)
    states = []
    for step in range(STEPS):
        ids = torch.from_numpy(rng.integers(20, 100, ROWS))
        valid = functional.pad(valid, (0, 1), value=True)
        slots = valid if ragged else None
        inputs = token_inputs(bundle, ids, positions=positions + step, valid=slots)
        states.append(run_decoder(bundle, inputs, cache=cache))
    return torch.stack(states), [
        part for layer in cache.layers for part in (layer.keys, layer.values)
    ]


@pytest.mark.parametrize("ragged", [False, True], ids=["alike", "ragged"])
@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_states_are_those_of_the_model(kind, text, ragged) -> None:
    bundle = BUILDERS[kind](text=TEXT | text)
    with torch.no_grad():
        for name, weight in bundle.model.named_parameters():
            # norms and biases would have no effect
            if weight.ndim == 1:
                weight.add_(
                    torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    calls = []

    def noted(decoder, *arguments, **keywords):
        calls.append(decoder)
        return bundle.token_pass(decoder, *arguments, **keywords)

    passed, written = sampled_states(replace(bundle, token_pass=noted), ragged=ragged)
    assert len(calls) == STEPS
    expected, own = sampled_states(replace(bundle, token_pass=None), ragged=ragged)
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
