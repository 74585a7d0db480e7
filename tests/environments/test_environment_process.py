"""Environments in processes: what hangs, dies, prints or needs too much memory costs its own episode."""

import gc
import os
import queue
import threading
from pathlib import Path

import numpy as np
import pytest

from envs.policies import NoisyPolicy, OptimalPolicy, RandomPolicy, SeveralActions
from envs.trivial_policies import Constant, Cycle
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.environments.process import ProcessEnvironment
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.prompts.parsing import ParsedResponse
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.rollout.settings import FailureSettings
from ragen_pl.trajectory import FailureCause

LAKE = "envs.frozen_lake.FrozenLake"


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    return EnvironmentManager(
        target="troubled.Troubled",
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
    causes = [slot.cause for slot in slots]
    lost, data = FailureCause.INFRASTRUCTURE, FailureCause.DATA
    assert causes == [None, lost, data, None, lost]
    assert capfd.readouterr().out == ""
    manager.close(slots)
    again = opened(manager, 0, 0, 0, 0)
    assert all(slot.error is None for slot in again)
    assert len(processes(again) & first) == 2


def test_an_environment_that_hangs_is_killed(manager):
    slots = opened(manager, 2, 0)
    ids = [int(slot.observation.text.split()[-1]) for slot in slots]
    hangs, sound = manager.step(slots, [ParsedResponse(actions=[0])] * 2)
    assert "took longer than" in hangs.error and sound.error is None
    manager.close(slots)
    assert [Path(f"/proc/{number}").exists() for number in ids] == [False, True]


def test_a_reset_that_hangs_or_dies_costs_its_own_episode(manager):
    proxy = AgentProxy(
        environments=manager, context=TextContext(), max_response_tokens=100, failures=FailureSettings(attempts=1)
    )  # fmt: skip
    specs = [EpisodeSpec(group=n, member=0, seed=seed) for n, seed in enumerate((0, 6, 7))]
    sound, hangs, dies = proxy.rollout(
        ScriptedResponder(policy=RandomPolicy()), specs, seed_key=(0, "test")
    )
    assert sound.error is None and sound.success
    assert "took longer than" in hangs.error and "exit code 7" in dies.error
    assert {hangs.cause, dies.cause} == {FailureCause.INFRASTRUCTURE}
    assert not hangs.turns and not dies.turns


@pytest.mark.parametrize(
    ("target", "policy"),
    [
        ("envs.game_2048.Game2048", Cycle(actions=["Up", "Left"], otherwise=["Right", "Down"])),
        (LAKE, SeveralActions(policy=OptimalPolicy(), most=3)),
        ("envs.negotiation.Negotiation", Constant(action="propose {1} books")),
    ],
)
def test_policies_look_ahead_and_read_observations_in_a_process_as_without_one(target, policy):
    acts = []
    for process in (False, True):
        env = EnvironmentManager(target=target, process=process).make()
        env.reset(seed=3)
        acts.append([policy.act(env, np.random.default_rng(seed)) for seed in range(3)])
        acts[-1].append(env.unwrapped.state_key())
        env.close()
    assert acts[0] == acts[1]


def test_a_closed_environment_has_the_values_that_were_read_last():
    env = ProcessEnvironment("envs.negotiation.Negotiation", {})
    env.reset(seed=0)
    assert (env.seats, env.mover) == (2, 0)
    env.step("hello")
    assert (env.seats, env.mover) == (2, 1)
    env.close()
    assert (env.seats, env.mover) == (2, 1)


def test_processes_end_with_the_manager():
    manager = EnvironmentManager(target=LAKE, process=True)
    slots = manager.open([EpisodeSpec(group=0, member=0, seed=0)])
    process = slots[0].env.process
    manager.close(slots)
    del manager, slots
    assert process.wait(60) == 0


def test_a_manager_that_holds_states_out_keeps_the_environments_of_the_first_one():
    manager = EnvironmentManager(target="envs.bandit.Bandit", process=True, timeout_s=60.0)
    spec = EpisodeSpec(group=0, member=0, seed=0)
    (slot,) = slots = manager.open([spec])
    process = slot.env.process
    manager.close(slots)
    held = manager.holding_out({"another"})
    del manager, slots, slot
    gc.collect()
    (slot,) = slots = held.open([spec])
    assert slot.error is None and slot.env.process is process
    held.close(slots)
    del held, slots, slot
    gc.collect()
    assert process.wait(10.0) == 0


def test_a_thread_in_which_garbage_is_collected_closes_no_environment(monkeypatch):
    """It may be the one that answers the programs of the environments."""
    closed: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def close(env: object) -> None:
        closed.put(threading.current_thread())

    monkeypatch.setattr("envs.bandit.Bandit.close", close)
    manager = EnvironmentManager(target="envs.bandit.Bandit", workers=1, timeout_s=None)
    manager.open([EpisodeSpec(group=0, member=0, seed=0)])
    manager.itself = manager
    collecting = threading.Thread(target=gc.collect)
    gc.disable()
    try:
        del manager
        collecting.start()
        collecting.join()
    finally:
        gc.enable()
    assert closed.get(timeout=60.0) not in (collecting, threading.main_thread())


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


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    env = ProcessEnvironment("troubled.Counting", {})
    env.reset(seed=0)
    yield env
    env.close()


def test_members_that_are_read_each_turn_come_with_the_step(counting):
    for number in (1, 2):
        counting.step(0)
        assert (counting.describe(), counting.state_key()) == (f"step {number}", f"state {number}")
    before = counting.round_trips
    for number in (3, 4):
        counting.step(0)
        assert counting.action_names == ("Go",)
        assert (counting.describe(), counting.state_key()) == (f"step {number}", f"state {number}")
    # two steps, and the names of the actions once
    assert counting.round_trips - before == 3
    assert [counting.counted(name) for name in ("describe", "state_key")] == [4, 4]
    # one that raises is left out, and raises where it is read
    counting.step(0)
    with pytest.raises(RuntimeError, match="no key"):
        counting.state_key()


def test_members_that_nobody_reads_are_not_computed(counting):
    for _ in range(2):
        counting.step(0)
        counting.describe()
    for _ in range(4):
        counting.step(0)
    # once more, before it is known that nobody reads it
    assert counting.counted("describe") == 3 and counting.counted("state_key") == 0


def test_a_call_that_may_change_the_state_outdates_what_has_come(counting):
    for _ in range(2):
        counting.step(0)
        counting.describe()
    counting.step(0)
    counting.skip(10)
    assert counting.describe() == "step 13"


def test_a_constructor_that_raises_is_reported_and_leaves_no_process():
    with pytest.raises(ValueError, match="safe_reward"):
        ProcessEnvironment("envs.bandit.Bandit", {"safe_reward": 0.25})


def test_a_memory_limit_needs_a_process():
    with pytest.raises(ValueError, match=r"set env\.process=true"):
        EnvironmentManager(target=LAKE, memory_mb=100)
