"""Plain data that flows from the rollout to the update: Observation, Turn, Trajectory.

Nothing here knows about tensors, tokenizers or environments, so that a trajectory can be pickled,
written as JSON and read by any part of the project.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np


class Span(IntEnum):
    """What a sampled token belongs to, by its place in `<think>…</think><answer>…</answer>`.

    Where the think block has an observation and a prediction of its own, `THINK` is the reasoning.
    """

    OTHER = 0
    THINK = 1
    ACTION = 2
    TAG = 3
    END = 4
    OBSERVATION = 5
    PREDICTION = 6
    SHOWN = (
        7  # not sampled: text between the responses, labelled only where it is trained on (RICO)
    )


class EpisodeStatus(StrEnum):
    """Why a trajectory ended.

    `TERMINATED` and `TURN_LIMIT` belong to the task (the agent is told the limit), `TRUNCATED` is a cut
    from outside (token budget, the environment's own truncation), `FAILED` an error of the environment.
    """

    TERMINATED = "terminated"
    TURN_LIMIT = "turn_limit"
    TRUNCATED = "truncated"
    FAILED = "failed"


Relation = tuple[str, int, int]
"""A thing's name, and how many rows below and columns to the right of the player it is."""


@dataclass(kw_only=True, slots=True)
class Statement:
    """What a response says of the environment's state, and what is true."""

    part: str  # "observation", of the state before the actions, or "prediction", of the one after them
    text: str
    truth: list[Relation]  # of the environment
    names: tuple[str, ...]  # things that the environment speaks of, present or not
    agreement: float  # F1 of the relations told, by rule
    score: float | None = None  # agreement beyond chance, by the judge; None where none was asked


@dataclass(kw_only=True, slots=True)
class Observation:
    """What the environment shows at the start of a turn."""

    text: str
    images: list[np.ndarray] = field(default_factory=list)  # each uint8 [height, width, 3]


@dataclass(kw_only=True, slots=True)
class Turn:
    """One observation and one response, with the exact tokens the policy saw and sampled."""

    observation: Observation
    prompt_ids: np.ndarray  # int64 [prompt]: all ids the engine was given, image slots expanded
    prompt_images: list[np.ndarray]  # images of the prompt's image slots, in order
    response_ids: (
        np.ndarray
    )  # int64 [response]: sampled ids, the sampled end-of-turn token included
    response_logprobs: np.ndarray  # float32 [response]: of the distribution sampled from
    response_entropy: float  # nats, mean over the response's tokens
    spans: np.ndarray  # int8 [response]: a Span per sampled token
    response_text: str
    think: str | None  # its reasoning; None where the response has no valid think block
    actions: list[str]  # names of the actions that were carried out
    action_is_valid: bool
    action_is_effective: bool
    hit_length_limit: bool  # the response hit its length limit before an end-of-turn token
    reward: float  # of this turn, the sum of its parts
    temperature: float
    info: dict[str, Any] = field(default_factory=dict)
    reward_terms: dict[str, float] = field(default_factory=dict)  # by name, see EnvironmentManager
    statements: list[Statement] = field(default_factory=list)  # in formats that ask for them
    prompt_patches: list[np.ndarray] | None = None  # that each image shows; None for all
    turns_left_out: tuple[int, ...] = ()  # turns of the window that the prompt does not show


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """The turns of one episode and how it ended."""

    group: int  # index of the group in the iteration, the same on any number of ranks
    member: int
    seed: int  # of the environment's reset
    turns: list[Turn]
    status: EpisodeStatus
    success: bool
    difficulty: int | None = None
    error: str | None = None  # of the environment, where ending is FAILED
    head: int = 0  # tokens of the system prompt, with which every prompt begins
    final_prompt_ids: np.ndarray | None = None  # the state after the last turn, to bootstrap from
    final_images: list[np.ndarray] = field(default_factory=list)
    final_patches: list[np.ndarray] | None = None

    @property
    def reward(self) -> float:
        """Undiscounted return: the sum of the turns' rewards."""
        return float(sum(turn.reward for turn in self.turns))
