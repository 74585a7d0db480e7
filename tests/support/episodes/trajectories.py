"""Turns, trajectories and rollouts, with defaults for what a test is not about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ragen_pl.base.seeding import derive_seed
from ragen_pl.engines.protocol import GenerationRequest, Prompt, RolloutEngine
from ragen_pl.environments.manager import EpisodeSpec
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.truncation import Truncation
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.trajectory import EpisodeStatus, Observation, Span, Trajectory, Turn


def make_turn(*, tokens: int = 3, thinks: int = 0, reward: float = 0.0, **fields: Any) -> Turn:
    """Return a turn without text, prompt or image, with a valid response.

    Args:
        tokens: number of sampled tokens, where `response_ids` is not among the fields.
        thinks: number of these in the reasoning block; the others are the action's.
        reward: the environment's reward, where `reward_terms` is not among the fields.
        fields: other fields of `Turn`.
    """
    ids = fields.pop("response_ids", np.arange(tokens))
    spans = np.full(len(ids), Span.ACTION, np.int8)
    spans[:thinks] = Span.THINK
    defaults: dict[str, Any] = {
        "observation": Observation(text=""),
        "prompt_ids": np.arange(3),
        "prompt_images": [],
        "response_logprobs": np.zeros(len(ids), np.float32),
        "response_entropy": 1.0,
        "spans": spans,
        "response_text": "",
        "think": None,
        "actions": [],
        "action_is_valid": True,
        "action_is_effective": True,
        "hit_length_limit": False,
        "temperature": 1.0,
        "reward_terms": {"environment": reward},
    }
    return Turn(response_ids=ids, **(defaults | fields))


def make_trajectory(*turns: Turn, **fields: Any) -> Trajectory:
    """Return the first trajectory of a group, one that ended without success."""
    defaults: dict[str, Any] = {
        "group": 0,
        "member": 0,
        "seed": 0,
        "status": EpisodeStatus.TERMINATED,
        "success": False,
    }
    return Trajectory(turns=list(turns), **(defaults | fields))


def in_context(
    bundle: ModelBundle,
    turns: Sequence[Turn],
    *,
    window: int | str,
    system_prompt: str | None = None,
    final: Observation | None = None,
    **fields: Any,
) -> Trajectory:
    """Return a trajectory of turns whose prompts are those of a context; `final` is seen after the last turn."""
    context = ContextManager(bundle, window=window, system_prompt=system_prompt)
    conversation = context.start("")
    for turn in turns:
        prompt = context.observe(conversation, turn.observation, max_turns=9)
        turn.prompt_ids, turn.prompt_images = prompt.ids, prompt.images
        ids = turn.response_ids
        conversation.respond(ids=ids, text="".join(context.pieces(ids)), actions=[])
    if final is not None:
        prompt = context.observe(conversation, final, max_turns=9)
        fields |= {"final_prompt_ids": prompt.ids, "final_images": prompt.images}
    head = len(conversation.system_prompt_ids)
    return make_trajectory(*turns, **({"system_prompt_length": head} | fields))


def starts(groups: int, members: int = 1, *, first: int = 0) -> list[EpisodeSpec]:
    """Return the starts of whole groups; a group's seed is its number."""
    numbers = range(first, first + groups)
    return [EpisodeSpec(group=g, member=m, seed=g) for g in numbers for m in range(members)]


def make_request(
    prompt: Prompt,
    *,
    session: int = 0,
    tokens: int = 12,
    temperature: float = 1.0,
    seed: int = 0,
    truncation: Truncation | None = None,
) -> GenerationRequest:
    """Return a request for at most so many tokens."""
    return GenerationRequest(
        session=session,
        prompt=prompt,
        max_tokens=tokens,
        temperature=temperature,
        seed=derive_seed("test", seed),
        truncation=truncation,
    )


def roll_out(
    proxy: AgentProxy,
    engine: RolloutEngine,
    specs: Sequence[EpisodeSpec],
    *,
    seed_key: tuple[int | str, ...] = (0,),
    greedy: bool = False,
) -> list[Trajectory]:
    """Return episodes whose responses an engine samples."""
    responder = EngineResponder(engine=engine, context=proxy.context, greedy=greedy)
    return proxy.rollout(responder, specs, seed_key=seed_key)


def responses(trajectories: Iterable[Trajectory]) -> list[list[int]]:
    """Return the sampled ids of all turns, in order."""
    return [turn.response_ids.tolist() for one in trajectories for turn in one.turns]
