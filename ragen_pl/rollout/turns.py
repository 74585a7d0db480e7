"""Turns of episodes: an episode under way, its present turn, and the record of a turn once its result is known.

A present turn is of one of three kinds: it acts in an environment (`ragen_pl.rollout.actions`), answers a program's
request (`ragen_pl.rollout.requests`) or summarizes the history (`ragen_pl.rollout.summaries`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.base.seeding import derive_seed
from ragen_pl.engines.protocol import Generation, Prompt
from ragen_pl.environments.slot import EnvironmentSlot, TurnResult
from ragen_pl.models.truncation import Truncation
from ragen_pl.prompts.conversation import NO_IDS, Context, Conversation
from ragen_pl.prompts.hint import Hint
from ragen_pl.prompts.parsing import ParsedResponse, label_tokens
from ragen_pl.trajectory import EpisodeStatus, Trajectory, Turn, TurnKind, add_terms

if TYPE_CHECKING:
    from ragen_pl.rollout.chat_messages import Message


def _empty_prompt() -> Prompt:
    return Prompt(ids=NO_IDS, unexpanded_ids=NO_IDS)


@dataclass(kw_only=True, slots=True)
class Seat:
    """Conversation and turns of a seat of an episode under way; an environment without several has one.

    Attributes:
        conversation: Context of the seat.
        trajectory: Turns of the seat.
        owed: Reward that came before its first turn.
        teacher: The same conversation with hints; None without a teacher that reads them.
    """

    conversation: Conversation
    trajectory: Trajectory
    owed: float = 0.0
    teacher: Conversation | None = None


@dataclass(kw_only=True, slots=True)
class Episode:
    """An episode under way, with the turn that waits for a response.

    Attributes:
        number: Index among the episodes played at once; engines use it as the session.
        slot: The running environment.
        seats: The seats that the policy plays.
        seat: The seat whose turn it is.
        crowded: Whether what other seats wrote left no room for a seat's first response.
        turn: The present turn.
        prompt_format: Required form of a response.
        max_response_tokens: Longest response of the present turn.
        seed_key: Counters that the seeds of the episode's turns start with.
        samples: Whether its responses are sampled.
        prompt: Prompt of the present turn.
        teacher_prompt: Prompt with which a teacher reads the response; None for the policy's.
        temperature: Temperature of the present turn.
        truncation: Ids that sampling keeps; None for all.
        done: Whether the episode has ended.
    """

    number: int
    slot: EnvironmentSlot
    seats: list[Seat]
    turn: PresentTurn
    prompt_format: PromptFormat
    max_response_tokens: int
    seed_key: tuple[int | str, ...]
    samples: bool = True
    prompt: Prompt = field(default_factory=_empty_prompt)
    teacher_prompt: Prompt | None = None
    temperature: float = 1.0
    truncation: Truncation | None = None
    seat: int = 0
    crowded: bool = False
    done: bool = False

    @property
    def conversation(self) -> Conversation:
        """Context of the seat whose turn it is."""
        return self.seats[self.seat].conversation

    @property
    def trajectory(self) -> Trajectory:
        """Turns of the seat whose turn it is."""
        return self.seats[self.seat].trajectory

    @property
    def turns_played(self) -> int:
        """Number of turns of all seats."""
        return sum(len(seat.trajectory.turns) for seat in self.seats)

    @property
    def seed(self) -> int:
        """Seed of all random draws of the present turn."""
        seat = ("seat", self.seat) if len(self.seats) > 1 else ()
        return derive_seed(*self.seed_key, *seat, self.slot.turn, *self.turn.purpose)

    def fits(self, context: Context) -> bool:
        """Return whether its prompts and the longest response of the present turn fit into the context."""
        prompts = (self.prompt, self.teacher_prompt)
        longest = max(len(prompt.ids) for prompt in prompts if prompt is not None)
        return longest + self.max_response_tokens <= context.max_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSettings:
    """Settings of the turn loop for an episode's next turn.

    Attributes:
        max_turns: Largest number of turns.
        max_response_tokens: Longest response.
        temperature: Sampling temperature.
        hint: What a teacher reads in place of the observation; None for nothing else.
    """

    max_turns: int
    max_response_tokens: int
    temperature: float
    hint: Hint | None = None


@dataclass(kw_only=True, slots=True)
class PendingTurn:
    """A response with the state of its episode before it is carried out.

    Attributes:
        episode: The episode.
        parsed: The response as its environment takes it.
        generation: The response; None for a program's request that gets none.
        generation_prefix: Text of the prompt with which the response begins.
        pieces: Text of each token.
        end_sampled: Whether the last token is the end-of-turn token.
        state_description: The environment's description of the state.
        state_key: Key of the state, where it is recorded.
        potential: Its potential, where it is recorded.
    """

    episode: Episode
    parsed: ParsedResponse
    generation: Generation | None = None
    generation_prefix: str = ""
    pieces: Sequence[str] = ()
    end_sampled: bool = False
    state_description: str | None = None
    state_key: str | None = None
    potential: float | None = None


class PresentTurn(ABC):
    """The turn of an episode that waits for its response: its prompt, its response and their record."""

    acts: ClassVar[bool] = True
    """Whether the environment carries out the response."""
    purpose: ClassVar[tuple[str, ...]] = ()
    """Keys of the turn's seed that an action's has not."""

    @abstractmethod
    def kind(self, episode: Episode) -> TurnKind:
        """Return the kind as which the turn is recorded."""

    @abstractmethod
    def begin(self, episode: Episode, context: Context, settings: TurnSettings) -> bool:
        """Make the prompt of the turn; return whether it leaves room for a response."""

    def refused(self, episode: Episode) -> PendingTurn | None:
        """Return the turn if it is carried out without a response, None where the policy responds."""
        return None

    @abstractmethod
    def read(
        self, episode: Episode, generation: Generation, context: Context, *, max_actions: int
    ) -> PendingTurn:
        """Read the response.

        Args:
            episode: The episode.
            generation: The response.
            context: Tells the text of its tokens.
            max_actions: Number of actions that are carried out.
        """

    @abstractmethod
    def record(self, pending: PendingTurn, result: TurnResult, context: Context) -> bool:
        """Add the turn to its trajectory and its conversation; return whether there was one.

        Args:
            pending: The turn.
            result: What came of the response; may be changed.
            context: Context of the conversation.
        """

    def messages(self, episode: Episode, *, window: int | Literal["all"]) -> list[Message]:
        """Return the messages up to the present turn, for a model behind an API.

        Args:
            episode: The episode.
            window: Number of latest turns shown, or `"all"`.
        """
        from ragen_pl.rollout.chat_messages import conversation_messages

        return conversation_messages(episode.conversation, window=window)

    def limits(self) -> dict[str, Any]:
        """Return limits of the response that a program asks for, as fields of a chat request; None for no limit."""
        return {}


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


def new_trajectory(
    slot: EnvironmentSlot, conversation: Conversation, *, seat: int = 0
) -> Trajectory:
    """Return the trajectory of a seat of an episode that begins.

    Seats are groups of their own, so that a baseline compares an episode with others of its seat.
    """
    return Trajectory(
        group=slot.seats * slot.spec.group + seat,
        seat=seat,
        seats=slot.seats,
        member=slot.spec.member,
        seed=slot.spec.seed,
        turns=[],
        status=EpisodeStatus.FAILED,
        success=False,
        difficulty=slot.difficulty,
        error=slot.error,
        system_prompt_length=len(conversation.system_prompt_ids),
        initial_state_key=slot.state_key,
        environment=slot.spec.environment,
        is_user=seat == slot.user_seat,
    )


def add_turn(pending: PendingTurn, result: TurnResult) -> Turn:
    """Add a turn of which the environment's result is known to its trajectory, and return it."""
    episode, parsed, generation = pending.episode, pending.parsed, pending.generation
    assert generation is not None
    kind = episode.turn.kind(episode)
    _, *ends = accumulate(map(len, pending.pieces), initial=len(pending.generation_prefix))
    turn = Turn(
        observation=episode.conversation.observation,
        prompt_ids=episode.prompt.ids,
        prompt_roles=episode.prompt.roles,
        prompt_images=episode.prompt.images,
        response_ids=generation.ids,
        response_logprobs=generation.logprobs,
        response_entropy=generation.entropy,
        spans=label_tokens(parsed, ends, end_sampled=pending.end_sampled),
        response_text="".join(pending.pieces),
        think=parsed.think,
        actions=result.actions,
        action_is_valid=parsed.valid and result.valid,
        action_is_effective=result.effective,
        hit_length_limit=generation.hit_length_limit,
        temperature=episode.temperature,
        reward_terms=_charged(result.reward_terms, trained=kind.trained),
        success=result.success,
        info=result.info,
        statements=result.statements,
        state_description=pending.state_description,
        state_key=pending.state_key,
        potential=pending.potential,
        prompt_patches=episode.prompt.patches,
        turns_left_out=episode.prompt.left_out,
        kind=kind,
        kept_ids=generation.kept_ids,
        kept_counts=generation.kept_counts,
        response_values=generation.values,
    )
    if episode.teacher_prompt is not None:
        turn.teacher_prompt_ids = episode.teacher_prompt.ids
        turn.teacher_images = episode.teacher_prompt.images
    episode.trajectory.turns.append(turn)
    return turn


def respond(pending: PendingTurn, turn: Turn) -> None:
    """Add the response of a turn to its conversation, and to the teacher's."""
    seat = pending.episode.seats[pending.episode.seat]
    for conversation in (seat.conversation, seat.teacher):
        if conversation is not None:
            conversation.respond(
                ids=turn.response_ids,
                text=turn.response_text,
                actions=turn.actions,
                calls=pending.parsed.calls,
            )


def _charged(terms: Mapping[str, float], *, trained: bool) -> dict[str, float]:
    """Return a turn's reward terms; a response that is not trained on costs no trained one a penalty of its form."""
    return {name: value for name, value in terms.items() if trained or name != "format"}


def pay_seats(episode: Episode, result: TurnResult) -> None:
    """Add what a turn brought the other seats to their last turns; one without a turn is owed it for its first.

    The errors of a simulated user count in all seats. The turn has been added to the trajectory of its own seat.
    """
    for seat in episode.seats:
        seat.trajectory.user_errors += result.user_errors
        # a response that no step takes says nothing
        seat.trajectory.seat_success = [*result.seat_success] or seat.trajectory.seat_success
    own = episode.seats[episode.seat]
    if own.owed and own.trajectory.turns:
        add_terms(own.trajectory.turns[-1], {"environment": own.owed})
        own.owed = 0.0
    brought = zip(episode.seats, result.seat_rewards, result.seat_success, strict=False)
    for seat, amount, success in brought:
        turns = seat.trajectory.turns
        if seat is own:
            continue
        seat.trajectory.success = success
        if not turns:
            seat.owed += amount
            continue
        turns[-1].success = success
        if amount:
            add_terms(turns[-1], {"environment": amount})


def end_episode(
    episode: Episode, status: EpisodeStatus, *, context: Context, max_turns: int
) -> None:
    """End an episode in its present state; a truncated one keeps its last prompts that fit, to bootstrap from.

    Args:
        episode: The episode.
        status: How it ended.
        context: Makes the prompts of seats whose turn it is not.
        max_turns: Largest number of turns.
    """
    episode.done = True
    slot, error = episode.slot, episode.trajectory.error
    for number, seat in enumerate(episode.seats):
        trajectory, prompt = seat.trajectory, episode.prompt
        trajectory.status, trajectory.final_state_key = status, slot.state_key
        trajectory.final_potential = slot.potential
        trajectory.error = error
        if status is not EpisodeStatus.TRUNCATED:
            continue
        if number != episode.seat:
            if not trajectory.turns:
                continue
            prompt = context.observe(
                seat.conversation, slot.seat_observations[number], max_turns=max_turns
            )
        _keep_final_prompt(trajectory, prompt, max_tokens=context.max_tokens)


def _keep_final_prompt(trajectory: Trajectory, prompt: Prompt, *, max_tokens: int) -> None:
    if len(prompt.ids) <= max_tokens:
        trajectory.final_prompt_ids, trajectory.final_images = prompt.ids, prompt.images
        trajectory.final_patches, trajectory.final_roles = prompt.patches, prompt.roles
    elif trajectory.turns:
        # an observation that is longer than the context; the state before the last response has been read
        last = trajectory.turns[-1]
        trajectory.final_prompt_ids, trajectory.final_images = last.prompt_ids, last.prompt_images
        trajectory.final_patches, trajectory.final_potential = last.prompt_patches, last.potential


def played_trajectories(episode: Episode) -> list[Trajectory]:
    """Return the trajectories of an episode that has ended: one for each seat.

    A seat of a game that ended before its first turn has none. The lost reward is not that of anything it did. A game
    without any turn has that of the seat to move.
    """
    trajectories = [seat.trajectory for seat in episode.seats]
    if len(trajectories) == 1 or trajectories[0].status is EpisodeStatus.FAILED:
        return trajectories
    played = [trajectory for trajectory in trajectories if trajectory.turns]
    return played or [episode.trajectory]
