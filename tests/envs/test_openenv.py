"""The client of OpenEnv servers, against a small server that speaks their messages."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import WSMsgType, web
from support.episodes.hostile import hostile_answers

from envs.adapters import openenv_session
from envs.adapters.openenv import OpenEnv


class GuessServer:
    """A number from 0 to 9 is guessed in `message`; each connection has a game of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.port = 0
        self.received: list[dict] = []
        # answers of the client to pings that were sent while it asked for nothing
        self.pongs = threading.Event()
        # episodes whose environment the server has given up, as OpenEnv does after a long pause: the socket stays
        self.given_up: set[int] = set()
        self.episodes = 0
        # sockets that are still to be closed after the guess `last`
        self.goodbyes = 0
        ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)

    def _run(self, ready: threading.Event) -> None:
        async def start() -> web.AppRunner:
            app = web.Application()
            app.router.add_get("/ws", self._serve)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            return runner

        runner = self.loop.run_until_complete(start())
        ready.set()
        self.loop.run_forever()
        self.loop.run_until_complete(runner.cleanup())
        self.loop.close()

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        # pings and pongs are messages here
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        number = episode = pongs = 0
        async for message in socket:
            if message.type is WSMsgType.PONG:
                pongs += 1
                if pongs < 3:
                    await socket.ping()
                else:
                    self.pongs.set()
                continue
            if message.type is not WSMsgType.TEXT:
                break
            asked = json.loads(message.data)
            self.received.append(asked)
            if asked["type"] == "reset":
                number = random.Random(asked["data"]["seed"]).randrange(10)
                self.episodes += 1
                episode = self.episodes
                if asked["data"].get("draws_anew"):
                    await socket.send_json(_observation(f"guess in episode {episode}"))
                    continue
                if "answer" in asked["data"]:
                    await socket.send_str(asked["data"]["answer"])
                    continue
                await socket.send_json(_observation("guess"))
                continue
            guess = asked["data"].get("message")
            if episode in self.given_up:
                await socket.send_json(_observation("of a closed environment", reward=1.0))
            elif guess == "crash":
                await socket.close()
            elif guess == "ping":
                await socket.send_json(_observation("pinging"))
                await socket.ping()
            elif guess == "last":
                await socket.send_json(_observation("goodbye"))
                if self.goodbyes:
                    self.goodbyes -= 1
                    await socket.close()
            elif guess == "bug":
                await socket.send_json(_error("it broke", "EXECUTION_ERROR"))
            elif guess == "wait":
                await asyncio.sleep(10.0)
            elif not isinstance(guess, str) or not guess.isdecimal() or len(guess) > 9:
                await socket.send_json(_error("message: expected a number", "VALIDATION_ERROR"))
            else:
                right = int(guess) == number
                hint = "right" if right else "higher" if int(guess) < number else "lower"
                await socket.send_json(_observation(hint, reward=float(right), done=right))
        return socket


def _observation(text: str, *, reward: float | None = None, done: bool = False) -> dict:
    data = {"observation": {"text": text}, "reward": reward, "done": done}
    if done:
        data["metadata"] = {"reward_parts": {"right": reward}}
    return {"type": "observation", "data": data}


def _error(message: str, code: str) -> dict:
    return {"type": "error", "data": {"message": message, "code": code}}


@pytest.fixture(scope="module")
def server() -> Iterator[GuessServer]:
    started = GuessServer()
    yield started
    started.close()


@pytest.fixture
def env(server: GuessServer) -> Iterator[OpenEnv]:
    made = OpenEnv(urls=[server.url], observation_field="text", reset={"level": 2}, timeout_s=60.0)
    yield made
    made.close()


def solve(env: OpenEnv, *, seed: int) -> list[object]:
    seen: list[object] = [env.reset(seed=seed)[0]]
    for guess in range(10):
        seen.append(env.step(str(guess)))
        if seen[-1][2]:
            return seen
    raise AssertionError("no guess was right")


def test_episode_is_played_on_the_server_and_seeds_repeat(
    env: OpenEnv, server: GuessServer
) -> None:
    lengths = set()
    for seed in range(8):
        played = solve(env, seed=seed)
        assert played == solve(env, seed=seed)
        assert played[0] == "guess"
        assert played[-1] == (
            "right", 1.0, True, False, {"success": True, "action_is_valid": True, "reward_parts": {"right": 1.0}}
        )  # fmt: skip
        lengths.add(len(played))
    assert len(lengths) > 2
    assert next(one for one in server.received if one["type"] == "reset")["data"]["level"] == 2
    with pytest.raises(RuntimeError, match="has ended"):
        env.step("1")


def test_refused_actions_are_invalid_and_the_episode_goes_on(env: OpenEnv) -> None:
    env.reset(seed=0)
    outcome = env.step("seven")
    assert outcome == (
        "error: message: expected a number", 0.0, False, False, {"success": False, "action_is_valid": False}
    )  # fmt: skip
    for text in hostile_answers(np.random.default_rng(0), 1000):
        _, reward, over, _, info = env.step(text)
        assert reward == 0 and not over and (not info["action_is_valid"] or text.isdecimal())


def test_whole_action_is_json(server: GuessServer) -> None:
    env = OpenEnv(urls=[server.url], action_field=None, timeout_s=60.0)
    assert env.reset(seed=0)[0] == '{"text": "guess"}'
    for text in ("[1]", "7", "{", "[" * 100_000, "9" * 5000):
        assert not env.step(text)[4]["action_is_valid"]
    assert env.step('{"message": "100"}')[0] == '{"text": "lower"}'
    env.close()
    env.close()


def test_errors_of_the_server_end_the_episode_only(env: OpenEnv) -> None:
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"it broke \(EXECUTION_ERROR\)"):
        env.step("bug")
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1"):
        env.step("crash")
    with pytest.raises(ConnectionError, match="has ended the session"):
        env.step("1")
    solve(env, seed=1)


def test_time_limit_and_a_server_that_is_not_there(server: GuessServer) -> None:
    slow = OpenEnv(urls=[server.url], timeout_s=3.0)
    slow.reset(seed=0)
    with pytest.raises(ConnectionError, match="TimeoutError"):
        slow.step("wait")
    slow.close()
    gone = OpenEnv(urls=["ws://127.0.0.1:9"], timeout_s=1.0, search_s=0.0)
    with pytest.raises(ConnectionError, match=r"ws://127\.0\.0\.1:9/ws"):
        gone.reset(seed=0)
    gone.close()
    with pytest.raises(ValueError, match="urls: found 'localhost', expected an address"):
        OpenEnv(urls=["localhost"])


def test_missing_field_is_named(server: GuessServer) -> None:
    env = OpenEnv(urls=[server.url], observation_field="board", timeout_s=60.0)
    with pytest.raises(RuntimeError, match=r"observation_field=board: found \['text'\]"):
        env.reset(seed=0)
    env.close()


def test_pings_are_answered_while_the_client_asks_for_nothing(
    env: OpenEnv, server: GuessServer
) -> None:
    env.reset(seed=0)
    env.step("ping")
    assert server.pongs.wait(60)


def sent(server: GuessServer, *, since: int) -> list[object]:
    """Return what the server has received: seeds of resets and guesses."""
    return [one["data"].get("message", one["data"].get("seed")) for one in server.received[since:]]


def test_an_episode_goes_on_in_a_new_session_where_the_server_has_ended_its_own(
    env: OpenEnv, server: GuessServer
) -> None:
    first = len(server.received)
    env.reset(seed=3)
    assert env.step("100")[0] == "lower"
    server.goodbyes = 1
    assert env.step("last")[0] == "goodbye"
    assert env.step("100")[:3] == ("lower", 0.0, False)
    asked = sent(server, since=first)
    assert asked == [asked[0], "100", "last", asked[0], "100", "last", "100"]
    # a socket that is closed between two episodes
    server.goodbyes = 1
    env.step("last")
    solve(env, seed=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay": False}, "the server has ended the session"),
        ({"reset": {"draws_anew": True}}, "answered differently after 0 of the same actions"),
    ],
)
def test_an_episode_that_cannot_be_played_again_fails(
    server: GuessServer, settings: dict, message: str
) -> None:
    env = OpenEnv(urls=[server.url], observation_field="text", timeout_s=60.0, **settings)
    env.reset(seed=0)
    server.goodbyes = 1
    env.step("last")
    with pytest.raises(ConnectionError, match=message):
        env.step("1")
    with pytest.raises(ConnectionError, match="has ended the session"):
        env.step("1")
    env.reset(seed=1)
    env.close()


def test_a_session_that_the_server_has_given_up_after_a_pause_pays_nothing(
    server: GuessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(openenv_session, "time", SimpleNamespace(monotonic=lambda: now))

    def play(idle_limit_s: float | None) -> tuple[str, float]:
        env = OpenEnv(
            urls=[server.url], observation_field="text", timeout_s=60.0, idle_limit_s=idle_limit_s
        )
        env.reset(seed=2)
        server.given_up.add(server.episodes)
        nonlocal now
        now += 590.0
        text, reward, *_ = env.step("100")
        env.close()
        return text, reward

    # without the limit nobody can tell
    assert play(None) == ("of a closed environment", 1.0)
    assert play(600.0) == ("lower", 0.0)
    assert play(900.0) == ("of a closed environment", 1.0)


def test_a_server_that_speaks_another_protocol_is_named(server: GuessServer) -> None:
    for answer, message in (("[1]", "expected a JSON object"), ("<html>", "JSONDecodeError")):
        env = OpenEnv(urls=[server.url], reset={"answer": answer}, timeout_s=60.0)
        with pytest.raises(ConnectionError, match=message):
            env.reset(seed=0)
        env.close()


def test_all_environments_share_a_thread(server: GuessServer) -> None:
    envs = [OpenEnv(urls=[server.url], timeout_s=60.0) for _ in range(16)]
    for env in envs:
        env.reset(seed=0)
    assert sum(thread.name == "openenv" for thread in threading.enumerate()) == 1
    for env in envs:
        env.close()
