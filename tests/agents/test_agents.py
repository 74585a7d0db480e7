"""The agents of examples/agents, each a program of its SDK that knows nothing of the trainer."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from agent_programs import AGENTS, TASKS, calls, check_record, play_program
from PIL import Image

pytestmark = pytest.mark.agents
TASK = TASKS[0]
PRICE_AND_STOCK = calls(("price", {"item": "tea"}), ("stock", {"item": "tea"}))


def command(name: str) -> list[str]:
    return [sys.executable, str(AGENTS / name)]


def shopping(prompt: str, turn: int) -> str:
    """Look both numbers up in one response, then tell the product."""
    return "All of it is worth 12 coins" if turn else PRICE_AND_STOCK


@pytest.mark.parametrize(
    "name",
    ["openai_agent", "langgraph_agent", "openai_agents_agent", "pydantic_ai_agent"],
)
def test_two_calls_of_one_response_and_words_are_one_sample(name):
    trajectory, engine = play_program(shopping, task=TASK, command=command(f"{name}.py"))
    check_record(trajectory, engine, samples=1)
    assert trajectory.success
    assert sum(turn.reward for turn in trajectory.turns) == 1.0
    first, second = trajectory.turns
    assert [len(first.actions), len(second.actions)] == [2, 0]
    assert "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n" in engine.prompts[1]


def test_smolagents_rewrites_its_history_and_is_a_sample_a_turn():
    def write(prompt: str, turn: int) -> str:
        return calls(("final_answer", {"answer": "12"})) if turn else PRICE_AND_STOCK

    trajectory, engine = play_program(write, task=TASK, command=command("smolagents_agent.py"))
    check_record(trajectory, engine, samples=2)
    assert trajectory.success
    assert "joined" not in {turn.history for turn in trajectory.turns}


def picture(seed: int) -> str:
    """Return a PNG file as base64."""
    pixels = np.random.default_rng(seed).integers(0, 255, (56, 84, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("sdk", "pictures", "samples"),
    [
        ("openai", 2, 1),
        ("langgraph", 2, 1),
        ("pydantic_ai", 2, 1),
        ("openai_agents", 1, 1),
        ("smolagents", 2, 2),
    ],
)
def test_pictures_and_streams(sdk, pictures, samples):
    """smolagents shows the picture of the question again in each step, and the others keep it."""

    def write(prompt: str, turn: int) -> str:
        if not turn:
            return calls(("look", {"place": "left"}))
        return calls(("final_answer", {"answer": "a cat"})) if sdk == "smolagents" else "a cat"

    trajectory, engine = play_program(
        write,
        family="qwen3_vl",
        task={"pictures": [picture(0), picture(1)]},
        command=[sys.executable, str(Path(__file__).parent / "programs" / "pictures.py"), sdk],
    )
    check_record(trajectory, engine, samples=samples)
    assert trajectory.success
    assert len(trajectory.turns) == 2
    assert len(trajectory.turns[-1].prompt_images) == pictures


def test_eight_requests_at_once():
    def write(prompt: str, turn: int) -> str:
        return "odd" if " 3:" in prompt else "even"

    trajectory, engine = play_program(write, seed=4, command=command("concurrent_agent.py"))
    check_record(trajectory, engine, samples=8)
    rewards = [turn.reward for turn in trajectory.turns]
    wrong = [" 3:" in prompt for prompt in engine.prompts]
    assert rewards == [0.0 if each else 0.125 for each in wrong]
    assert sum(wrong) == 1
    assert not trajectory.success
