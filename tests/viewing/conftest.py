"""A tiny vision-language model that plays FrozenLake from images."""

from __future__ import annotations

import pytest
import torch

from ragen_pl.models.build import build_small_vlm
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.environments import EnvironmentManager
from ragen_pl.rollout.proxy import AgentProxy

torch.set_num_threads(1)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="session")
def proxy() -> AgentProxy:
    bundle = build_small_vlm(seed=0, vision={"width": 32, "heads": 2}, text=TEXT)
    return AgentProxy(
        environments=EnvironmentManager(
            target="visual_envs:ragen/FrozenLakeVisual-v0", max_turns=3, invalid_ends=False
        ),
        context=ContextManager(bundle, window="all", system_prompt=None),
        max_response_tokens=6,
    )
