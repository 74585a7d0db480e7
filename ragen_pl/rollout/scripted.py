"""Scripted policies as responders: demonstrations, and the metrics of random and optimal play."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np

from ragen_pl.base.error_text import error_text
from ragen_pl.base.prompt_formats import BLOCKS, REASONING, format_response, with_plan
from ragen_pl.environments.members import EnvironmentMembers
from ragen_pl.prompts.parsing import named_actions
from ragen_pl.prompts.spatial_relations import relations_text
from ragen_pl.rollout.responders import TextResponder
from ragen_pl.rollout.turns import Episode


class ScriptedPolicy(Protocol):
    """Chooses actions by rule."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
        """Return the next action in the environment's present state: the index of a named one, or free text.

        An empty text makes a response without a valid action.
        """
        ...


@dataclass(kw_only=True, slots=True)
class ScriptedResponder(TextResponder):
    """A scripted policy that writes responses as a model would.

    Its reasoning is the environment's description of the present state, and its plan where it has one. Its
    observation names the relations of that state; its prediction names those after the action, by the environment's
    rules with chance drawn anew.

    Attributes:
        policy: Chooses the actions.
    """

    policy: ScriptedPolicy

    def respond(self, episode: Episode) -> str | None:
        """Return the policy's action and, in formats that ask for it, statements about the state.

        A policy that raises fails its own episode.
        """
        try:
            return self._response(episode)
        except Exception as error:  # any of a user's policy
            episode.trajectory.error = f"{type(self.policy).__name__}: {error_text(error)}"
            return None

    def _response(self, episode: Episode) -> str:
        slot = episode.slot
        if not episode.turn.acts:
            return slot.state_description or ""
        rng = np.random.Generator(np.random.Philox(key=episode.seed))
        action = self.policy.act(slot.env, rng)
        reasoning = with_plan(slot.state_description, slot.members.plan())
        native = episode.conversation.native
        if native is not None:
            return native.response_text(slot.action_text(action), reasoning=reasoning)
        texts = {REASONING: reasoning}
        for name in episode.prompt_format.statements:
            env = slot.env
            # an empty text is no action: nothing comes after it
            if BLOCKS[name].state == "after" and action != "":
                actions = [action]
                if isinstance(action, str):  # may name several
                    actions = named_actions(action, slot.action_names, max_actions=len(action))
                env = _after_actions(env.unwrapped, actions, rng=rng)
            texts[name] = _state_text(EnvironmentMembers(env))
        return format_response(episode.prompt_format, slot.action_text(action), blocks=texts)


def _state_text(members: EnvironmentMembers) -> str:
    """Return the relations of a state in words, or its description where it has none."""
    relations = members.relations()
    return relations_text(relations) if relations is not None else str(members.describe() or "")


def _after_actions(
    environment: Any, actions: Sequence[int | str], *, rng: np.random.Generator
) -> gymnasium.Env[Any, Any]:
    """Return a copy of an environment after actions, its random events drawn from `rng`.

    The copy does not foresee the environment's own random events.
    """
    spaces = (environment.action_space, environment.observation_space)
    copied: gymnasium.Env[Any, Any] = copy.deepcopy(
        environment, {id(space): space for space in spaces}
    )
    copied.np_random = rng
    for action in actions:
        _, _, terminated, truncated, _ = copied.step(action)
        if terminated or truncated:
            break
    return copied
