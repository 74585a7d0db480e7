"""Time of a rollout of agent programs over HTTP, relative to the same task as an environment in this process.

Sessions talk for some turns, each with its whole history. The engine samples nothing: it writes the same words and
takes a fixed time for each call, once after the other as one GPU does, and once for all calls that wait together.

    python benchmarks/endpoint.py --sessions 64 --turns 12 --call-ms 20
"""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.parse
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

TURNS = "TURNS"


def turns() -> int:
    """Return the turns of an episode."""
    return int(os.environ[TURNS])


def user_text(turn: int) -> str:
    """Return what is said to the policy."""
    return f"turn {turn}: what do you see, and what follows from it?"


class Talk(gymnasium.Env[Any, Any]):
    """The task as an environment."""

    action_space: spaces.Space[Any] = spaces.Text(max_length=10_000)
    observation_space: spaces.Space[Any] = spaces.Text(max_length=10_000)
    instructions = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin to talk."""
        super().reset(seed=seed)
        self.turn = 0
        return user_text(0), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Go on, or end with a reward."""
        self.turn += 1
        ended = self.turn == turns()
        return user_text(self.turn), float(ended), ended, False, {"success": ended}


def talk(task: Any) -> dict[str, Any]:
    """The task as a program: one connection, and a request with the whole history for each turn."""
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = HTTPConnection(str(url.hostname), url.port)
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    messages: list[dict[str, Any]] = []
    for turn in range(turns()):
        messages.append({"role": "user", "content": user_text(turn)})
        body = json.dumps({"messages": messages})
        connection.request("POST", f"{url.path}/chat/completions", body=body, headers=headers)
        messages.append(json.load(connection.getresponse())["choices"][0]["message"])
    return {"reward": 1.0, "success": True}


class SleepingEngine:
    """Engine that writes the same words and takes a fixed time, for each call or for all that wait."""

    continuous = False

    def __init__(self, ids: np.ndarray, *, call_s: float, together: bool) -> None:
        self.ids, self.call_s, self.together = ids, call_s, together
        self.pending: list[int] = []
        self.calls = 0

    def submit(self, requests: Sequence[Any], *, keep: bool) -> None:
        """Queue requests."""
        self.pending += [request.session for request in requests]

    def collect(self, *, wait: bool = True) -> list[tuple[int, Any]]:
        """Return all responses."""
        from ragen_pl.engines.protocol import Generation

        sessions, self.pending = self.pending, []
        self.calls += len(sessions)
        time.sleep(self.call_s * (1 if self.together else len(sessions)))
        logprobs = np.full(len(self.ids), -1.0, np.float32)
        generation = Generation(
            ids=self.ids, logprobs=logprobs, entropy=0.5, hit_length_limit=False, version=0
        )
        return [(session, generation) for session in sessions]

    def release(self) -> None:
        """Nothing is held."""


def rollout_s(
    target: str, kwargs: dict[str, Any], options: argparse.Namespace, *, together: bool
) -> tuple[float, float]:
    """Return the seconds of a rollout, and those of this process's processor time."""
    # programs import this module too, and need none of it
    from ragen_pl.base.prompt_formats import PromptFormat
    from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
    from ragen_pl.models.build import build_small_lm
    from ragen_pl.prompts.context import ContextManager
    from ragen_pl.rollout.proxy import AgentProxy
    from ragen_pl.rollout.responders import EngineResponder

    bundle = build_small_lm(seed=0, prompt_format=PromptFormat.NATIVE)
    context = ContextManager(bundle, window="all", system_prompt=None, max_tokens=100_000)
    manager = EnvironmentManager(
        target=target,
        kwargs=kwargs,
        prompt_format=PromptFormat.NATIVE,
        max_turns=options.turns + 1,
        timeout_s=None,
        workers=options.sessions,
    )
    proxy = AgentProxy(
        environments=manager,
        context=context,
        num_envs=options.sessions,
        max_response_tokens=64,
    )
    ids = context.encode_response("I see a door, so I open it")
    engine = SleepingEngine(ids, call_s=options.call_ms / 1000, together=together)
    specs = [EpisodeSpec(group=0, member=n, seed=0) for n in range(options.sessions)]
    responder = EngineResponder(engine=engine, context=context)  # type: ignore[arg-type]
    began, cpu_began = time.perf_counter(), time.process_time()
    trajectories = proxy.rollout(responder, specs, seed_key=(0, "benchmark"))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    for trajectory in trajectories:
        assert trajectory.success and len(trajectory.turns) == options.turns, trajectory.error
    assert engine.calls == options.sessions * options.turns
    return seconds, cpu


def ways_to_play(turns: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return class and arguments of the task by name: as an environment, and as a program."""
    program = {"function": "endpoint.talk", "variables": {TURNS: str(turns)}}
    return {
        "environment": ("endpoint.Talk", {}),
        "program": ("ragen_pl.agent_programs.environment.ProgramEnvironment", program),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--call-ms", type=float, default=20.0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    os.environ |= {TURNS: str(options.turns), "PYTHONPATH": str(Path(__file__).parent)}
    ways = ways_to_play(options.turns)
    for together in (False, True):
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        # the first program starts the supervisor, which imports the function
        for number in range(options.repeat + 1):
            for name, (target, kwargs) in ways.items():
                taken = rollout_s(target, kwargs, options, together=together)
                if number:
                    seconds[name].append(taken)
        (plain, plain_cpu), (http, http_cpu) = (np.median(seconds[name], axis=0) for name in ways)
        calls = options.sessions * options.turns
        more, more_cpu = 1000 * (http - plain) / calls, 1000 * (http_cpu - plain_cpu) / calls
        of = "all calls that wait" if together else "each call"
        print(
            f"{options.call_ms:g} ms for {of}: environment {plain:.2f} s, program {http:.2f} s, ratio "
            f"{http / plain:.3f}; a call takes {more:.2f} ms more, {more_cpu:.2f} ms of processor time",
            flush=True,
        )


if __name__ == "__main__":
    main()
