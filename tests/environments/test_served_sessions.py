"""Sessions on a server of environments: other answers, keys, messages, and errors of an environment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket as sockets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.runs.module_process import start_module
from support.servers.faulty_servers import LAKE

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401
from envs.adapters.openenv import OpenEnv
from ragen_pl.environments.classes import environment_maker
from ragen_pl.environments.hosted import HostedEnvironment


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
            # a session that has ended closes the connection at any moment of a long message
            with suppress(ConnectionError):
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


def test_games_of_two_seats_are_refused(serve: Any) -> None:
    """A client has one seat, and would move for both."""
    served = serve(target="envs.tic_tac_toe.TicTacToe", kwargs={})
    env = OpenEnv(urls=[served.url], members=True)
    with pytest.raises(RuntimeError, match=r"seats=2, .* env\.kwargs\.opponent=random"):
        env.reset(seed=0)
    env.close()


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
