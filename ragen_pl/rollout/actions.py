"""Turns that act in an environment."""

from __future__ import annotations

from dataclasses import dataclass

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import Generation
from ragen_pl.environments.slot import TurnResult
from ragen_pl.prompts.conversation import Context
from ragen_pl.prompts.parsing import ParsedResponse, parse_response
from ragen_pl.rollout.turns import (
    Episode,
    PendingTurn,
    PresentTurn,
    TurnSettings,
    add_turn,
    respond,
)
from ragen_pl.trajectory import Action, TurnKind


@dataclass(slots=True)
class ActionTurn(PresentTurn):
    """Turn whose response is actions of the environment, after a summary where the conversation is full."""

    def kind(self, episode: Episode) -> TurnKind:
        """Return an action."""
        return Action()

    def begin(self, episode: Episode, context: Context, settings: TurnSettings) -> bool:
        """Show the observation.

        Raises:
            RolloutError: The first prompt leaves no room for a response, and no other seat has written any of it.
        """
        assert episode.slot.observation is not None
        episode.prompt = context.observe(
            episode.conversation, episode.slot.observation, max_turns=settings.max_turns
        )
        teacher = episode.seats[episode.seat].teacher
        if settings.hint is not None and teacher is not None:
            hinted = settings.hint.observation(
                episode.slot.observation,
                state=episode.slot.state_description,
                plan=episode.slot.plan,
            )
            episode.teacher_prompt = context.observe(teacher, hinted, max_turns=settings.max_turns)
        episode.temperature = settings.temperature
        episode.max_response_tokens = settings.max_response_tokens
        if context.compaction is not None:
            from ragen_pl.rollout.summaries import SummaryTurn

            summary = SummaryTurn(settings=context.compaction, before=self)
            if summary.begin(episode, context, settings):
                return True
        fits = episode.fits(context)
        episode.crowded = not fits and not episode.trajectory.turns and episode.turns_played > 0
        if not fits and not episode.turns_played:
            teachers = 0 if episode.teacher_prompt is None else len(episode.teacher_prompt.ids)
            longest = max(len(episode.prompt.ids), teachers)
            raise RolloutError(
                f"the first prompt has {longest} tokens and a response may have "
                f"{settings.max_response_tokens}, more than context.max_tokens={context.max_tokens}; raise it"
            )
        return fits

    def read(
        self, episode: Episode, generation: Generation, context: Context, *, max_actions: int
    ) -> PendingTurn:
        """Read the actions."""
        pieces = context.pieces(generation.ids)
        parsed = self._parsed(
            episode, context.generation_prefix + "".join(pieces), context, max_actions=max_actions
        )
        # a response without its end is no answer, even where it looks like one
        if generation.hit_length_limit:
            parsed.actions, parsed.calls = [], []
        return PendingTurn(
            episode=episode,
            generation=generation,
            generation_prefix=context.generation_prefix,
            pieces=pieces,
            end_sampled=not generation.hit_length_limit,
            parsed=parsed,
            state_description=episode.slot.state_description,
            state_key=episode.slot.state_key,
            potential=episode.slot.potential,
        )

    @staticmethod
    def _parsed(
        episode: Episode, text: str, context: Context, *, max_actions: int
    ) -> ParsedResponse:
        names, native = episode.slot.action_names, episode.conversation.native
        if native is not None:
            return native.parse(text, names, max_actions=max_actions)
        return parse_response(
            text,
            names,
            max_actions=max_actions,
            prompt_format=episode.prompt_format,
            start=context.words_start(text),
        )

    def record(self, pending: PendingTurn, result: TurnResult, context: Context) -> bool:
        """Add the turn."""
        respond(pending, add_turn(pending, result))
        return True
