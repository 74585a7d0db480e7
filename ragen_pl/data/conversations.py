"""Written conversations as a TrajectoryBatch, for a policy that learns from text instead of from play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.rollout.context import ContextManager
from ragen_pl.trajectory import EpisodeStatus, Observation, Span, Trajectory, Turn

Conversation = Sequence[Mapping[str, str]]
"""Messages with `role` (an optional `system` first, then `user` and `assistant` in turn) and `content`."""


def conversation_batch(
    conversations: Sequence[Conversation], context: ContextManager
) -> TrajectoryBatch:
    """Encode conversations as the policy would meet them; the assistant's responses are what is trained on.

    Args:
        conversations: what to learn.
        context: the chat format and how many turns are shown; with `system_prompt="instructions"` each
            conversation's own system message is used.

    Raises:
        ValueError: roles that do not take turns.
    """
    trajectories = [
        _trajectory(messages, context, number=number)
        for number, messages in enumerate(conversations)
    ]
    return collate(trajectories, context.bundle)


def _trajectory(messages: Conversation, context: ContextManager, *, number: int) -> Trajectory:
    introduced = bool(messages) and messages[0]["role"] == "system"
    system = messages[0]["content"] if introduced else ""
    spoken = list(messages[1:] if introduced else messages)
    roles = [message["role"] for message in spoken]
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        raise ValueError(
            f"conversation {number}: found roles {[m['role'] for m in messages]}, expected user and assistant in "
            "turn, an assistant last, and at most one system message before them"
        )
    state, turns = context.start(system), []
    for user, assistant in zip(spoken[::2], spoken[1::2], strict=True):
        shown = Observation(text=user["content"])
        prompt = context.observe(state, shown, max_turns=len(spoken) // 2)
        ids = context.encode_response(assistant["content"])
        context.response(state, ids=ids, text=assistant["content"], actions=())
        turns.append(
            Turn(
                observation=shown,
                prompt_ids=prompt.ids,
                prompt_images=prompt.images,
                response_ids=ids,
                response_logprobs=np.zeros(len(ids), np.float32),
                response_entropy=0.0,
                spans=np.full(len(ids), Span.OTHER, np.int8),
                response_text=assistant["content"],
                think=None,
                actions=[],
                action_is_valid=True,
                action_is_effective=True,
                hit_length_limit=False,
                temperature=1.0,
            )
        )
    return Trajectory(
        group=number, member=0, seed=0, turns=turns, status=EpisodeStatus.TERMINATED, success=False
    )
