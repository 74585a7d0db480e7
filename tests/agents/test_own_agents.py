"""Agents that need no SDK."""

from __future__ import annotations

import shutil
import sys

import pytest
from support.episodes.agent_programs import AGENTS, check_record, play_program

from ragen_pl.agent_programs.environment import ProgramEnvironment


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_shell_script_with_curl_is_an_agent():
    trajectory, engine = play_program(
        lambda prompt, turn: ("tea", "milk")[turn], command=[str(AGENTS / "shell_agent.sh")]
    )
    check_record(trajectory, engine, samples=1)
    assert trajectory.success


def test_a_command_keeps_the_interpreter_of_its_virtual_environment(tmp_path, monkeypatch):
    """It is a link, and knows its packages by its own path."""
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "agent.py").touch()
    monkeypatch.chdir(tmp_path)
    environment = ProgramEnvironment(command=["./python", "agent.py", "--fast"])
    found = [str(tmp_path / "python"), str(tmp_path / "agent.py"), "--fast"]
    assert environment.command == found
