"""Summaries of an episode's history that the policy writes, as turns that are no step of the task."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from ragen_pl.chat_formats.messages import END_OF_THOUGHT, THINK
from ragen_pl.engines.protocol import Generation
from ragen_pl.environments.slot import TurnResult
from ragen_pl.prompts.compaction import ask_for_summary, begin_anew, is_full, withdraw
from ragen_pl.prompts.conversation import Context
from ragen_pl.prompts.parsing import ParsedResponse
from ragen_pl.rollout.responders import Episode
from ragen_pl.rollout.turns import PendingTurn, played_turn
from ragen_pl.trajectory import Span, Turn

log = logging.getLogger(__name__)


def begin_summary(context: Context, episode: Episode, *, response_tokens: int) -> bool:
    """Ask for a summary if an episode's conversation is full; return whether it does.

    Args:
        context: makes the prompts.
        episode: an episode whose prompt was made.
        response_tokens: longest response of an ordinary turn.
    """
    settings, conversation = context.compaction, episode.conversation
    if settings is None:
        return False
    reserved = (
        response_tokens + context.count_tokens(settings.request) + settings.max_summary_tokens
    )
    if not is_full(
        conversation,
        prompt_tokens=len(episode.prompt.ids),
        reserved_tokens=reserved,
        max_tokens=context.max_tokens,
    ):
        return False
    if conversation.summaries and len(conversation.exchanges) == 2:
        _warn_of_full_context(context.max_tokens)
    for show_latest in (True, False):
        ask_for_summary(conversation, settings, show_latest=show_latest)
        prompt = context.prompt(conversation)
        if len(prompt.ids) + settings.max_summary_tokens <= context.max_tokens:
            episode.prompt, episode.summarizes = prompt, True
            episode.max_response_tokens = settings.max_summary_tokens
            return True
        withdraw(conversation)
    return False


def summary_turn(
    context: Context, episode: Episode, generation: Generation, pieces: Sequence[str]
) -> Turn:
    """Return the turn of a summary, and begin the conversation anew.

    Reasoning before the summary is not part of it.
    """
    parsed, summary = read_summary(context.opening + "".join(pieces))
    pending = PendingTurn(episode=episode, parsed=parsed, opening=context.opening, pieces=pieces)
    turn = played_turn(pending, generation, TurnResult())
    turn.action_is_valid, turn.advances = True, False
    assert context.compaction is not None
    begin_anew(episode.conversation, context.compaction, summary)
    episode.prompt, episode.summarizes = context.prompt(episode.conversation), False
    episode.conversation.prompt_lengths = [len(episode.prompt.ids)]
    return turn


@cache
def _warn_of_full_context(max_tokens: int) -> None:
    log.warning(
        "context.max_tokens=%d: a conversation with a summary was full again after one turn; raise it",
        max_tokens,
    )


def read_summary(text: str) -> tuple[ParsedResponse, str]:
    """Return the reasoning and the spans of a response, and the summary after its reasoning.

    >>> read_summary("<think>hm</think> two keys")[1]
    'two keys'
    """
    before, found, after = text.rpartition(END_OF_THOUGHT)
    start = len(before) + len(found)
    opening = before.find(THINK) + len(THINK) if THINK in before else 0
    spans = [(Span.ACTION, start, len(text))]
    if found:
        spans.insert(0, (Span.THINK, opening, len(before)))
    think = before[opening:].strip() if found else None
    return ParsedResponse(think=think, spans=spans), after.strip()
