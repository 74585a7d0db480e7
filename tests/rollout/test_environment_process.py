"""Environments in processes: what hangs, dies, prints or needs too much memory costs its own episode."""

import os
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envs.policies import NoisyPolicy
from ragen_pl.rollout.environment_process import ProcessEnvironment
from ragen_pl.rollout.environments import EnvironmentManager, EpisodeSpec
from ragen_pl.rollout.parsing import ParsedResponse

LAKE = "envs.frozen_lake.FrozenLake"


class Troubled(gymnasium.Env):
    """The seed of the reset selects what happens in the step."""

    action_names = ("Go",)
    action_space = spaces.Discrete(1)
    observation_space = spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = seed
        return f"in process {os.getpid()}", {}

    def step(self, action):
        if self.seed == 1:
            os._exit(7)
        if self.seed == 2:
            time.sleep(600)
        if self.seed == 3:
            np.ones(2**28)
        if self.seed == 4:
            print("noise")
        if self.seed == 5:

            class Local(Exception):
                pass

            raise Local("cannot be pickled")
        return "went", 1.0, True, False, {"success": True}


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    return EnvironmentManager(
        target="test_environment_process.Troubled",
        process=True,
        memory_mb=1024,
        workers=2,
        timeout_s=6.0,
    )


def opened(manager, *seeds):
    return manager.open([EpisodeSpec(group=n, member=0, seed=seed) for n, seed in enumerate(seeds)])


def processes(slots):
    return {slot.observation.text for slot in slots}


def test_troubles_cost_their_own_episode_and_environments_are_made_anew(manager, capfd):
    slots = opened(manager, 0, 1, 3, 4, 5)
    first = processes(slots)
    assert len(first) == 5 and f"in process {os.getpid()}" not in first
    results = manager.step(slots, [ParsedResponse(actions=[0])] * 5)
    assert [result.error is None for result in results] == [True, False, False, True, False]
    assert "exit code 7" in results[1].error
    assert "MemoryError" in results[2].error
    assert "Local: cannot be pickled" in results[4].error
    assert capfd.readouterr().out == ""
    manager.close(slots)
    again = opened(manager, 0, 0, 0, 0)
    assert all(slot.error is None for slot in again)
    assert len(processes(again) & first) == 2


def test_an_environment_that_hangs_is_killed(manager):
    slots = opened(manager, 2, 0)
    ids = [int(slot.observation.text.split()[-1]) for slot in slots]
    hangs, sound = manager.step(slots, [ParsedResponse(actions=[0])] * 2)
    assert "TimeoutError" in hangs.error and sound.error is None
    manager.close(slots)
    assert [Path(f"/proc/{number}").exists() for number in ids] == [False, True]


def test_processes_end_with_the_manager():
    manager = EnvironmentManager(target=LAKE, process=True)
    slots = manager.open([EpisodeSpec(group=0, member=0, seed=0)])
    process = slots[0].env._process
    manager.close(slots)
    del manager, slots
    assert process.wait(10) == 0


def test_an_episode_is_the_same_in_a_process():
    here, there = (
        EnvironmentManager(target=LAKE, kwargs={"slip_probability": 0.5}, process=process)
        for process in (False, True)
    )
    spec, policy = EpisodeSpec(group=0, member=0, seed=5), NoisyPolicy(noise=0.5, base="optimal")
    records = []
    for manager in (here, there):
        slots, record, rng = manager.open([spec]), [], np.random.default_rng(0)
        for _ in range(6):
            action = policy.act(slots[0].env, rng)
            (result,) = manager.step(slots, [ParsedResponse(actions=[action])])
            record.append((action, result.observation.text, result.reward_terms, result.status))
            members = slots[0].members
            record.append((members.state_key(), members.describe(), members.difficulty()))
            if result.status is not None:
                break
        records.append(record)
        manager.close(slots)
    assert records[0] == records[1] and len(records[0]) > 2


def test_members_that_are_missing_are_missing_there_too():
    env = ProcessEnvironment("envs.bandit.Bandit", {})
    try:
        env.reset(seed=0)
        assert not hasattr(env, "relations") and not hasattr(env, "relations")
        assert len(env.action_names) == 2
    finally:
        env.close()


def test_a_constructor_that_raises_is_reported_and_leaves_no_process():
    with pytest.raises(ValueError, match="safe_reward"):
        ProcessEnvironment("envs.bandit.Bandit", {"safe_reward": 0.25})


def test_a_memory_limit_needs_a_process():
    with pytest.raises(ValueError, match=r"set env\.process=true"):
        EnvironmentManager(target=LAKE, memory_mb=100)
