"""Small models, and episodes played with written or scripted responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401
from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.rollout.conversation import TextContext
from ragen_pl.rollout.environments import EnvironmentManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import Episode, TextResponder

torch.set_num_threads(1)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="session")
def lm() -> ModelBundle:
    return build_small_lm(seed=0, text=TEXT)


@pytest.fixture(scope="session")
def vlm() -> ModelBundle:
    return build_small_vlm(seed=0, vision={"width": 32, "heads": 2}, text=TEXT)


@dataclass(kw_only=True, slots=True)
class FixedResponder(TextResponder):
    """Gives the same response in each turn."""

    text: str

    def respond(self, episode: Episode) -> str:
        return self.text


@pytest.fixture
def play() -> Callable:
    """Return a function that plays with one fixed response."""

    def run(target, specs, text, **environment):
        proxy = AgentProxy(
            environments=EnvironmentManager(target=target, **environment),
            context=TextContext(),
            max_response_tokens=1000,
        )
        return proxy.rollout(FixedResponder(text=text), specs, seed_key=(0, "test"))

    return run
