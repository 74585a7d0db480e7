"""Turns that answer requests of agent programs: a sampled response as a message, and requests that get none.

An action of a program's environment is JSON text: `{"message", "finish_reason", "usage"}` for an answer, with
`"logprobs"` where the program asked for them, and `{"error": {"code", "message"}}` for a refusal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ragen_pl.chat_formats.messages import Message, call_message
from ragen_pl.chat_formats.tool_calls.message import AssistantMessage, ToolCall
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import Generation
from ragen_pl.environments.slot import TurnResult
from ragen_pl.prompts.conversation import Context
from ragen_pl.prompts.hint import HINTED_REQUEST
from ragen_pl.prompts.histories import RecordedCall
from ragen_pl.prompts.message_format import MessageFormat
from ragen_pl.prompts.parsing import ParsedResponse
from ragen_pl.prompts.requests import RequestRefusedError
from ragen_pl.rollout import chat_messages
from ragen_pl.rollout.turns import (
    Episode,
    PendingTurn,
    PresentTurn,
    TurnSettings,
    add_turn,
    respond,
)
from ragen_pl.trajectory import ChatRequest, EpisodeStatus, ProgramCall, TurnKind, add_terms


@dataclass(kw_only=True, slots=True)
class RequestTurn(PresentTurn):
    """Turn whose response answers a program's request.

    Attributes:
        request: The request, which has all messages of the prompt.
        images: Its images.
        penalty: Returns what a response costs that the program declares not valid.
    """

    request: ChatRequest
    images: list[np.ndarray]
    penalty: Callable[[], float]
    _refusal: ParsedResponse | None = field(init=False, default=None)
    _message: Message = field(init=False, default_factory=dict)

    def kind(self, episode: Episode) -> TurnKind:
        """Return a call with what the program says of it."""
        return ProgramCall(
            call_id=self.request.call_id,
            history=episode.conversation.history,
            is_task_step=self.request.is_task_step,
            trained=self.request.trained,
        )

    def begin(self, episode: Episode, context: Context, settings: TurnSettings) -> bool:
        """Show the request; one that cannot be shown or is too long is refused, and the program may go on.

        Raises:
            RolloutError: A teacher would read a hint in its place.
        """
        if settings.hint is not None:
            raise RolloutError(HINTED_REQUEST)
        longest, asked = settings.max_response_tokens, self.request.max_tokens
        try:
            episode.prompt = context.observe_request(
                episode.conversation, self.request, self.images
            )
            episode.temperature = settings.temperature
            episode.max_response_tokens = longest if asked is None else min(asked, longest)
            if not episode.fits(context):
                raise too_long(
                    len(episode.prompt.ids), episode.max_response_tokens, context=context.max_tokens
                )
        except RequestRefusedError as error:
            self._refusal = refusal(error.code, str(error))
        return True

    def refused(self, episode: Episode) -> PendingTurn | None:
        """Return the turn of a request that was refused."""
        if self._refusal is None:
            return None
        return PendingTurn(episode=episode, parsed=self._refusal)

    def read(
        self, episode: Episode, generation: Generation, context: Context, *, max_actions: int
    ) -> PendingTurn:
        """Read the answer."""
        assert episode.conversation.native is not None
        pieces = context.pieces(generation.ids)
        answer = answer_request(
            self.request,
            generation,
            native=episode.conversation.native,
            prompt_tokens=len(episode.prompt.ids),
            turn=episode.slot.turn,
            generation_prefix=context.generation_prefix,
            pieces=pieces,
        )
        generation, self._message = answer.generation, answer.message
        pieces = pieces[: len(generation.ids)]
        return PendingTurn(
            episode=episode,
            generation=generation,
            generation_prefix=context.generation_prefix,
            pieces=pieces,
            # an end has no text; a response that was cut has none
            end_sampled=not generation.hit_length_limit and pieces[-1] == "",
            parsed=answer.parsed,
            state_description=episode.slot.state_description,
            state_key=episode.slot.state_key,
            potential=episode.slot.potential,
        )

    def record(self, pending: PendingTurn, result: TurnResult, context: Context) -> bool:
        """Add a turn if the program got a response, and what its end says of earlier ones."""
        turns, outcome = pending.episode.trajectory.turns, result.answer
        is_turn = pending.generation is not None and outcome.delivered
        if is_turn:
            self._add(pending, result)
        elif turns:
            add_terms(turns[-1], result.reward_terms)
        for number in outcome.invalid_turns:
            turns[number].action_is_valid = False
            # once, where the response was cut or had a malformed call too
            if turns[number].trained:
                turns[number].reward_terms["format"] = -self.penalty()
        for number, terms in outcome.rewards_of.items():
            add_terms(turns[number], terms)
        if result.status is not None and not turns and result.error is None:
            result.error = "the program ended without a response to any of its requests"
            result.status = EpisodeStatus.FAILED
        return is_turn

    def _add(self, pending: PendingTurn, result: TurnResult) -> None:
        episode, turn = pending.episode, add_turn(pending, result)
        call = RecordedCall(
            request=self.request,
            message=self._message,
            prompt=episode.prompt,
            response_ids=turn.response_ids,
        )
        episode.conversation.calls.append(call)
        respond(pending, turn)

    def messages(
        self, episode: Episode, *, window: int | Literal["all"]
    ) -> list[chat_messages.Message]:
        """Return the messages of the request."""
        return chat_messages.request_messages(self.request, self.images)

    def limits(self) -> dict[str, Any]:
        """Return the limits of the request."""
        return {
            "max_completion_tokens": self.request.max_tokens,
            "stop": [*self.request.stop] or None,
        }


@dataclass(kw_only=True, slots=True)
class RequestAnswer:
    """A response to a program's request.

    Attributes:
        generation: The response, up to its stop string or its last permitted call.
        parsed: The response as the environment takes it.
        content: The response as the program gets it, `{"message", "finish_reason", "usage"}`.
    """

    generation: Generation
    parsed: ParsedResponse
    content: dict[str, Any]

    @property
    def message(self) -> Message:
        """The message of the response, see `ChatRequest.messages`."""
        message: Message = self.content["message"]
        return message


def refusal(code: str, message: str) -> ParsedResponse:
    """Return the action that tells a program why its request has no response."""
    error = json.dumps({"error": {"code": code, "message": message}})
    return ParsedResponse(actions=[error], refused=True)


def too_long(prompt_tokens: int, response_tokens: int, *, context: int) -> RequestRefusedError:
    """Return the error of a request whose prompt and response are longer than the context."""
    return RequestRefusedError(
        "context_length_exceeded",
        f"the prompt has {prompt_tokens} tokens and the response may have {response_tokens}, more than the {context} "
        "tokens of the context",
    )


def answer_request(
    request: ChatRequest,
    generation: Generation,
    *,
    native: MessageFormat,
    prompt_tokens: int,
    turn: int,
    generation_prefix: str,
    pieces: Sequence[str],
) -> RequestAnswer:
    """Return the answer to a request.

    A response ends before the request's first stop string, and after its first tool call where the request or the
    chat template allows one. Ids are cut there, so what is trained is a prefix of what was sampled. A call of a tool
    that the request does not offer, or that no later prompt can show, is not well formed: a program could not send it
    back.

    Args:
        request: The request.
        generation: The sampled response.
        native: Format of the response, with the request's tools.
        prompt_tokens: Tokens of the prompt.
        turn: Number of the turn, of which the ids of tool calls are made.
        generation_prefix: Text of the prompt with which the response begins.
        pieces: Text of each token.
    """
    ends = len(generation_prefix) + np.cumsum([len(piece) for piece in pieces])
    text = generation_prefix + "".join(pieces)
    place = _first_stop(text, request.stop, start=len(generation_prefix))
    if place is not None:
        start, end = place
        generation = _cut(generation, int(np.searchsorted(ends, end)) + 1)
        text = text[:start]
    read = native.message(text)
    allowed = native.max_calls if request.parallel_calls else 1
    if len(read.calls) > allowed:
        end = read.calls[allowed - 1].span[1]
        generation = _cut(generation, int(np.searchsorted(ends, end)) + 1)
        text = text[:end]
        read = native.message(text)
    shown = [
        call_message(number, call.name, call.arguments) for number, call in enumerate(read.calls)
    ]
    if shown and not native.shows(shown):
        read = native.message(text, names=())
        read.problem = "the arguments of the tool call cannot be shown"
    # a response without its end has no calls, even where they look complete
    calls = [] if generation.hit_length_limit else read.calls
    message = _message(read, calls, turn=turn)
    reason = "length" if generation.hit_length_limit else "tool_calls" if calls else "stop"
    count = len(generation.ids)
    content: dict[str, Any] = {
        "message": message,
        "finish_reason": reason,
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count},
    }
    if request.logprobs:
        pairs = zip(pieces[:count], generation.logprobs.tolist(), strict=True)
        content["logprobs"] = [[piece, logprob] for piece, logprob in pairs]
    parsed = ParsedResponse(
        think=read.reasoning,
        actions=[json.dumps(content)],
        spans=read.spans,
        calls=[{"function": {"name": call.name, "arguments": call.arguments}} for call in calls],
        problem="the response was cut" if generation.hit_length_limit else read.problem,
    )
    return RequestAnswer(generation=generation, parsed=parsed, content=content)


def _message(read: AssistantMessage, calls: Sequence[ToolCall], *, turn: int) -> Message:
    message: Message = {"role": "assistant", "content": read.content}
    if read.reasoning is not None:
        message["reasoning_content"] = read.reasoning
    if calls:
        message["tool_calls"] = [
            # Mistral's templates take ids of nine letters and digits
            {
                "id": f"call{turn % 1000:03}{number % 100:02}",
                "name": call.name,
                "arguments": call.arguments,
            }
            for number, call in enumerate(calls)
        ]
    return message


def _first_stop(text: str, stops: Sequence[str], *, start: int) -> tuple[int, int] | None:
    """Return where the first of the stop strings begins and ends, None without any."""
    found = [(text.find(stop, start), stop) for stop in stops]
    places = [(place, place + len(stop)) for place, stop in found if place >= 0]
    # the one that is complete first
    return min(places, key=lambda place: (place[1], place[0]), default=None)


def _cut(generation: Generation, length: int) -> Generation:
    """Return the first tokens of a response, which end it. The mean entropy of these is not known."""
    if length >= len(generation.ids):
        return replace(generation, hit_length_limit=False)
    kept_ids, kept_counts = generation.kept_ids, generation.kept_counts
    if kept_ids is not None and kept_counts is not None:
        kept_counts = kept_counts[:length]
        kept_ids = kept_ids[: kept_counts.sum()]
    return replace(
        generation,
        ids=generation.ids[:length],
        logprobs=generation.logprobs[:length],
        entropy=None,
        hit_length_limit=False,
        kept_ids=kept_ids,
        kept_counts=kept_counts,
        values=None if generation.values is None else generation.values[:length],
    )
