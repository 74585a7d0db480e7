"""Agents of examples/agents that need no SDK."""

from __future__ import annotations

import shutil

import pytest
from agent_programs import AGENTS, check_record, play_program


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_shell_script_with_curl_is_an_agent():
    trajectory, engine = play_program(
        lambda prompt, turn: ("tea", "milk")[turn], command=[str(AGENTS / "shell_agent.sh")]
    )
    check_record(trajectory, engine, samples=1)
    assert trajectory.success
