"""Environments on other machines: play there is equal to local play, whatever happens to sessions and servers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket as sockets
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from endpoint_clients import until
from module_process import start_module

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401
from envs.adapters.openenv import OpenEnv
from envs.policies import RandomPolicy
from ragen_pl.environments.answers import AnswerReader
from ragen_pl.environments.hosted import HostedEnvironment
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.environments.process import environment_maker
from ragen_pl.environments.serving import EnvironmentServer, ServerSettings
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.trajectory import EpisodeStatus

LAKE = "envs:ragen/FrozenLake-v0"
SLIPPERY = {"slip_probability": 0.3}


class FaultyServer(EnvironmentServer):
    """Loses each answer to a step with a chance, and the session of each step with another one.

    Without `loses_in_a_row` the answer to a repeated step comes.
    """

    lost_answers = lost_sessions = 0.0
    loses_in_a_row = True
    lost = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.luck = random.Random(7)
        # sessions whose last answer was lost
        self.silent: set[Any] = set()

    async def say(self, session: Any, message: dict[str, Any]) -> None:
        is_step = message["data"].get("metadata", {}).get("step", 0) > 0
        if is_step and self.luck.random() < self.lost_sessions:
            self.lost += 1
            session.socket._req.transport.abort()
        elif (
            is_step
            and (self.loses_in_a_row or session not in self.silent)
            and self.luck.random() < self.lost_answers
        ):
            self.lost += 1
            self.silent.add(session)
        else:
            self.silent.discard(session)
            await super().say(session, message)


class Served:
    """A server in a thread of this process, that can be killed and started again at the same port."""

    def __init__(
        self,
        *,
        target: str = LAKE,
        kwargs: dict[str, Any] | None = None,
        key: str | None = None,
        **limits: Any,
    ) -> None:
        with sockets.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = ServerSettings(port=self.port, **({"sessions": 64} | limits))
        make = partial(environment_maker(target), **(SLIPPERY if kwargs is None else kwargs))
        self._new = partial(
            FaultyServer,
            make,
            name="test",
            target=target,
            timeout_s=20.0,
            settings=settings,
            key=key,
        )
        self.servers: list[FaultyServer] = []
        self.start()

    @property
    def server(self) -> FaultyServer:
        return self.servers[-1]

    def count(self, name: str) -> int:
        return sum(server.counts[name] for server in self.servers)

    def start(self) -> None:
        if self.servers:
            before = self.server
            self.servers.append(self._new())
            self.server.lost_answers = before.lost_answers
            self.server.lost_sessions = before.lost_sessions
        else:
            self.servers.append(self._new())
        self.server.prepare()
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(60)

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._end = asyncio.Event()
            self._runner = web.AppRunner(self.server.app(), access_log=None, shutdown_timeout=1.0)
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
            ready.set()
            await self._end.wait()
            await self._runner.cleanup()

        self._loop.run_until_complete(serve())
        self._loop.close()

    def kill(self) -> None:
        """End all connections at once, as a killed process does, and lose the environments."""

        def end() -> None:
            for site in list(self._runner.sites):
                site._server.close()
            for session in list(self.server.open_sessions):
                if (transport := session.socket._req.transport) is not None:
                    transport.abort()
            self._end.set()

        self._loop.call_soon_threadsafe(end)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(30)

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
            return json.load(answer)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("RAGEN_PL_ENVIRONMENT_KEY", raising=False)
    started: list[Served] = []

    def start(**settings: Any) -> Served:
        started.append(Served(**settings))
        return started[-1]

    yield start
    for one in started:
        one.close()


def rollout(
    *,
    target: str = LAKE,
    kwargs: dict[str, Any],
    count: int = 16,
    on_turn: Any = None,
    **settings: Any,
) -> list[Any]:
    """Play episodes at random."""
    manager = EnvironmentManager(
        target=target, kwargs=kwargs, max_turns=20, workers=8, record_states=True, **settings
    )
    proxy = AgentProxy(environments=manager, context=TextContext(), max_response_tokens=10_000)
    specs = [EpisodeSpec(group=n // 2, member=n % 2, seed=n // 2) for n in range(count)]
    played = proxy.rollout(
        ScriptedResponder(policy=RandomPolicy()), specs, seed_key=(0, "test"), on_turn=on_turn
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
def test_no_step_is_lost_or_taken_twice_under_faults_and_load(serve: Any) -> None:
    faults([serve(sessions=256, idle_s=5.0), serve(sessions=256, idle_s=5.0)], count=256)


def test_another_answer_ends_replays(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    first, second = serve(), serve(kwargs={"slip_probability": 0.0, "size": 5})
    env = OpenEnv(urls=[first.url, second.url], members=True)
    env.reset(seed=0)
    env.step(0)
    next(one for one in (first, second) if one.health()["open"]).kill()
    with pytest.raises(ConnectionError, match="answered differently after 0 of the same actions"):
        env.step(1)
    assert caplog.text.count("are not replayed any more") == 1
    assert not env.replays and OpenEnv(urls=[first.url]).replays
    env.close()


def test_a_key_is_asked_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(key="secret")
    assert served.health()["open"] == 0
    for key in (None, "another"):
        if key is not None:
            monkeypatch.setenv("RAGEN_PL_ENVIRONMENT_KEY", key)
        with pytest.raises(RuntimeError, match="it wants a key; set RAGEN_PL_ENVIRONMENT_KEY"):
            OpenEnv(urls=[served.url], members=True, search_s=0.0)
        with pytest.raises(RuntimeError, match="it wants a key"):
            OpenEnv(urls=[served.url], search_s=0.0).reset(seed=0)
    monkeypatch.setenv("RAGEN_PL_ENVIRONMENT_KEY", "secret")
    env = OpenEnv(urls=[served.url], members=True)
    env.reset(seed=0)
    env.close()


async def _talk(url: str, *messages: Any) -> list[Any]:
    """Return the answers to messages, as a client without step numbers gets them."""
    answers = []
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as socket:
        for message in messages:
            text = message if isinstance(message, str) else json.dumps(message)
            await socket.send_str(text)
            answer = await socket.receive()
            answers.append(
                answer.json() if answer.type is aiohttp.WSMsgType.TEXT else answer.type.name
            )
    return answers


def step(text: object, **metadata: Any) -> dict[str, Any]:
    return {
        "type": "step",
        "data": {"message": text} | ({"metadata": metadata} if metadata else {}),
    }


def test_clients_of_openenv_are_served(serve: Any) -> None:
    served = serve()
    reset = {"type": "reset", "data": {"seed": 3, "episode_id": "mine"}}
    begun, moved, refused, state, unknown, broken, closed = asyncio.run(
        _talk(
            served.url, reset, step("down"), step("jump"), {"type": "state"}, {"type": "mcp"}, "[", {"type": "close"}
        )
    )  # fmt: skip
    assert begun["type"] == moved["type"] == "observation"
    assert set(begun["data"]["observation"]) == {"text"} and not begun["data"]["done"]
    assert begun["data"]["metadata"]["members"]["action_names"][0] == "Up"
    assert moved["data"]["reward"] == 0.0 and moved["data"]["metadata"]["action_is_valid"]
    assert (
        refused["data"]["code"] == "VALIDATION_ERROR" and "one of Up" in refused["data"]["message"]
    )
    assert state == {"type": "state", "data": {"episode_id": "mine", "step_count": 2}}
    assert [unknown["data"]["code"], broken["data"]["code"]] == ["UNKNOWN_TYPE", "INVALID_JSON"]
    assert closed in ("CLOSE", "CLOSED", "CLOSING")


def test_steps_are_taken_in_their_order_only(serve: Any) -> None:
    served = serve(kwargs={})
    reset = {"type": "reset", "data": {"seed": 3}}
    _, first, again, skipped, second = asyncio.run(
        _talk(
            served.url, reset, step("Down", step=1), step("Down", step=1), step("Down", step=3),
            step("Right", step=2),
        )
    )  # fmt: skip
    assert first == again and first["data"]["metadata"]["step"] == 1
    assert skipped["data"]["code"] == "SESSION_ERROR" and second["data"]["metadata"]["step"] == 2
    assert served.count("steps") == 2 and served.count("repeated_steps") == 1


def test_long_messages_end_the_session(serve: Any) -> None:
    served = serve(message_mib=1)
    (answer,) = asyncio.run(_talk(served.url, step("x" * 2**21)))
    assert answer in ("CLOSE", "CLOSED", "CLOSING")


def test_errors_of_an_environment_end_its_episode_or_its_session() -> None:
    import gymnasium
    from gymnasium import spaces

    class Breaks(gymnasium.Env):
        action_space, observation_space = spaces.Text(20), spaces.Text(20)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "go", {}

        def step(self, action):
            if action == "bug":
                raise KeyError("door")
            if action == "gone":
                raise ConnectionResetError("simulator")
            if action == "hang":
                time.sleep(60.0)
            return "went", 0.0, False, False, {}

    hosted = HostedEnvironment(Breaks, target="Breaks", timeout_s=60.0)
    reset = {"type": "reset", "data": {"seed": 0}}
    assert hosted.answer(step("x"))["data"]["code"] == "SESSION_ERROR"
    hosted.answer(reset)
    assert hosted.answer(step("x"))["data"]["observation"] == {"text": "went"}
    assert hosted.answer(step("x" * 21))["data"]["code"] == "VALIDATION_ERROR"
    answer = hosted.answer(step("bug"))
    assert answer["data"] == {"message": "KeyError: 'door'", "code": "EXECUTION_ERROR"}
    assert not hosted.is_usable
    for text, timeout_s, message in (
        ("gone", 60.0, "ConnectionResetError: simulator"),
        ("hang", 3.0, "longer than 3 s"),
    ):
        other = HostedEnvironment(Breaks, target="Breaks", timeout_s=timeout_s)
        other.answer(reset)
        with pytest.raises(ConnectionError, match=message):
            other.answer(step(text))
        assert not other.is_usable


@pytest.mark.slow
def test_the_command_serves_until_it_is_ended(tmp_path: Path) -> None:
    with sockets.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start_module(
        "ragen_pl.serve_environment", ["env=frozenlake", f"server.port={port}"], folder=tmp_path,
        output=tmp_path / "output.txt",
    )  # fmt: skip
    try:
        env = OpenEnv(urls=[f"http://127.0.0.1:{port}"], members=True, search_s=120.0)
        same = environment_maker(LAKE)().unwrapped
        assert env.reset(seed=5)[0] == same.reset(seed=5)[0]
        assert env.step(1)[:4] == same.step(1)[:4]
        assert env.state_key() == same.state_key() and env.instructions == same.instructions
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        assert process.exitcode == 0, (tmp_path / "output.txt").read_text()
        env.close()
    finally:
        process.kill()
    assert f"frozenlake at http://127.0.0.1:{port} for 64" in (tmp_path / "output.txt").read_text()
