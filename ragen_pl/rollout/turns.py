"""Turns of episodes: a response with the state before it, and the record of it once its result is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ragen_pl.chat_formats.messages import Message
from ragen_pl.engines.protocol import Generation
from ragen_pl.environments.slot import EnvironmentSlot, TurnResult
from ragen_pl.prompts.conversation import Context, Conversation
from ragen_pl.prompts.parsing import ParsedResponse, label_tokens, parse_response
from ragen_pl.rollout.requests import answer_request
from ragen_pl.rollout.responders import Episode
from ragen_pl.trajectory import ChatRequest, EpisodeStatus, Trajectory, Turn


@dataclass(kw_only=True, slots=True)
class PendingTurn:
    """A response with the state of its episode before it is carried out.

    A program's request that gets no response has no generation. `request` and `message` are those of programs.
    """

    episode: Episode
    parsed: ParsedResponse
    generation: Generation | None = None
    opening: str = ""
    pieces: Sequence[str] = ()
    state_description: str | None = None
    state_key: str | None = None
    request: ChatRequest | None = None
    message: Message | None = None


def sampled(response: Generation | str, context: Context) -> Generation:
    """Return a response as a sampled one: a written response as the tokens of a model."""
    if isinstance(response, Generation):
        return response
    ids = context.encode_response(response)
    return Generation(
        ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        entropy=0.0,
        hit_length_limit=False,
        version=0,
    )


def read_response(
    episode: Episode, generation: Generation, *, context: Context, max_actions: int
) -> PendingTurn:
    """Read a response to the present turn of an episode.

    Args:
        episode: the episode.
        generation: the response.
        context: tells the text of its tokens.
        max_actions: number of actions that are carried out.
    """
    pieces = context.pieces(generation.ids)
    text = context.opening + "".join(pieces)
    names, native, message = episode.slot.action_names, episode.conversation.native, None
    if episode.request is not None:
        assert native is not None
        answer = answer_request(
            episode.request,
            generation,
            native=native,
            prompt_tokens=len(episode.prompt.ids),
            turn=episode.slot.turn,
            opening=context.opening,
            pieces=pieces,
        )
        generation, parsed, message = answer.generation, answer.parsed, answer.message
        pieces = pieces[: len(generation.ids)]
    elif native is not None:
        parsed = native.parse(text, names, max_actions=max_actions)
    else:
        parsed = parse_response(
            text,
            names,
            max_actions=max_actions,
            prompt_format=episode.prompt_format,
            start=context.words_start(text),
        )
    # a response without its end is no answer, even where it looks like one
    if generation.hit_length_limit and episode.request is None:
        parsed.actions, parsed.calls = [], []
    return PendingTurn(
        episode=episode,
        generation=generation,
        opening=context.opening,
        pieces=pieces,
        parsed=parsed,
        state_description=episode.slot.state_description,
        state_key=episode.slot.state_key,
        request=episode.request,
        message=message,
    )


def refused_turn(episode: Episode) -> PendingTurn:
    """Return the turn of a program's request that gets no response."""
    assert episode.refusal is not None
    return PendingTurn(episode=episode, parsed=episode.refusal)


def new_trajectory(slot: EnvironmentSlot, conversation: Conversation) -> Trajectory:
    """Return the trajectory of an episode that begins."""
    return Trajectory(
        group=slot.spec.group,
        member=slot.spec.member,
        seed=slot.spec.seed,
        turns=[],
        status=EpisodeStatus.FAILED,
        success=False,
        difficulty=slot.difficulty,
        error=slot.error,
        system_prompt_length=len(conversation.system_prompt_ids),
    )


def played_turn(pending: PendingTurn, generation: Generation, result: TurnResult) -> Turn:
    """Return a turn of which the environment's result is known."""
    episode, parsed, request = pending.episode, pending.parsed, pending.request
    trained = request is None or request.trained
    # an end has no text; a response that was cut has none
    end_sampled = not generation.hit_length_limit and (request is None or pending.pieces[-1] == "")
    ends = len(pending.opening) + np.cumsum([len(piece) for piece in pending.pieces])
    return Turn(
        observation=episode.conversation.observation,
        prompt_ids=episode.prompt.ids,
        prompt_roles=episode.prompt.roles,
        prompt_images=episode.prompt.images,
        response_ids=generation.ids,
        response_logprobs=generation.logprobs,
        response_entropy=generation.entropy,
        spans=label_tokens(parsed, ends.tolist(), end_sampled=end_sampled),
        response_text="".join(pending.pieces),
        think=parsed.think,
        actions=result.actions,
        action_is_valid=parsed.valid and result.valid,
        action_is_effective=result.effective,
        hit_length_limit=generation.hit_length_limit,
        temperature=episode.temperature,
        reward_terms=_charged(result.reward_terms, trained=trained),
        success=result.success,
        info=result.info,
        statements=result.statements,
        state_description=pending.state_description,
        state_key=pending.state_key,
        prompt_patches=episode.prompt.patches,
        turns_left_out=episode.prompt.left_out,
        advances=request is None or request.advances,
        trained=trained,
        call_id=None if request is None else request.call_id,
        history=episode.conversation.history,
        kept_ids=generation.kept_ids,
        kept_counts=generation.kept_counts,
        response_values=generation.values,
    )


def _charged(terms: Mapping[str, float], *, trained: bool) -> dict[str, float]:
    """Return a turn's reward terms; a response that is not trained on costs no trained one a penalty of its form."""
    return {name: value for name, value in terms.items() if trained or name != "format"}


def end_episode(episode: Episode, status: EpisodeStatus, *, max_tokens: int) -> None:
    """End an episode in its present state; a truncated one keeps its last prompt that fits, to bootstrap from.

    Args:
        episode: the episode.
        status: how it ended.
        max_tokens: length of the context.
    """
    episode.done = True
    trajectory, prompt = episode.trajectory, episode.prompt
    trajectory.status, trajectory.final_state_key = status, episode.slot.state_key
    if status is not EpisodeStatus.TRUNCATED:
        return
    if len(prompt.ids) <= max_tokens:
        trajectory.final_prompt_ids, trajectory.final_images = prompt.ids, prompt.images
        trajectory.final_patches, trajectory.final_roles = prompt.patches, prompt.roles
    elif trajectory.turns:
        # an observation that is longer than the context; the state before the last response has been read
        last = trajectory.turns[-1]
        trajectory.final_prompt_ids, trajectory.final_images = last.prompt_ids, last.prompt_images
        trajectory.final_patches = last.prompt_patches
