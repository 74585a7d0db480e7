"""Summaries of an episode's history that the policy writes, as turns that are no step of the task."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

from ragen_pl.chat_formats.messages import END_OF_THOUGHT, THINK
from ragen_pl.engines.protocol import Generation
from ragen_pl.environments.slot import TurnResult
from ragen_pl.prompts.compaction import Compaction, ask_for_summary, begin_anew, is_full, withdraw
from ragen_pl.prompts.conversation import Context
from ragen_pl.prompts.parsing import ParsedResponse
from ragen_pl.rollout.turns import Episode, PendingTurn, PresentTurn, TurnSettings, add_turn
from ragen_pl.trajectory import Span, Summary, TurnKind

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class SummaryTurn(PresentTurn):
    """Turn whose response is a summary of the history, with which the conversation begins anew.

    Attributes:
        settings: Settings of the summary.
        before: Turn that the summary makes room for.
    """

    acts: ClassVar[bool] = False
    purpose: ClassVar[tuple[str, ...]] = ("summary",)

    settings: Compaction
    before: PresentTurn
    _max_response_tokens: int = field(init=False, default=0)
    _summary: str = field(init=False, default="")

    def kind(self, episode: Episode) -> TurnKind:
        """Return a summary."""
        return Summary()

    def begin(self, episode: Episode, context: Context, settings: TurnSettings) -> bool:
        """Ask for a summary if an episode's conversation is full; return whether it does.

        The prompt of the turn `before` was made.
        """
        conversation, longest = episode.conversation, self.settings.max_summary_tokens
        self._max_response_tokens = settings.max_response_tokens
        reserved = (
            settings.max_response_tokens + context.count_tokens(self.settings.request) + longest
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
            ask_for_summary(conversation, self.settings, show_latest=show_latest)
            prompt = context.prompt(conversation)
            if len(prompt.ids) + longest <= context.max_tokens:
                episode.turn, episode.prompt, episode.max_response_tokens = self, prompt, longest
                return True
            withdraw(conversation)
        return False

    def read(
        self, episode: Episode, generation: Generation, context: Context, *, max_actions: int
    ) -> PendingTurn:
        """Read the summary. Reasoning before it is not part of it."""
        pieces = context.pieces(generation.ids)
        parsed, self._summary = read_summary(context.generation_prefix + "".join(pieces))
        return PendingTurn(
            episode=episode,
            generation=generation,
            generation_prefix=context.generation_prefix,
            pieces=pieces,
            end_sampled=not generation.hit_length_limit,
            parsed=parsed,
            state_key=episode.slot.state_key,
            potential=episode.slot.potential,
        )

    def record(self, pending: PendingTurn, result: TurnResult, context: Context) -> bool:
        """Add the turn, and go on with the turn `before` in the conversation that the summary begins."""
        episode = pending.episode
        add_turn(pending, result).action_is_valid = True
        begin_anew(episode.conversation, self.settings, self._summary)
        episode.turn, episode.max_response_tokens = self.before, self._max_response_tokens
        episode.prompt = context.prompt(episode.conversation)
        episode.conversation.prompt_lengths = [len(episode.prompt.ids)]
        return True


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
