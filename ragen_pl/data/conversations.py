"""Written conversations as a TrajectoryBatch, for supervised learning of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.prompts.context import ContextManager
from ragen_pl.trajectory import EpisodeStatus, Observation, Span, Trajectory, Turn

Conversation = Sequence[Mapping[str, str]]
"""Messages with `role` (an optional `system` first, then `user` and `assistant` in turn) and `content`."""


def conversation_batch(
    conversations: Sequence[Conversation], context: ContextManager
) -> TrajectoryBatch:
    """Encode conversations as the policy reads them. The assistant's messages are trained on.

    Args:
        conversations: Conversations to learn.
        context: Chat format and window; with `system_prompt="instructions"` each conversation's own system
            message is used.

    Raises:
        ValueError: Roles that do not alternate.
    """
    trajectories = [
        _trajectory(messages, context, number=number)
        for number, messages in enumerate(conversations)
    ]
    return collate(trajectories, context.bundle)


def _trajectory(messages: Conversation, context: ContextManager, *, number: int) -> Trajectory:
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = messages[0]["content"] if has_system else ""
    dialogue = list(messages[1:] if has_system else messages)
    roles = [message["role"] for message in dialogue]
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        raise ValueError(
            f"conversation {number}: found roles {[m['role'] for m in messages]}, expected user and assistant in "
            "turn, an assistant last, and at most one system message before them"
        )
    state, turns = context.start(system), []
    for user, assistant in zip(dialogue[::2], dialogue[1::2], strict=True):
        observation = Observation(text=user["content"])
        prompt = context.observe(state, observation, max_turns=len(dialogue) // 2)
        ids = context.encode_response(assistant["content"])
        state.respond(ids=ids, text=assistant["content"], actions=())
        turns.append(
            Turn(
                observation=observation,
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
