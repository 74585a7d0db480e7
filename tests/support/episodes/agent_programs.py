"""Agent programs that a scripted policy answers, and checks of what was recorded of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from support.models.family_models import tiny

from ragen_pl.data.collate import collate
from ragen_pl.engines.protocol import Generation, GenerationRequest
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.trajectory import EpisodeStatus, Trajectory

AGENTS = Path(__file__).parents[3] / "examples" / "agents"
TASKS = [json.loads(line) for line in (AGENTS / "tasks.jsonl").read_text().splitlines()]
PROGRAM = "ragen_pl.agent_programs.environment.ProgramEnvironment"
# text of a prompt, and how many responses the session had before
Write = Callable[[str, int], str]


class ScriptedEngine:
    """Engine whose responses are written by `write(prompt, turn)`.

    Attributes:
        sampled: ids of the responses in order.
        prompts: texts of the prompts in order.
    """

    continuous = False

    def __init__(self, context: ContextManager, write: Write) -> None:
        self.context, self.write = context, write
        self.turns: dict[int, int] = {}
        self.sampled: list[np.ndarray] = []
        self.prompts: list[str] = []
        self._pending: list[tuple[int, Generation]] = []

    def submit(self, requests: Sequence[GenerationRequest], *, keep: bool) -> None:
        self._pending += [(request.session, self._respond(request)) for request in requests]

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        finished, self._pending = self._pending, []
        return finished

    def _respond(self, request: GenerationRequest) -> Generation:
        turn = self.turns.get(request.session, 0)
        self.turns[request.session] = turn + 1
        prompt = str(self.context.bundle.tokenizer.decode(request.prompt.ids))
        ids = self.context.encode_response(self.write(prompt, turn))
        self.prompts.append(prompt)
        self.sampled.append(ids)
        logprobs = -np.linspace(0.1, 0.9, len(ids), dtype=np.float32)
        return Generation(
            ids=ids, logprobs=logprobs, entropy=0.5, hit_length_limit=False, version=0
        )

    def load_weights(self, version: int) -> None:
        """Nothing to do."""

    def release(self) -> None:
        self.turns.clear()

    def close(self) -> None:
        """Nothing to do."""


@functools.cache
def bundle_of(family: str) -> ModelBundle:
    """Return a tiny model with a family's own chat template, which may call tools."""
    bundle = tiny(family)
    bundle.calls_tools = True
    return bundle


def calls(*named: tuple[str, Mapping[str, Any]]) -> str:
    """Return a response of tool calls as Qwen writes them."""
    written = [json.dumps({"name": name, "arguments": dict(values)}) for name, values in named]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def play_program(
    write: Write,
    *,
    task: Any = None,
    family: str = "qwen2_5",
    seed: int = 7,
    max_tokens: int = 16_384,
    **kwargs: Any,
) -> tuple[Trajectory, ScriptedEngine]:
    """Play an episode of a program; return it with the engine that answered.

    Args:
        write: Writes the responses.
        task: The task.
        family: Family whose chat template is used.
        seed: The episode's seed.
        max_tokens: Longest prompt plus response.
        **kwargs: Arguments of the environment.
    """
    context = ContextManager(
        bundle_of(family), window="all", system_prompt=None, max_tokens=max_tokens
    )
    environments = EnvironmentManager(
        target=PROGRAM,
        kwargs={"program_s": 600.0, **kwargs},
        prompt_format="native",
        invalid_ends=False,
        timeout_s=None,
    )
    proxy = AgentProxy(environments=environments, context=context, max_response_tokens=256)
    engine = ScriptedEngine(context, write)
    spec = EpisodeSpec(group=0, member=0, seed=seed, options={"task": task})
    (trajectory,) = proxy.rollout(
        EngineResponder(engine=engine, context=context), [spec], seed_key=(0, "test")
    )
    return trajectory, engine


def check_record(
    trajectory: Trajectory, engine: ScriptedEngine, *, samples: int, stopped: bool = False
) -> None:
    """Check that an episode ended, that its ids are those of the engine, and that each is trained once.

    Args:
        trajectory: The episode.
        engine: The engine that answered.
        samples: Number of samples that it is.
        stopped: Whether its responses end at a stop string, before their ends.
    """
    assert trajectory.error is None
    assert trajectory.status is EpisodeStatus.TERMINATED
    recorded = [turn.response_ids.tolist() for turn in trajectory.turns]
    sampled = [ids.tolist() for ids in engine.sampled]
    if stopped:
        pairs = zip(recorded, sampled, strict=True)
        sampled = [ids[: len(kept)] for kept, ids in pairs if len(kept) == len(ids) - 1]
    assert recorded == sampled
    bundle = engine.context.bundle
    assert [bundle.tokenizer.decode(turn.prompt_ids) for turn in trajectory.turns] == engine.prompts
    rows = collate([trajectory], bundle).samples
    assert len(rows) == samples
    order = rows.token[rows.loss_mask].argsort()
    assert rows.input_ids[rows.loss_mask][order].tolist() == list(chain.from_iterable(recorded))
    joined = [turn.kind.history for turn in trajectory.turns]
    assert joined.count("joined") == len(joined) - samples
