"""A rollout in which nothing happens any more ends, with the stacks of all threads."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace

import gymnasium
import pytest
from gymnasium import spaces
from support.episodes.rollout_fixtures import TextEngine

from ragen_pl.base.distributed import errors_told
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout import stall
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.rollout.settings import FailureSettings
from ragen_pl.rollout.stall import StallWatch

LINE = (
    r"rollout\.failures\.stall_s=0\.3: no turn of any episode has ended for 0\.3 s; .* raise it if"
)


class Waits(gymnasium.Env):
    """Its second step waits for an event."""

    action_names, instructions = ("On",), "Go on."
    action_space, observation_space = spaces.Discrete(1), spaces.Text(10)
    gate = threading.Event()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return "go", {}

    def step(self, action):
        self.steps += 1
        if self.steps == 2:
            self.gate.wait(60)
        return "go", 0.0, False, False, {"success": False}


gymnasium.register("test/Waits-v0", entry_point=Waits, disable_env_checker=True)


def test_a_rollout_that_waits_for_an_environment_ends(lm, capfd):
    context = ContextManager(lm)
    proxy = AgentProxy(
        environments=EnvironmentManager(target="test/Waits-v0", timeout_s=None, workers=2),
        context=context,
        max_response_tokens=32,
        failures=FailureSettings(stall_s=0.3),
    )
    engine = TextEngine(context, lambda session, turn: "<think></think><answer>On</answer>")
    responder, told = EngineResponder(engine=engine, context=context), []
    specs = [EpisodeSpec(group=0, member=0, seed=0)]
    with errors_told(told.append), pytest.raises(RolloutError, match=LINE) as raised:
        proxy.rollout(responder, specs, seed_key=(0, "test"))
    Waits.gate.set()
    # other ranks hear of it at once
    assert told == [raised.value]
    for thread in threading.enumerate():
        if thread.name == "stall watch":
            thread.join(60.0)
            assert not thread.is_alive()


def test_a_process_that_hangs_elsewhere_is_ended(tmp_path):
    output = tmp_path / "stderr"
    if (process := os.fork()) == 0:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 2)
        sys.__stderr__ = sys.stderr = os.fdopen(2, "w", closefd=False)
        with StallWatch(0.3, end_s=0.1):
            time.sleep(60)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 2
    text = output.read_text()
    assert "Thread 0x" in text and "in test_a_process_that_hangs_elsewhere_is_ended" in text
    assert text.splitlines()[-1].startswith("ragen_pl: rollout.failures.stall_s=0.3: no turn of")


class InCaller:
    """A thread that runs in its caller's."""

    def __init__(self, *, target, args, **_):
        self.start = lambda: target(*args)


def test_turns_keep_a_rollout_going(monkeypatch):
    now, waits = 0.0, []

    class Ended(threading.Event):
        """A turn ends a second before each wait is over; the fifth one is the rollout's end."""

        def wait(self, timeout=None):
            nonlocal now
            waits.append(timeout)
            if len(waits) == 5:
                return True
            now += timeout - 1.0
            watch.check(turn_ended=True)
            now += 1.0
            return False

    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(stall, "threading", SimpleNamespace(Thread=InCaller, Event=Ended))
    watch = StallWatch(60.0)
    with watch:
        pass
    # from the end of the last turn on
    assert waits == [60.0, 59.0, 59.0, 59.0, 59.0]
