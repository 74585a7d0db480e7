"""A tiny vision-language model that plays FrozenLake from images."""

from __future__ import annotations

import pytest
import torch

from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def proxy(vlm: ModelBundle) -> AgentProxy:
    return AgentProxy(
        environments=EnvironmentManager(
            target="visual_envs:ragen/FrozenLakeVisual-v0", max_turns=3, invalid_ends=False
        ),
        context=ContextManager(vlm, window="all", system_prompt=None),
        max_response_tokens=6,
    )
