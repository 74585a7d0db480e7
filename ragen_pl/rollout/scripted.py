"""Scripted policies in the policy's seat: demonstrations, and the metrics of random and optimal play."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np

from ragen_pl.rollout.engine import Generation, RolloutEngine
from ragen_pl.rollout.environments import EpisodeSpec
from ragen_pl.rollout.formats import OBSERVATION, PREDICTION, REASONING, format_response
from ragen_pl.rollout.proxy import AgentProxy, Episode
from ragen_pl.rollout.relations import tell
from ragen_pl.seeding import derive_seed
from ragen_pl.trajectory import Trajectory


class ScriptedPolicy(Protocol):
    """Chooses actions by rule."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return the index of the next action in the environment's present state."""
        ...


@dataclass(kw_only=True, slots=True)
class ScriptedProxy(AgentProxy):
    """Play with a scripted policy, writing its responses as the policy would.

    A response is in the run's prompt format. Its reasoning is the environment's true description of the
    present state, where it has one, its observation says where things are, its prediction where they
    would be after the player's action by the environment's rules (with chances drawn anew). Log-probs are 0.
    """

    scripted_policy: ScriptedPolicy

    def play(
        self, starts: Sequence[EpisodeSpec], *, seed_key: Sequence[int | str]
    ) -> list[Trajectory]:
        """Play one episode for each start; the player's draws come from `seed_key`, group, member and turn."""
        return self.rollout(_NoEngine(), starts, seed_key=seed_key)

    def _generate(
        self,
        engine: RolloutEngine,
        playing: list[Episode],
        seed_key: Sequence[int | str],
        greedy: bool,
    ) -> list[Generation]:
        return [self._response(episode, seed_key) for episode in playing]

    def _response(self, episode: Episode, seed_key: Sequence[int | str]) -> Generation:
        slot = episode.slot
        seed = derive_seed(*seed_key, slot.start.group, slot.start.member, slot.turn)
        rng = np.random.Generator(np.random.Philox(key=seed))
        action = self.scripted_policy.act(slot.env, rng)
        how = self.environments.prompt_format
        blocks = {REASONING: slot.truth or ""}
        if OBSERVATION in how.statements:
            blocks[OBSERVATION] = _where_things_are(slot.env.unwrapped)
        if PREDICTION in how.statements:
            blocks[PREDICTION] = _where_things_are(_stepped(slot.env.unwrapped, action, rng=rng))
        ids = self.context.encode_response(
            format_response(how, slot.action_names[action], blocks=blocks)
        )
        if len(ids) > self.max_response_tokens and how.statements:
            raise ValueError(
                f"a demonstration in format {how} has {len(ids)} tokens, more than "
                f"rollout.max_response_tokens={self.max_response_tokens}; raise it"
            )
        return Generation(
            ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            entropy=0.0,
            hit_length_limit=False,
            version=0,
        )


def _where_things_are(environment: Any) -> str:
    """Return a state in words: its relations, or its description where it has none."""
    if hasattr(environment, "relations"):
        return tell(environment.relations())
    return str(environment.describe()) if hasattr(environment, "describe") else ""


def _stepped(environment: Any, action: int, *, rng: np.random.Generator) -> Any:
    """Return a copy of an environment after an action, its chances drawn from `rng`: no oracle of what will come."""
    fixed = (environment.action_space, environment.observation_space)
    copied = copy.deepcopy(environment, {id(space): space for space in fixed})
    copied.np_random = rng
    copied.step(action)
    return copied


class _NoEngine:
    """Stands where a scripted policy needs no engine."""

    def submit(self, requests: Sequence[object], *, keep: bool) -> None:
        raise NotImplementedError("a scripted policy does not sample")

    def collect(self) -> list[tuple[int, Generation]]:
        return []

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def load_weights(self, version: int) -> None:
        """Do nothing: there are no weights."""

    def release(self) -> None:
        """Do nothing: there are no sessions."""
