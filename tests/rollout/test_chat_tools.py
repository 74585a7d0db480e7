"""Models behind an API that call tools: in environments with tools, and in agent programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from support.servers.chat_server import KEY, ChatServer, serving
from support.servers.program_client import CLIENT

import envs  # noqa: F401 - registers the environments
from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.rollout.endpoint import ChatEndpoint, EndpointResponder
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.trajectory import EpisodeStatus, Trajectory


def calls(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {
        "content": None,
        "tool_calls": [
            {"id": f"x{n}", "type": "function", "function": {"name": name, "arguments": text}}
            for n, (name, text) in enumerate(pairs)
        ],
    }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving() as server:
        server.text = ""
        yield server


def played(server: ChatServer, target: str, **settings: Any) -> Trajectory:
    environments = EnvironmentManager(
        target=target, prompt_format=PromptFormat.NATIVE, invalid_ends=False, **settings
    )
    with closing(ChatEndpoint(model="caller", base_url=server.url, max_retries=0)) as endpoint:
        proxy = AgentProxy(
            environments=environments, context=endpoint.context, max_response_tokens=10_000
        )
        responder = EndpointResponder(endpoint=endpoint, greedy=True)
        (trajectory,) = proxy.rollout(
            responder, [EpisodeSpec(group=0, member=0, seed=0)], seed_key=(0, "test")
        )
    return trajectory


def answering(server: ChatServer, *messages: dict[str, Any]) -> None:
    """Answer the next requests with these messages, the last one for all that follow."""
    left = [*messages]

    def breaks(request: dict[str, Any]) -> None:
        server.message = left.pop(0) if len(left) > 1 else left[0]

    server.breaks = breaks


def test_an_environments_tools_are_called(server):
    answering(server, calls(("price", '{"article": "tea"}')), calls(("answer", '{"coins": 3}')))
    episode = played(server, "support.episodes.shop.Shop", max_actions_per_turn=2)
    assert episode.status is EpisodeStatus.TERMINATED and episode.success
    first, second = server.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["answer", "price"]
    assert [message["role"] for message in second["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    (call,) = second["messages"][2]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"article": "tea"}
    assert second["messages"][3] == {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": "3 coins",
    }
    assert episode.turns[0].actions == ['{"name": "price", "arguments": {"article": "tea"}}']


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"'])
def test_calls_that_are_not_well_formed_cost_the_format_penalty(server, arguments):
    answering(server, calls(("price", arguments)), calls(("answer", '{"coins": 3}')))
    episode = played(server, "support.episodes.shop.Shop")
    assert [turn.action_is_valid for turn in episode.turns] == [False, True]
    assert episode.turns[0].reward_terms == {"format": -0.05}
    assert server.requests[1]["messages"][-1]["content"].startswith("error: ")


PROGRAM = """
schema = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": "tea?"}]
message = ask(messages, tools=[schema])["choices"][0]["message"]
(call,) = message["tool_calls"]
messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "3 coins"}]
report(reward=len(said(ask(messages, tools=[schema]))), success=True)
"""


def test_a_program_is_played_by_a_model_behind_an_api(server, tmp_path):
    (tmp_path / "chat.py").write_text(CLIENT)
    (tmp_path / "program.py").write_text("from chat import *\n" + PROGRAM)
    answering(server, calls(("price", '{"article": "tea"}')), {"content": "3"})
    episode = played(
        server,
        "ragen_pl.agent_programs.environment.ProgramEnvironment",
        kwargs={"command": [sys.executable, "-S", str(tmp_path / "program.py")]},
        timeout_s=None,
        workers=2,
    )
    assert episode.status is EpisodeStatus.TERMINATED, episode.error
    assert episode.success and episode.reward == 1.0
    second = server.requests[1]
    assert second["messages"][-1]["content"] == "3 coins"
    assert second["messages"][1]["tool_calls"][0]["function"]["name"] == "price"
    assert second["tools"][0]["function"]["name"] == "price"
