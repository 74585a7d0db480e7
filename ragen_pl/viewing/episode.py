"""Playing one episode turn by turn, each turn told to a watcher as soon as it is over.

The agent plays through the rollout's own proxy, so that it sees and samples what it does in an evaluation.
Scripted policies and people need no model: their turns hold no tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ragen_pl.rollout.environments import (
    EnvironmentManager,
    EnvironmentSlot,
    EpisodeSpec,
    TurnResult,
)
from ragen_pl.rollout.parsing import ParsedResponse
from ragen_pl.rollout.proxy import AgentProxy, Episode
from ragen_pl.trajectory import EpisodeStatus, Observation, Trajectory, Turn

Watch = Callable[[Turn], None]
Choose = Callable[[EnvironmentSlot], list[int] | None]
"""Returns the turn's actions for the present state; None to stop playing."""


@dataclass(kw_only=True, slots=True)
class WatchedProxy(AgentProxy):
    """Plays with the policy and tells `watch` of each turn."""

    watch: Watch

    def _go_on(self, episode: Episode, turn: Turn, result: TurnResult) -> None:
        AgentProxy._go_on(self, episode, turn, result)
        if result.status is not None and result.observation is not None:
            episode.trajectory.final_images = result.observation.images
        self.watch(turn)


def play_by_hand(
    environments: EnvironmentManager,
    start: EpisodeSpec,
    *,
    choose: Choose,
    watch: Watch,
    thinks: bool = True,
) -> Trajectory:
    """Play an episode with actions that come from no model.

    Args:
        environments: what is played in.
        start: which episode.
        choose: says the actions of each turn.
        watch: is told of each turn.
        thinks: let a turn's think block be the environment's description of its state.

    Raises:
        RuntimeError: the environment can't be reset.
    """
    (slot,) = environments.open([start])
    if slot.error is not None:
        raise RuntimeError(slot.error)
    trajectory = Trajectory(
        group=start.group, member=start.member, seed=start.seed, turns=[],
        status=EpisodeStatus.TRUNCATED, success=False, difficulty=slot.difficulty,
    )  # fmt: skip
    result = TurnResult()
    while result.status is None:
        seen, truth = slot.observation, slot.truth if thinks else None
        assert seen is not None
        actions = choose(slot)
        if actions is None:
            break
        (result,) = environments.step([slot], [ParsedResponse(think=truth, actions=actions)])
        turn = _turn(slot, seen, actions=actions, truth=truth, result=result)
        trajectory.turns.append(turn)
        trajectory.success, trajectory.error = result.success, result.error
        trajectory.status = result.status or trajectory.status
        if result.observation is not None:
            trajectory.final_images = result.observation.images
        watch(turn)
    environments.close([slot])
    return trajectory


def _turn(
    slot: EnvironmentSlot,
    seen: Observation,
    *,
    actions: list[int],
    truth: str | None,
    result: TurnResult,
) -> Turn:
    answer = " || ".join(slot.action_names[action] for action in actions)
    nothing = np.zeros(0)
    return Turn(
        observation=Observation(text=seen.text, images=seen.images),
        prompt_ids=nothing.astype(np.int64),
        prompt_images=[],
        response_ids=nothing.astype(np.int64),
        response_logprobs=nothing.astype(np.float32),
        response_entropy=0.0,
        spans=nothing.astype(np.int8),
        response_text=f"<answer>{answer}</answer>",
        think=truth,
        actions=result.carried_out,
        action_is_valid=True,
        action_is_effective=result.effective,
        hit_length_limit=False,
        reward=result.reward,
        temperature=1.0,
        info=result.info,
    )
