"""Tiny models that depend on their context and end responses at different lengths, and faulty environments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import gymnasium
import numpy as np
import pytest
import torch
from support.models.tiny_models import TEXT, VISION

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401
from ragen_pl.engines.protocol import Generation, GenerationRequest
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder

torch.set_num_threads(1)


def lively(bundle: ModelBundle) -> ModelBundle:
    """Make weights so large that a token of context shifts log-probs, and one token in ten an end."""
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    ends = [bundle.end_of_turn_id, *range(100, 130)]
    bundle.model.generation_config.eos_token_id = ends
    return bundle


@pytest.fixture(scope="session")
def lm() -> ModelBundle:
    return lively(build_small_lm(seed=0, text=TEXT))


@pytest.fixture(scope="session")
def vlm() -> ModelBundle:
    return lively(build_small_vlm(seed=0, vision=VISION, text=TEXT))


@pytest.fixture
def fresh_lm() -> ModelBundle:
    """A model that a test may change."""
    return lively(build_small_lm(seed=1, text=TEXT))


@pytest.fixture
def fresh_vlm() -> ModelBundle:
    return lively(build_small_vlm(seed=1, vision=VISION, text=TEXT))


class TextEngine:
    """Engine with written responses: `write(session, turn)` is a text, or a text and False without its end.

    With `shuffled`, responses finish one at a time, the latest request first.
    """

    def __init__(
        self,
        context: ContextManager,
        write: Callable[[int, int], str | tuple[str, bool]],
        *,
        shuffled: bool = False,
    ) -> None:
        self.context, self.write, self.continuous = context, write, shuffled
        self.turns: dict[int, int] = {}
        self.requests: list[list[GenerationRequest]] = []
        self.keep: list[bool] = []
        self.pending: list[tuple[int, Generation]] = []

    def submit(self, requests: Sequence[GenerationRequest], *, keep: bool) -> None:
        self.requests.append(list(requests))
        self.keep.append(keep)
        self.pending += [(request.session, self._response(request)) for request in requests]

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        if self.continuous:
            return [self.pending.pop()]
        finished, self.pending = self.pending, []
        return finished

    def _response(self, request: GenerationRequest) -> Generation:
        turn = self.turns.get(request.session, 0)
        self.turns[request.session] = turn + 1
        response = self.write(request.session, turn)
        text, ends = response if isinstance(response, tuple) else (response, True)
        ids = self.context.encode_response(text)
        ids = ids if ends else ids[:-1]
        return Generation(
            ids=ids,
            logprobs=np.full(len(ids), -1.0, np.float32),
            entropy=0.5,
            hit_length_limit=not ends,
            version=0,
        )

    def load_weights(self, version: int) -> None:
        """Nothing to do."""

    def release(self) -> None:
        self.turns.clear()

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture
def play(lm: ModelBundle):
    """Return a function that plays with written responses and returns the trajectories and the engine."""

    def run(
        target,
        specs,
        write,
        *,
        bundle=lm,
        shuffled=False,
        window="all",
        max_tokens=4096,
        response_tokens=64,
        **environment,
    ):
        context = ContextManager(bundle, window=window, system_prompt=None, max_tokens=max_tokens)
        proxy = AgentProxy(
            environments=EnvironmentManager(target=target, **environment),
            context=context,
            max_response_tokens=response_tokens,
        )
        engine = TextEngine(context, write, shuffled=shuffled)
        engine.proxy = proxy
        responder = EngineResponder(engine=engine, context=context)
        return proxy.rollout(responder, specs, seed_key=(0, "test")), engine

    return run


class Counter(gymnasium.Env):
    """Counts to `goal`: `More` adds one, `Stay` nothing. The reset's seed selects a fault."""

    action_names = ("More", "Stay")
    instructions = "Count."
    # event that a step may wait for
    gate = threading.Event()
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Text(100)

    def __init__(
        self,
        goal: int = 100,
        environments: int = 1000,
        faults: dict[int, str] | None = None,
        limit: int = 1000,
    ) -> None:
        self.goal, self.environments, self.limit = goal, environments, limit
        self.faults = faults or {}
        self.info: dict[str, object] = {}
        self.resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.fault = self.faults.get(seed, "")
        self.resets += 1
        self.count, self.steps, self.environment = 0, 0, int(seed) % self.environments
        self._break("reset")
        return self._see(), {}

    def step(self, action):
        self.steps += 1
        self.count += action == 0
        self._break("step")
        done = self.count >= self.goal
        reward = float("nan") if self.fault == "nan reward" else 1.0 * done
        # the same object in each step, as careless environments do
        self.info.update(success=done, action_is_effective=action == 0, count=self.count)
        return self._see(), reward, done, self.steps >= self.limit, self.info

    def state_key(self):
        return f"environment {self.environment} count {self.count}"

    def describe(self):
        return f"count {self.count}"

    def difficulty(self):
        return self.goal - self.count

    def _see(self):
        if self.fault == "number":
            return 7
        if self.fault == "flat image":
            return {"text": "see", "image": np.zeros((64, 64, 5), np.uint8)}
        if self.fault == "float image":
            return {"text": "see", "image": np.full((64, 64, 3), 0.5)}
        return f"count {self.count} of {self.goal}"

    def _break(self, where):
        if self.fault == f"{where} raises":
            raise RuntimeError(f"broken in {where}")
        if self.fault == f"{where} exits":
            raise SystemExit(3)
        if self.fault == f"{where} waits":
            self.gate.wait()
        if self.fault == f"{where} hangs":
            import time

            time.sleep(600)


class Film(gymnasium.Env):
    """An image environment that draws into the same array in each step."""

    action_names = ("On",)
    instructions = "Watch."
    action_space = gymnasium.spaces.Discrete(1)
    observation_space = gymnasium.spaces.Dict(
        {
            "text": gymnasium.spaces.Text(100),
            "image": gymnasium.spaces.Box(0, 255, (32, 32, 3), np.uint8),
        }
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.screen = np.zeros((32, 32, 3), np.uint8)
        return {"text": "look", "image": self.screen}, {}

    def step(self, action):
        self.screen += 10
        return {"text": "look", "image": self.screen}, 0.0, False, False, {"success": False}


for name, environment in (("test/Counter-v0", Counter), ("test/Film-v0", Film)):
    if name not in gymnasium.registry:
        gymnasium.register(id=name, entry_point=environment)
