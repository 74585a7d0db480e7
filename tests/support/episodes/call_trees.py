"""Episodes made by hand: calls whose prompts go on from others, fork, are rewritten, or are not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragen_pl.trajectory import EpisodeStatus, Observation, ProgramCall, Trajectory, Turn


def call(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    reward: float = 0.0,
    is_task_step: bool = True,
    trained: bool = True,
) -> Turn:
    """A turn with these ids."""
    ids = np.array(response, dtype=np.int64)
    return Turn(
        observation=Observation(text=""), prompt_ids=np.array(prompt, dtype=np.int64), prompt_images=[],
        response_ids=ids, response_logprobs=-ids.astype(np.float32) / 100, response_entropy=1.0,
        spans=np.ones(len(ids), np.int8), response_text="", think=None, actions=[], action_is_valid=True,
        action_is_effective=True, hit_length_limit=False, temperature=1.0,
        reward_terms={"environment": reward}, kind=ProgramCall(is_task_step=is_task_step, trained=trained),
    )  # fmt: skip


def after(turn: Turn, *text: int) -> list[int]:
    """The prompt that goes on after a turn with some text."""
    return [*turn.prompt_ids.tolist(), *turn.response_ids.tolist(), *text]


def episode(*turns: Turn, group: int = 0, member: int = 0) -> Trajectory:
    """A finished episode of these turns."""
    return Trajectory(
        group=group, member=member, seed=0, turns=list(turns), status=EpisodeStatus.TERMINATED, success=False
    )  # fmt: skip
