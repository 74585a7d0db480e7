"""Plain data that flows from the rollout to the update: Observation, Turn, Trajectory.

Nothing here depends on tensors, tokenizers or environments. A trajectory can be pickled, written as JSON
and read by any part of the project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, TypeAlias

import numpy as np


class Span(IntEnum):
    """Block of a response that a sampled token belongs to.

    In formats whose think block is divided, `THINK` is the reasoning block. `SHOWN` tokens were not
    sampled: they are text between the responses, labeled only where it is trained on (RICO).
    """

    OTHER = 0
    THINK = 1
    ACTION = 2
    TAG = 3
    END = 4
    OBSERVATION = 5
    PREDICTION = 6
    SHOWN = 7


class Role(IntEnum):
    """Origin of a token in a prompt or a sample.

    `EARLIER` is a response that the prompt shows and that was sampled in another sample. Images and what the chat
    template writes around texts are no text.
    """

    PADDING = -1
    SAMPLED = 0
    OBSERVATION = 1
    RESULT = 2
    SYSTEM = 3
    TEMPLATE = 4
    IMAGE = 5
    EARLIER = 6


SAMPLED_SPANS = tuple(span for span in Span if span is not Span.SHOWN)
"""Blocks whose tokens the policy sampled."""
REASONING_SPANS = (Span.THINK, Span.OBSERVATION, Span.PREDICTION)
"""Blocks inside the think block."""


class EpisodeStatus(StrEnum):
    """How an episode ended.

    `TERMINATED` and `TURN_LIMIT` belong to the task (the agent knows the limit). `TRUNCATED` comes from
    outside: the token budget, the environment's own truncation. `FAILED` is an error of the environment.
    """

    TERMINATED = "terminated"
    TURN_LIMIT = "turn_limit"
    TRUNCATED = "truncated"
    FAILED = "failed"


class FailureCause(StrEnum):
    """Cause of an environment's error.

    `INFRASTRUCTURE` is a connection, a time limit, a process that ended or a service that is full: a retry
    in a new environment may succeed. `DATA` is all else: the same episode would fail again.
    """

    INFRASTRUCTURE = "infrastructure"
    DATA = "data"


REWARD_PART = "environment/"
"""Prefix of the reward terms that are named parts of the environment's reward."""

MAX_REWARD = 1e30
"""Bound of a reward: a larger one is infinite once returns are summed in float32."""

JOINED, FIRST = "joined", "first"
"""Values of `ProgramCall.history`: a prompt that continues a response, and the first one of an episode."""
DIFFERENCES = (
    "tools",
    "system",
    "user",
    "tool",
    "images",
    "arguments",
    "content",
    "reasoning",
    "messages",
)
"""Other values of `ProgramCall.history`: the first thing in which a request differs from the recorded ones."""

Relation = tuple[str, int, int]
"""Name of a thing, and how many rows below and columns to the right of the player it is."""


@dataclass(kw_only=True, slots=True)
class Statement:
    """Claim of a response about the environment's state, with the true relations.

    Attributes:
        block: `observation` (the state before the actions) or `prediction` (the state after them).
        text: The block's text.
        true_relations: Relations of the environment in that state.
        names: Things that the environment has names for, present or not.
        agreement: F1 of the claimed relations.
        score: Agreement beyond chance, set by a judge; None without one.
    """

    block: str
    text: str
    true_relations: list[Relation]
    names: tuple[str, ...]
    agreement: float
    score: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """Request of an agent program to the policy.

    Attributes:
        messages: System, user, assistant and tool messages. Content is a text or a list of parts, `{"type": "text",
            "text"}` and `{"type": "image", "digest"}`, the images in the order of `Observation.images`. Arguments of
            tool calls are dicts, or the text of what is no JSON object.
        tools: Schemas in the format of OpenAI's API.
        max_tokens: Longest response, where the program limits it.
        stop: Texts before which the response ends.
        logprobs: Whether the program asks for the log-probs of the tokens.
        parallel_calls: Whether a response may have several tool calls.
        is_task_step: As in `ProgramCall`.
        trained: As in `ProgramCall`.
        call_id: Id of the response.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    parallel_calls: bool = True
    is_task_step: bool = True
    trained: bool = True
    call_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOutcome:
    """Outcome of the answer to a program's request. Its environment returns it in `info` under `KEY`.

    Attributes:
        delivered: Whether the program got the answer.
        rewards_of: Reward terms of earlier turns by their numbers, which the program's end brings.
        invalid_turns: Numbers of turns whose calls the program declares not valid.
    """

    KEY: ClassVar[str] = "answer_outcome"

    delivered: bool = True
    rewards_of: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    invalid_turns: Sequence[int] = ()


@dataclass(kw_only=True, slots=True)
class Observation:
    """Text and images that the environment shows at the start of a turn.

    Attributes:
        text: Words of the observation.
        images: RGB images, each uint8 `[height, width, 3]`.
        results: Results of the tool calls before, in their order, where the prompt format is native; `text` is all
            of them then.
        request: Request of a program, which has all messages of the prompt; None in other environments.
        result_images: Number of images of each result, whose images follow each other in `images`; without it all
            images belong to the last result.

    Raises:
        ValueError: `result_images` does not fit the results and the images.
    """

    text: str
    images: list[np.ndarray] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    request: ChatRequest | None = None
    result_images: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.results and not self.result_images:
            self.result_images = [0] * (len(self.results) - 1) + [len(self.images)]
        if len(self.result_images) != len(self.results) or (
            self.results and sum(self.result_images) != len(self.images)
        ):
            raise ValueError(
                f"found result_images={self.result_images} for {len(self.results)} results and {len(self.images)} "
                "images"
            )

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        # a pickle of an earlier version has fewer fields
        for name, value in ({"results": [], "request": None} | state[1]).items():
            setattr(self, name, value)
        if "result_images" not in state[1]:
            self.result_images = []
            self.__post_init__()


@dataclass(frozen=True, slots=True)
class Action:
    """Kind of a turn that acts in an environment: a step of the task, which the policy is trained on."""

    is_task_step: ClassVar[bool] = True
    trained: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramCall:
    """Kind of a turn that answers a program's request.

    Attributes:
        call_id: Id of the response.
        history: How the request's messages became the prompt: `JOINED`, `FIRST`, or, where they were rendered as a
            whole, one of `DIFFERENCES`; None for a model behind an API.
        is_task_step: Whether the turn is a step of the task, which discounts count.
        trained: Whether the policy is trained on the response. One that it is not trained on, such as a judge's, is
            context only.
    """

    call_id: str = ""
    history: str | None = None
    is_task_step: bool = True
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Summary:
    """Kind of a turn that summarizes the history: no step of the task, and trained on."""

    is_task_step: ClassVar[bool] = False
    trained: ClassVar[bool] = True


TurnKind: TypeAlias = Action | ProgramCall | Summary


@dataclass(kw_only=True, slots=True)
class Turn:
    """One observation and one response, with the exact tokens that the policy saw and sampled.

    Attributes:
        observation: What the environment showed.
        prompt_ids: int64 `[prompt]`, the ids given to the engine, image slots expanded.
        prompt_roles: int8, a `Role` of the last ids of the prompt, those of the latest observation with one before them
            that is `EARLIER` where it follows a response; None where they are not recorded.
        prompt_images: Images of the prompt's image slots, in order.
        response_ids: int64 `[response]`, the sampled end-of-turn token included.
        response_logprobs: float32 `[response]`, under the distribution sampled from.
        response_entropy: Mean over the response's tokens, in nats; None where the engine gives none.
        spans: int8 `[response]`, a `Span` for each token.
        response_text: The response in words.
        think: Its reasoning; None without a valid think block.
        actions: Names of the actions that were carried out, or the text of a free one; of a program's request the tool
            calls, or without any the words of a valid response.
        action_is_valid: Whether the response has the required form and valid actions.
        action_is_effective: Whether the actions changed the environment.
        hit_length_limit: Whether the length limit came before an end-of-turn token.
        temperature: Sampling temperature.
        reward_terms: Reward terms by name. `EnvironmentManager` sets `environment` (or `environment/<part>` for each
            named part of the environment's reward) and `format`.
        success: Whether the task is solved after the actions; None where their environment does not say so.
        info: What the environment's last step returned in addition to the observation.
        statements: Claims about the state, in formats that ask for them.
        state_description: The environment's own description of the state before the actions.
        state_key: Key of that state, where it is recorded.
        potential: The environment's potential of that state, where it is recorded.
        prompt_patches: Patches shown of each image of the prompt; None for all.
        turns_left_out: Turns of the window that the prompt leaves out.
        kind: An action, a response to a program's request, or a summary.
        kept_ids: int32 `[kept]`, ids that truncated sampling (top-p, top-k, min-p) kept at each token of the response,
            one token after the other; None where the engine gives none.
        kept_counts: int32 `[response]`, number of these ids of each token, 0 for all ids.
        response_values: float32 `[response]`, the critic's value of the state before each token; None where the engine
            has read none.
        teacher_prompt_ids: int64 `[prompt]`, the prompt with which a teacher reads the response; None for the policy's.
        teacher_images: Images of that prompt; None where there is none.
    """

    observation: Observation
    prompt_ids: np.ndarray
    prompt_images: list[np.ndarray]
    response_ids: np.ndarray
    response_logprobs: np.ndarray
    response_entropy: float | None
    spans: np.ndarray
    response_text: str
    think: str | None
    actions: list[str]
    action_is_valid: bool
    action_is_effective: bool
    hit_length_limit: bool
    temperature: float
    reward_terms: dict[str, float] = field(default_factory=dict)
    success: bool | None = None
    info: dict[str, Any] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    state_description: str | None = None
    state_key: str | None = None
    prompt_patches: list[np.ndarray] | None = None
    turns_left_out: tuple[int, ...] = ()
    kind: TurnKind = Action()
    kept_ids: np.ndarray | None = None
    kept_counts: np.ndarray | None = None
    response_values: np.ndarray | None = None
    prompt_roles: np.ndarray | None = None
    potential: float | None = None
    teacher_prompt_ids: np.ndarray | None = None
    teacher_images: list[np.ndarray] | None = None

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        # a pickle of an earlier version has fewer fields
        said = state[1]["info"].get("success")
        added = {"success": None if said is None else bool(said), "kind": _former_kind(state[1])}
        read = dict.fromkeys(_LATER)
        for name, value in (added | read | state[1]).items():
            if name not in _FORMER:
                setattr(self, name, value)

    @property
    def is_task_step(self) -> bool:
        """Whether the turn is a step of the task, which discounts count."""
        return self.kind.is_task_step

    @property
    def trained(self) -> bool:
        """Whether the policy is trained on the response."""
        return self.kind.trained

    @property
    def reward(self) -> float:
        """Sum of the reward terms, in their order."""
        return float(sum(self.reward_terms.values()))


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """The turns of one episode and how it ended.

    Attributes:
        group: Index of the group in the iteration, the same on any number of ranks. In a game of several seats, that
            of the game's episodes times `seats`, plus the seat.
        member: Index in the group.
        seed: Seed of the environment's reset.
        turns: The turns played.
        status: How the episode ended.
        success: Whether the task was solved.
        difficulty: Difficulty of the initial state, where the environment has one.
        error: The environment's error, for `EpisodeStatus.FAILED`.
        cause: What that error is blamed on, where it is known.
        failed_after: Numbers of turns that earlier attempts at the episode had when they failed.
        replayed_turns: Number of turns that repeat those of an earlier attempt.
        system_prompt_length: Number of tokens of the system prompt, with which each prompt begins.
        initial_state_key: Key of the state that the episode began in, where it is recorded; the same for all seats.
        final_prompt_ids: Prompt of the state after the last turn, to bootstrap from.
        final_roles: Roles of its last ids, as `Turn.prompt_roles`.
        final_state_key: Key of the state after the last turn, where it is recorded.
        final_images: Images of that prompt.
        final_patches: Patches shown of each of those images; None for all.
        final_potential: Potential of that state, where it is recorded.
        environment: Name of the environment in a mixture; None where there is one environment.
        seat: The seat whose turns these are.
        seats: Number of seats of the game; 1 in an environment without several.
        seat_success: Whether each seat has solved its task, those without a turn too; empty where there is one seat, or
            no step has said so.
        opponent: Name of the earlier policy in the other seats, see `Opponents`; None where they are the present
            policy's, or there are none.
        user_errors: Errors in each turn of the episode's simulated user, who may have another seat; empty without one.
        is_user: Whether these are the simulated user's own turns.
    """

    group: int
    member: int
    seed: int
    turns: list[Turn]
    status: EpisodeStatus
    success: bool
    difficulty: int | None = None
    error: str | None = None
    cause: FailureCause | None = None
    failed_after: tuple[int, ...] = ()
    replayed_turns: int = 0
    system_prompt_length: int = 0
    initial_state_key: str | None = None
    final_prompt_ids: np.ndarray | None = None
    final_images: list[np.ndarray] = field(default_factory=list)
    final_patches: list[np.ndarray] | None = None
    final_roles: np.ndarray | None = None
    final_state_key: str | None = None
    final_potential: float | None = None
    environment: str | None = None
    seat: int = 0
    seats: int = 1
    seat_success: list[bool] = field(default_factory=list)
    opponent: str | None = None
    user_errors: list[list[str]] = field(default_factory=list)
    is_user: bool = False

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        # as in `Turn`
        added: dict[str, Any] = {"cause": None, "failed_after": (), "replayed_turns": 0}
        added |= {"seat": 0, "seats": 1, "opponent": None, "user_errors": [], "is_user": False}
        added |= {"seat_success": [], "initial_state_key": None}
        added |= dict.fromkeys(("final_roles", "final_state_key", "final_potential", "environment"))
        for name, value in (added | state[1]).items():
            setattr(self, name, value)

    @property
    def game(self) -> int:
        """Index of the group of games, which its seats share; `group` where there is one seat."""
        return self.group // self.seats

    @property
    def user_erred(self) -> bool:
        """Whether the episode's simulated user has made an error."""
        return any(self.user_errors)

    @property
    def says_success(self) -> bool | None:
        """Whether an environment said whether the task is solved; None where no actions were carried out."""
        # also of a last response that is not valid
        if any(turn.success is not None for turn in self.turns):
            return True
        return False if any(turn.actions for turn in self.turns) else None

    @property
    def is_silent(self) -> bool:
        """Whether no step has said whether the task is solved, and one could.

        The last step, which a truncated episode lacks, may be the only one to say so.
        """
        return self.says_success is False and self.status is not EpisodeStatus.TRUNCATED

    @property
    def reward(self) -> float:
        """Undiscounted return: the sum of the turns' rewards, the same in any order of them."""
        return math.fsum(turn.reward for turn in self.turns)


# of a turn's pickle, what earlier versions lack
_LATER = (
    "kept_ids",
    "kept_counts",
    "response_values",
    "prompt_roles",
    "potential",
    "teacher_prompt_ids",
    "teacher_images",
)
# of a turn's pickle in an earlier version
_FORMER = ("advances", "trained", "call_id", "history")


def _former_kind(state: Mapping[str, Any]) -> TurnKind:
    """Return the kind of a turn from the state of an earlier version, which had no kinds."""
    is_task_step, trained = state.get("advances", True), state.get("trained", True)
    call_id, history = state.get("call_id"), state.get("history")
    if call_id is not None or history is not None or not trained:
        return ProgramCall(
            call_id=call_id or "", history=history, is_task_step=is_task_step, trained=trained
        )
    return Action() if is_task_step else Summary()


def add_terms(turn: Turn, terms: Mapping[str, float]) -> None:
    """Add reward terms to those of a turn."""
    for name, value in terms.items():
        turn.reward_terms[name] = turn.reward_terms.get(name, 0.0) + value
