"""Programs of SDKs that know nothing of the trainer: tools, pictures, streams, structured answers, requests at once."""

from __future__ import annotations

import sys

import pytest
from support.episodes.agent_cases import CASES
from support.episodes.agent_programs import AGENTS, check_record, play_program

pytestmark = pytest.mark.agents


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_recorded_exactly(name):
    case = CASES[name]
    trajectory, engine = case.play()
    check_record(trajectory, engine, samples=case.samples, stopped=case.stopped)
    assert trajectory.success
    assert trajectory.reward == 1.0
    assert len(trajectory.turns) == len(case.says)
    assert len(trajectory.turns[-1].prompt_images) == case.images
    if name.endswith("_tools"):
        first = trajectory.turns[0]
        assert first.think == "I look it up."
        assert len(first.actions) == 2


def test_eight_requests_at_once():
    def write(prompt: str, turn: int) -> str:
        return "odd" if " 3:" in prompt else "even"

    command = [sys.executable, str(AGENTS / "concurrent_agent.py")]
    trajectory, engine = play_program(write, seed=4, command=command)
    check_record(trajectory, engine, samples=8)
    wrong = [" 3:" in prompt for prompt in engine.prompts]
    assert [turn.reward for turn in trajectory.turns] == [0.0 if one else 0.125 for one in wrong]
    assert sum(wrong) == 1
    assert not trajectory.success
