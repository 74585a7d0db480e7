"""Agent programs that call the policy: scripts of a few lines with a client of the standard library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.episodes.rollout_fixtures import TextEngine, lively
from support.models.tiny_models import TEXT
from support.servers.program_client import CLIENT

from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.models.build import build_small_lm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.trajectory import Trajectory


@pytest.fixture(scope="session")
def native_lm() -> ModelBundle:
    bundle = lively(build_small_lm(seed=0, text=TEXT, prompt_format=PromptFormat.NATIVE))
    bundle.calls_tools = True
    return bundle


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that writes a program and returns its command line."""
    (tmp_path / "chat.py").write_text(CLIENT)

    def write(body: str) -> list[str]:
        file = tmp_path / f"program_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(f"from chat import *\n{body}\n")
        return [sys.executable, "-S", str(file)]

    return write


Play = Callable[..., list[Trajectory]]


@pytest.fixture
def play(native_lm: ModelBundle) -> Play:
    """Return a function that plays programs with written responses, `write(session, turn)`."""

    def run(
        command: Sequence[str] | None,
        write: Callable[[int, int], Any] = lambda session, turn: f"word {turn}",
        *,
        episodes: int = 1,
        shuffled: bool = False,
        engine: Any = None,
        bundle: ModelBundle = native_lm,
        max_tokens: int = 4096,
        workers: int = 8,
        num_envs: int = 64,
        max_response_tokens: int = 128,
        **kwargs: Any,
    ) -> list[Trajectory]:
        manager = EnvironmentManager(
            target="ragen_pl.agent_programs.environment.ProgramEnvironment",
            kwargs={"command": command, "program_s": 20.0} | kwargs,
            prompt_format=PromptFormat.NATIVE,
            timeout_s=None,
            workers=workers,
        )
        context = ContextManager(bundle, window="all", system_prompt=None, max_tokens=max_tokens)
        proxy = AgentProxy(
            environments=manager,
            context=context,
            num_envs=num_envs,
            max_response_tokens=max_response_tokens,
        )
        responder = EngineResponder(
            engine=engine or TextEngine(context, write, shuffled=shuffled), context=context
        )
        specs = [
            EpisodeSpec(group=number // 2, member=number % 2, seed=number // 2)
            for number in range(episodes)
        ]
        return proxy.rollout(responder, specs, seed_key=(0, "test"))

    return run
