"""`python -m ragen_pl.serve` as a command: the answers of the training endpoint, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.runs.composing import evaluation_config
from support.runs.module_process import start_module
from support.runs.small_runs import free_port
from support.servers.endpoint_clients import assembled
from support.servers.program_client import CLIENT

from ragen_pl.assembly.weights import load_bundle
from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.config.errors import ConfigError
from ragen_pl.deployment.checks import check_serve
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder

LIMIT_S = 120.0
KEY = "k" * 32
# asks three times, with the whole history each time
TALK = """
def talk(ask, stream):
    messages, said = [{"role": "system", "content": "be brief"}], []
    for text in ("hello", "and then?", "why?"):
        messages.append({"role": "user", "content": text})
        message = ask(messages)
        said.append(message["content"])
        messages.append({name: message[name] for name in ("role", "content")})
    return said
"""
PROGRAM = f"""{CLIENT}
{TALK}
said = talk(lambda messages: ask(messages, temperature=0.0)["choices"][0]["message"], False)
report(reward=1.0, info={{"said": said}})
"""
OVERRIDES = ("env=program", "env.command=[none]", "rollout.max_response_tokens=24")


@pytest.fixture(scope="module")
def folder(native_lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    native_lm.save(folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory) -> list[str]:
    """Answers of the training endpoint, with greedy responses."""
    file = tmp_path_factory.mktemp("program") / "program.py"
    file.write_text(PROGRAM)
    cfg = evaluation_config(f"ckpt={folder}", *OVERRIDES, "env.max_turns=5", command="serve")
    bundle = load_bundle(cfg)
    manager = EnvironmentManager(
        target="ragen_pl.agent_programs.environment.ProgramEnvironment",
        kwargs={"command": [sys.executable, "-S", str(file)]},
        prompt_format=PromptFormat.NATIVE,
        timeout_s=None,
    )
    context = ContextManager(bundle, window="all", system_prompt=None)
    proxy = AgentProxy(environments=manager, context=context, max_response_tokens=24)
    engine = TransformersEngine(PolicyModule(bundle))
    engine.load_weights(0)
    responder = EngineResponder(engine=engine, context=context, greedy=True)
    (trajectory,) = proxy.rollout(
        responder, [EpisodeSpec(group=0, member=0, seed=0)], seed_key=(0, "test")
    )
    assert trajectory.error is None
    assert [turn.kind.history for turn in trajectory.turns] == ["first", "joined", "joined"]
    return list(trajectory.turns[-1].info["program"]["said"])


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    """The command under way, its output and its address."""
    place = tmp_path_factory.mktemp("serve")
    output = place / "output.txt"
    process = start_module(
        "ragen_pl.serve",
        [f"ckpt={folder}", *OVERRIDES, "port=0", "keys=[SERVE_KEY]"],
        folder=place,
        output=output,
        environment={"SERVE_KEY": KEY},
    )
    end = time.monotonic() + LIMIT_S
    while not (lines := re.findall(r"^(?:curl|openai) .*$", printed(output), re.M))[1:]:
        assert process.is_alive() and time.monotonic() < end, printed(output)
        time.sleep(0.05)
    yield process, output, lines
    if process.is_alive():
        process.kill()
    process.join()


def printed(output: Path) -> str:
    return output.read_text(errors="replace") if output.exists() else ""


def asked(url: str, body: dict, *, key: str = KEY) -> subprocess.CompletedProcess:
    script = (
        "import sys, urllib.request\n"
        "url, key, body = sys.argv[1:]\n"
        "headers = {'Authorization': 'Bearer ' + key, 'Content-Type': 'application/json'}\n"
        "print(urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)).read().decode(), end='')"
    )
    arguments = [sys.executable, "-S", "-c", script, url, key, json.dumps(body)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S)


def test_answers_of_the_training_endpoint_in_a_fresh_process(served, trained):
    process, output, lines = served
    url = re.findall(r"http://\S+?/v1", lines[0])[0] + "/chat/completions"

    def whole(messages):
        body = {"messages": messages, "temperature": 0}
        return json.loads(asked(url, body).stdout)["choices"][0]["message"]

    def streamed(messages):
        body = {"messages": messages, "temperature": 0, "stream": True}
        return assembled(asked(url, body).stdout.split("\n\n")[:-1])["choices"][0]["message"]

    scope: dict = {}
    exec(TALK, scope)
    assert scope["talk"](whole, False) == trained
    assert scope["talk"](streamed, True) == trained
    assert len(set(trained)) > 1
    assert "401" in asked(url, {"messages": []}, key="wrong").stderr
    # the lines that it prints work, and do not have the key
    assert KEY not in printed(output)
    command = lines[0].removeprefix("curl").strip()
    done = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"SERVE_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert json.loads(done.stdout)["object"] == "chat.completion"
    python = shlex.split(lines[1].removeprefix("openai"))
    compile(python[-1], "openai", "exec")
    os.kill(process.pid, signal.SIGTERM)
    process.join(LIMIT_S)
    assert process.exitcode == 0, printed(output)
    assert "Traceback" not in printed(output)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["host=0.0.0.0"], "host=0.0.0.0: other machines"),
        (["keys=[NO_SUCH_KEY]"], "keys=[NO_SUCH_KEY]: no such"),
        (["keys=[SHORT_KEY]"], "a key of 5 characters"),
        (["host=192.0.2.1", "keys=[GOOD_KEY]"], "host=192.0.2.1 port="),
    ],
)
def test_address_and_keys_are_checked_first(overrides, named, folder, monkeypatch):
    monkeypatch.setenv("SHORT_KEY", "short")
    monkeypatch.setenv("GOOD_KEY", KEY)
    cfg = evaluation_config(f"ckpt={folder}", *OVERRIDES, *overrides, command="serve")
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_serve(cfg)


def test_taken_port(folder):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cfg = evaluation_config(f"ckpt={folder}", *OVERRIDES, f"port={port}", command="serve")
        with pytest.raises(ConfigError, match=f"port={port}: Address already in use"):
            check_serve(cfg)
    cfg = evaluation_config(f"ckpt={folder}", *OVERRIDES, f"port={free_port()}", command="serve")
    check_serve(cfg)


def test_weights_are_needed():
    cfg = evaluation_config(*OVERRIDES, command="serve")
    with pytest.raises(ConfigError, match="ckpt has no value"):
        check_serve(cfg)
