"""Blocks with seeded global generators leave them as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ragen_pl.base.seeding import seeded


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_a_block_draws_from_its_key_and_leaves_the_generators() -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with seeded("key", 1):
        first = draws()
    assert states[0].equal(torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    with seeded("key", 1):
        assert draws() == first
    with seeded("key", 2):
        assert draws() != first


def test_the_generator_of_the_gpu_is_seeded_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a generator of the CPU in its place."""
    gpu = torch.Generator().manual_seed(5)
    for name, stand_in in (
        ("is_initialized", lambda: True),
        ("manual_seed", gpu.manual_seed),
        ("get_rng_state", gpu.get_state),
        ("set_rng_state", gpu.set_state),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    before = gpu.get_state()
    values = []
    for key in ("a", "a", "b"):
        with seeded(key):
            values.append(float(torch.rand((), generator=gpu)))
        assert gpu.get_state().equal(before)
    assert values[0] == values[1] != values[2]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with seeded("a"):
        assert gpu.get_state().equal(before)
