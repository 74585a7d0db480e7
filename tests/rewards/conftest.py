"""Episodes played with written or scripted responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import TextResponder
from ragen_pl.rollout.turns import Episode

torch.set_num_threads(1)


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
