"""Scripted players in the policy's seat: demonstrations, and the figures of random and optimal play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np

from ragen_pl.rollout.engine import Generation, RolloutEngine
from ragen_pl.rollout.environments import Start
from ragen_pl.rollout.proxy import AgentProxy, Episode
from ragen_pl.seeding import derive_seed
from ragen_pl.trajectory import Trajectory


class Player(Protocol):
    """Chooses actions by rule."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return the index of the next action in the environment's present state."""
        ...


@dataclass(kw_only=True, slots=True)
class ScriptedProxy(AgentProxy):
    """Play with a scripted player, writing its replies as the policy would.

    A reply is the environment's true description of the present state as the think block, where it
    has one, and the player's action. Log-probs are 0.
    """

    player: Player

    def play(self, starts: Sequence[Start], *, seed_key: Sequence[int | str]) -> list[Trajectory]:
        """Play one episode for each start; the player's draws come from `seed_key`, group, member and turn."""
        return self.rollout(_NoEngine(), starts, seed_key=seed_key)

    def _generate(
        self,
        engine: RolloutEngine,
        playing: list[Episode],
        seed_key: Sequence[int | str],
        greedy: bool,
    ) -> list[Generation]:
        return [self._reply(episode, seed_key) for episode in playing]

    def _reply(self, episode: Episode, seed_key: Sequence[int | str]) -> Generation:
        lane = episode.lane
        seed = derive_seed(*seed_key, lane.start.group, lane.start.member, lane.turn)
        action = self.player.act(lane.env, np.random.Generator(np.random.Philox(key=seed)))
        spoken = lane.truth is not None or self.environments.require_think
        think = f"<think>{lane.truth or ''}</think>" if spoken else ""
        ids = self.context.encode_reply(f"{think}<answer>{lane.action_names[action]}</answer>")
        return Generation(ids=ids, logprobs=np.zeros(len(ids), np.float32), entropy=0.0, cut=False)


class _NoEngine:
    """Stands where a scripted player needs no engine."""

    def generate(self, requests: Sequence[object], *, keep: bool) -> list[Generation]:
        raise NotImplementedError("a scripted player does not sample")

    def sync_weights(self, version: int) -> None:
        """Do nothing: there are no weights."""

    def release(self) -> None:
        """Do nothing: there are no sessions."""
