"""Environments on other machines: play there is equal to local play, whatever happens to sessions and servers."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from support.servers.endpoint_clients import until
from support.servers.faulty_servers import LAKE, SLIPPERY, Served

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401
from envs.adapters.openenv import OpenEnv
from envs.policies import RandomPolicy
from ragen_pl.environments.answers import AnswerReader
from ragen_pl.environments.classes import environment_maker
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.trajectory import EpisodeStatus


def rollout(
    *,
    target: str = LAKE,
    kwargs: dict[str, Any],
    count: int = 16,
    on_turn: Any = None,
    policy: Any = None,
    held_out: bool | None = None,
    **settings: Any,
) -> list[Any]:
    """Play episodes, at random by default."""
    manager = EnvironmentManager(
        target=target, kwargs=kwargs, max_turns=20, workers=8, record_states=True, **settings
    )
    proxy = AgentProxy(environments=manager, context=TextContext(), max_response_tokens=10_000)
    specs = [
        EpisodeSpec(group=n // 2, member=n % 2, seed=n // 2, held_out=held_out)
        for n in range(count)
    ]
    played = proxy.rollout(
        ScriptedResponder(policy=policy or RandomPolicy()),
        specs,
        seed_key=(0, "test"),
        on_turn=on_turn,
    )
    # idle sessions end
    manager.close_idle()
    return played


def remote(*served: Served, on_turn: Any = None, count: int = 16, **settings: Any) -> list[Any]:
    kwargs = {"urls": [one.url for one in served], "members": True, "timeout_s": 20.0} | settings
    return rollout(
        target="envs.adapters.openenv.OpenEnv", kwargs=kwargs, count=count, on_turn=on_turn
    )


def local(*, count: int = 16) -> list[Any]:
    return rollout(kwargs=SLIPPERY, count=count)


def content(trajectory: Any) -> Any:
    turns = [
        (
            turn.observation.text,
            [image.tolist() for image in turn.observation.images],
            turn.response_text,
            turn.actions,
            turn.reward_terms,
            turn.state_key,
            turn.state_description,
            turn.action_is_effective,
            {key: value for key, value in turn.info.items() if key != "replayed_steps"},
        )
        for turn in trajectory.turns
    ]
    return (
        trajectory.seed, trajectory.status, trajectory.success, trajectory.difficulty, trajectory.error, turns
    )  # fmt: skip


def assert_equal(played: list[Any], expected: list[Any]) -> None:
    assert [content(one) for one in played] == [content(one) for one in expected]


def steps_of(trajectories: list[Any]) -> int:
    return sum(len(one.turns) for one in trajectories)


def replayed(trajectories: list[Any]) -> int:
    return sum(turn.info.get("replayed_steps", 0) for one in trajectories for turn in one.turns)


class AtTurn:
    """Does something once, after a number of turns of the rollout."""

    def __init__(self, number: int, work: Any) -> None:
        self.number, self.work, self.turns = number, work, 0

    def __call__(self, episode: Any) -> None:
        self.turns += 1
        if self.turns == self.number:
            self.work()


def test_play_on_a_server_is_equal_to_local_play(serve: Any) -> None:
    served = serve()
    expected, played = local(), remote(served)
    assert_equal(played, expected)
    assert {one.status for one in expected} >= {EpisodeStatus.TERMINATED}
    health = served.health()
    assert health["status"] == "healthy" and health["capacity"] == 64
    assert (health["steps"], health["episodes"]) == (steps_of(expected), 16)


class Silent:
    """Takes any cell, or answers nothing."""

    def act(self, env: Any, rng: Any) -> int | str:
        return "" if rng.random() < 0.2 else int(rng.integers(9))


def test_games_against_an_opponent_are_equal_to_local_ones(serve: Any) -> None:
    """A response without a valid action loses them, and validation has an opponent of its own."""
    target, kwargs = "envs.tic_tac_toe.TicTacToe", {"opponent": "random"}
    served = serve(target=target, kwargs=kwargs)
    there = {
        "target": "envs.adapters.openenv.OpenEnv",
        "kwargs": {"urls": [served.url], "members": True},
    }
    here = {"target": target, "kwargs": kwargs}
    played = {
        held_out: [rollout(**where, policy=Silent(), held_out=held_out) for where in (here, there)]
        for held_out in (False, True)
    }
    for expected, remotely in played.values():
        assert_equal(remotely, expected)
        lost = [one.turns[-1] for one in expected if not one.turns[-1].action_is_valid]
        assert lost and all(turn.reward == -1.05 for turn in lost)
    # the optimal player moves otherwise
    assert [content(one) for one in played[True][0]] != [content(one) for one in played[False][0]]


def test_images_and_options_travel(serve: Any) -> None:
    target = "visual_envs:ragen/FrozenLakeVisual-v0"
    served = serve(target=target, kwargs={"size": 4})
    there = OpenEnv(urls=[served.url], members=True)
    here = environment_maker(target)(size=4)
    reader, options = AnswerReader(target=target), {"min_detour": 2}
    seen: list[list[Any]] = []
    for env in (there, here):
        # two observations each
        seen.append([env.reset(seed=9, options=options)[0], env.step(1)[0]])
    for shown, expected in zip(*seen, strict=True):
        (image,) = reader.observation(expected).images
        assert (reader.observation(shown).images[0] == image).all() and image.std() > 0
    assert there.state_key() == here.unwrapped.state_key()
    assert there.relations() == here.unwrapped.relations()
    with pytest.raises(RuntimeError, match=r"found \['depth'\].*EXECUTION_ERROR"):
        there.reset(seed=9, options={"depth": 1})
    there.close()


def test_another_server_goes_on_where_one_is_killed(serve: Any) -> None:
    first, second = serve(), serve()
    played = remote(first, second, on_turn=AtTurn(24, first.kill))
    assert_equal(played, local())
    assert replayed(played) > 0
    assert first.count("steps") + second.count("steps") == steps_of(played) + replayed(played)


def test_the_only_server_is_started_again(serve: Any) -> None:
    served = serve()

    def restart() -> None:
        served.kill()
        threading.Timer(1.0, served.start).start()

    played = remote(served, on_turn=AtTurn(24, restart))
    assert_equal(played, local())
    assert len(served.servers) == 2 and replayed(played) > 0
    assert served.count("steps") == steps_of(played) + replayed(played)


def test_sessions_that_are_closed_in_a_pause_are_replayed(serve: Any) -> None:
    served = serve(idle_s=0.5)

    def pause() -> None:
        until(lambda: served.health()["open"] == 0)

    played = remote(served, on_turn=AtTurn(24, pause))
    assert_equal(played, local())
    assert served.count("idle") > 0 and replayed(played) > 0
    assert served.count("steps") == steps_of(played) + replayed(played)


def test_a_step_whose_answer_is_lost_is_taken_once(serve: Any) -> None:
    served = serve()
    served.server.lost_answers, served.server.loses_in_a_row = 0.1, False
    # a session that gets no answer to a repeated step is replayed, and its step is taken in both
    played = remote(served, timeout_s=2.0)
    assert_equal(played, local())
    assert served.count("repeated_steps") >= served.server.lost > 0
    assert served.count("steps") == steps_of(played) + replayed(played)


def test_more_sessions_than_places_wait_for_their_turn(serve: Any) -> None:
    served = serve(sessions=3)
    expected: dict[int, list[Any]] = {}
    played: dict[int, list[Any]] = {}

    def play(seed: int, env: Any, into: dict[int, list[Any]]) -> None:
        rng, seen = random.Random(seed), [env.reset(seed=seed)[0]]
        for _ in range(100):
            seen.append(env.step(rng.randrange(4))[:4])
            if seen[-1][2] or seen[-1][3]:
                break
        into[seed] = seen

    def waiting(seed: int) -> None:
        env = OpenEnv(urls=[served.url], members=True, timeout_s=20.0, search_s=60.0)
        waited.append(env)
        play(seed, env, played)

    waited: list[OpenEnv] = []
    threads = [threading.Thread(target=waiting, args=(seed,)) for seed in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for seed in range(9):
        play(seed, environment_maker(LAKE)(**SLIPPERY).unwrapped, expected)
    assert played == expected
    for env in waited:
        env.close()
    assert served.count("full") > 0 and served.health()["open"] <= 3


def test_a_full_server_refuses_after_the_search(serve: Any) -> None:
    served = serve(sessions=1)
    first = OpenEnv(urls=[served.url], members=True)
    first.reset(seed=0)
    second = OpenEnv(urls=[served.url], members=True, search_s=0.0)
    with pytest.raises(ConnectionError, match=r"all 1 sessions are taken \(CAPACITY_REACHED\)"):
        second.reset(seed=0)
    first.close()
    second.close()
    third = OpenEnv(urls=[served.url], members=True)
    third.reset(seed=0)
    third.close()


def faults(served: list[Served], *, count: int) -> None:
    """Play with faults of each kind."""
    for one in served:
        one.server.lost_answers = one.server.lost_sessions = 0.01

    def restart() -> None:
        served[0].kill()
        threading.Timer(1.0, served[0].start).start()

    played = remote(*served, count=count, timeout_s=2.0, on_turn=AtTurn(count * 2, restart))
    assert_equal(played, local(count=count))
    taken = sum(one.count("steps") for one in served)
    # steps that were taken in sessions that were lost before the answer
    unseen = taken - steps_of(played) - replayed(played)
    assert 0 <= unseen <= sum(server.lost for one in served for server in one.servers)
    assert replayed(played) > 0


def test_no_step_is_lost_or_taken_twice_under_faults(serve: Any) -> None:
    faults([serve(), serve()], count=32)


@pytest.mark.slow
@pytest.mark.soak
def test_no_step_is_lost_or_taken_twice_under_faults_and_load(serve: Any) -> None:
    faults([serve(sessions=256, idle_s=5.0), serve(sessions=256, idle_s=5.0)], count=256)
