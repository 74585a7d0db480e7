"""Programs of SDKs with the responses that a scripted policy gives them."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from support.episodes.agent_programs import AGENTS, TASKS, ScriptedEngine, calls, play_program

from ragen_pl.trajectory import Trajectory

PROGRAMS = Path(__file__).parents[2] / "agents" / "programs"
REQUESTS = Path(__file__).parents[2] / "agents" / "requests"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program and its policy.

    Attributes:
        program: command line without the interpreter.
        says: responses of the policy in order.
        samples: number of samples that the episode is.
        family: family whose chat template is used.
        task: task of the program.
        images: number of images of the last prompt.
        stopped: whether its responses end at a stop string, before their ends.
        kwargs: further arguments of the environment.
    """

    program: Sequence[str]
    says: Sequence[str]
    samples: int = 1
    family: str = "qwen2_5"
    task: Any = None
    images: int = 0
    stopped: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    def play(self, command: Sequence[str] = (), **kwargs: Any) -> tuple[Trajectory, ScriptedEngine]:
        """Play an episode, with another command where one is given."""
        return play_program(
            lambda _, turn: self.says[turn],
            command=command or [sys.executable, *self.program],
            task=self.task,
            family=self.family,
            **self.kwargs,
            **kwargs,
        )


def _picture(color: str) -> str:
    """Return a PNG file as base64."""
    file = io.BytesIO()
    Image.new("RGB", (84, 56), color).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


SDKS = ("openai", "langgraph", "openai_agents", "pydantic_ai", "smolagents")
_THOUGHT = "<think>\nI look it up.\n</think>\n\n"
_LOOKED_UP = _THOUGHT + calls(("price", {"item": "tea"}), ("stock", {"item": "tea"}))
_WORDS = f"{_THOUGHT}All of it is worth 12 coins"
_OFFER = '{"item": "tea", "coins": 3}'
_CODE = "Thought: I look it up.\n<code>\nfinal_answer(price('tea'))\n</code>"


def _tools(sdk: str) -> Case:
    """Two calls of one response, with reasoning, which some of the SDKs send back."""
    rewrites = sdk == "smolagents"
    return Case(
        program=[str(AGENTS / f"{sdk}_agent.py")],
        says=[_LOOKED_UP, calls(("final_answer", {"answer": "12"})) if rewrites else _WORDS],
        samples=2 if rewrites else 1,
        family="qwen3",
        task=TASKS[0],
    )


def _pictures(sdk: str, api: str = "chat") -> Case:
    """A picture in the question, and one that a tool returns where the SDK can; all is streamed."""
    rewrites = sdk == "smolagents"
    return Case(
        program=[str(PROGRAMS / "pictures.py"), sdk, api],
        says=[
            calls(("look", {"place": "left"})),
            calls(("final_answer", {"answer": "a cat"})) if rewrites else "a cat",
        ],
        samples=2 if rewrites else 1,
        family="qwen3_vl",
        task={"pictures": [_picture("red"), _picture("green")]},
        # smolagents shows the picture of its question again with each step
        images=1 if sdk == "openai_agents" else 2,
    )


def _structured(sdk: str, api: str = "chat") -> Case:
    says = {
        "pydantic_ai": calls(("final_result", json.loads(_OFFER))),
        "smolagents": _CODE,
    }
    return Case(
        program=[str(PROGRAMS / "structured.py"), sdk, api],
        says=[says.get(sdk, _OFFER)],
        stopped=sdk == "smolagents",
        kwargs={"response_format": "unconstrained"},
    )


CASES = (
    {f"{sdk}_tools": _tools(sdk) for sdk in SDKS}
    | {f"{sdk}_pictures": _pictures(sdk) for sdk in SDKS}
    | {f"{sdk}_structured": _structured(sdk) for sdk in SDKS}
    # the default of these two
    | {
        f"{sdk}_responses_pictures": _pictures(sdk, "responses")
        for sdk in ("openai_agents", "pydantic_ai")
    }
    | {
        f"{sdk}_responses_structured": _structured(sdk, "responses")
        for sdk in ("openai", "openai_agents", "pydantic_ai")
    }
)
