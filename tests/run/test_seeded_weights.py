"""A run's first weights depend on its seed, and not on what the process has drawn before."""

from __future__ import annotations

import pytest
import torch
from support.runs.composing import composed

from ragen_pl.assembly.build import assemble, build_warm_start


def weights(*, seed, critic, drawn):
    torch.manual_seed(drawn)
    overrides = [
        "env=frozenlake",
        "validation.episodes=4",
        "warm_start.episodes=4",
        f"seed={seed}",
        f"algorithm.critic={critic}",
        "++model.build.text.hidden_size=32",
        "++model.build.text.num_attention_heads=2",
        "++model.build.text.num_key_value_heads=2",
    ]
    return build_warm_start(assemble(composed(*overrides)))[0].state_dict()


@pytest.mark.parametrize("critic", ["shared", "own"])
def test_first_weights_depend_on_the_seed_alone(critic):
    first = weights(seed=3, critic=critic, drawn=1)
    same = weights(seed=3, critic=critic, drawn=2)
    other = weights(seed=4, critic=critic, drawn=1)
    assert all(torch.equal(value, same[name]) for name, value in first.items())
    for prefix in ("policy.", "critic.head"):
        assert any(
            not torch.equal(value, other[name])
            for name, value in first.items()
            if name.startswith(prefix)
        )
