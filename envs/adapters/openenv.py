"""Environments on OpenEnv servers, played over a WebSocket."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import gymnasium
import numpy as np
from annotated_types import Ge
from gymnasium import spaces

from ..adapters.openenv_episode import ServedEpisode
from ..adapters.openenv_members import Members, image_of
from ..adapters.openenv_session import MAX_MESSAGE_MIB, worded
from ..base import Count, Environment, Observation, checked_arguments

# The server's words for an action that it does not take.
_REFUSALS = frozenset({"VALIDATION_ERROR", "INVALID_JSON"})
_MIB = 1024 * 1024


class RefusedAction(Exception):
    """The server does not take an action; with its reason."""


class OpenEnv(Environment):
    """Play an environment on OpenEnv servers.

    ## Description
    One environment holds one session, which answers the server's pings at all times. It speaks the WebSocket protocol
    of the library openenv: a message is
    `{"type": "reset", "data": {"seed": 7}}` or `{"type": "step", "data": <action>}`, an answer
    `{"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false, "metadata": {...}}}`.
    The library's HTTP endpoints (0.10) make an environment for each request, and so hold no episode.

    A session that is lost is replaced by one on the next server, where the episode is played again: the same seed, the
    actions so far, and each answer is compared with the one before. Servers of `ragen_pl.serve_environment` number the
    steps and take each once.

    ## Action Space
    `Text(max_action_length)`: text that the action holds in `action_field`, or a whole action as JSON where that is
    null. With `members` that of the environment on the server.

    ## Observation Space
    `Text`: `observation_field` of the observation, or all of it as JSON where that is null. With `members` text, or
    text with images.

    ## Starting State
    As the server draws it from the seed.

    ## Rewards, Episode End
    Those of the server; an episode ends where it says `done`.

    ## Information
    `success`: `success` in the server's metadata, otherwise a last reward of at least `success_reward`.
    `action_is_valid`: false for an action that the server's types do not allow. `reward_parts`: those of the metadata.
    With `members` all that the environment's step returned. `replayed_steps`: steps that were played again before this
    one, where there are any.

    ## Arguments
    - `urls`: addresses of servers with the same environment, such as `[http://127.0.0.1:8000]`.
    - `members`: whether they are servers of `ragen_pl.serve_environment`, which give the members of their environment:
      action names, instructions, state keys and others are then those, and `rules`, `action_field`,
      `observation_field`, `success_reward` and `max_action_length` have no effect.
    - `reset`: data of each reset beside the seed. `timeout_s`: longest wait for an answer, after which a numbered step
      is asked for once more. `connect_timeout_s`: longest wait for a connection.
    - `search_s`: seconds in which a server is looked for where none answers or all are full.
    - `idle_limit_s`: seconds without a request after which the server gives a session up (`session_timeout` of the
      library); null where it never does, or closes the socket.
    - `replay`: whether an episode whose session is lost goes on in a new one; otherwise the episode fails.
    - `rules`: instructions in full sentences.
    - `example_actions`: actions from which a random policy chooses.
    """

    needs_trust = ("urls",)

    relations: Callable[[], list[tuple[str, int, int]]]
    """Positions of things relative to the player, where the server gives them."""

    forfeit: Callable[[int], tuple[Observation, float, bool, bool, dict[str, Any]]]
    """End of an episode after a response without a valid action, where the environment on the server has one."""

    draws_held_out = False
    format_penalty: float | None = None

    @checked_arguments
    def __init__(
        self,
        *,
        urls: Sequence[str],
        members: bool = False,
        rules: str = "",
        action_field: str | None = "message",
        observation_field: str | None = None,
        example_actions: Sequence[str] = ("hello",),
        reset: Mapping[str, Any] | None = None,
        success_reward: float = 1.0,
        timeout_s: Annotated[float, Ge(1e-3)] = 30.0,
        connect_timeout_s: Annotated[float, Ge(1e-3)] = 10.0,
        search_s: Annotated[float, Ge(0)] = 30.0,
        idle_limit_s: Annotated[float, Ge(1e-3)] | None = None,
        replay: bool = True,
        max_action_length: Count = 4000,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.instructions = rules
        self.action_field, self.observation_field = action_field, observation_field
        self.example_actions, self.reset_data = tuple(example_actions), dict(reset or {})
        self.success_reward = success_reward
        self.action_space: spaces.Space[Any] = spaces.Text(max_action_length)
        self.observation_space = spaces.Text(MAX_MESSAGE_MIB * _MIB)
        self._episode = ServedEpisode(
            urls,
            name=json.dumps(self.reset_data, default=str),
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            search_s=search_s,
            idle_limit_s=idle_limit_s,
            replay=replay,
        )
        self._shown, self._turn = "", 0
        self._members: Members | None = None
        if members:
            self._take_members(Members(self._constant_members()))

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode.

        Raises:
            ConnectionError: No server answers.
            RuntimeError: It answers with an error.
        """
        message = dict(self.reset_data)
        if self._members is None:
            self._begin(seed=seed, options=options)
            message["seed"] = int(self.np_random.integers(2**31))
        else:
            gymnasium.Env.reset(self, seed=seed)
            self._over, self.steps = False, 0
            drawn = int(self.np_random.integers(2**31)) if seed is None else seed
            message |= {"seed": drawn} | ({"options": dict(options)} if options else {})
        data = self._ask("reset", message)
        self._turn, self._over = 0, bool(data.get("done"))
        return self._observed(data), {}

    def step(self, action: int | str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Send an action.

        Raises:
            ConnectionError: No server answers, or none goes on with the episode.
            RuntimeError: It answers with an error that is not the action's.
        """
        text = self._text_of(action)
        self._turn += 1
        try:
            return self._taken(self._action(text))
        except RefusedAction as error:
            return str(error), 0.0, False, False, {"success": False, "action_is_valid": False}

    def _forfeit(self, seat: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._take_text("")
        self._turn += 1
        return self._taken({"message": "", "metadata": {"forfeit": True}})

    def _taken(
        self, action: Mapping[str, Any]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Send a step and return its result."""
        replayed = self._episode.replayed_steps
        data = self._ask("step", action)
        shown, self._over = self._observed(data), bool(data.get("done"))
        reward, metadata = float(data.get("reward") or 0.0), data.get("metadata") or {}
        truncated = False
        if self._members is not None:
            info, truncated = dict(metadata.get("info") or {}), bool(metadata.get("truncated"))
            terminated = bool(metadata.get("terminated"))
        else:
            terminated = self._over
            won = terminated and reward >= self.success_reward
            info = {
                "success": bool(metadata.get("success", won)),
                "action_is_valid": bool(metadata.get("action_is_valid", True)),
            }
            if "reward_parts" in metadata:
                info["reward_parts"] = metadata["reward_parts"]
        if self._episode.replayed_steps > replayed:
            info["replayed_steps"] = self._episode.replayed_steps - replayed
        return shown, reward, terminated, truncated, info

    def close(self) -> None:
        """End the session."""
        self._episode.close()

    @property
    def replays(self) -> bool:
        """Whether an episode goes on where its session is lost: none does after servers have answered differently."""
        return self._episode.replays

    def state_key(self) -> str:
        """Return the observation where the server's state is not known, and otherwise its key."""
        return self._shown if self._members is None else self._members.state("state_key")

    def describe(self) -> str:
        """Return the number of this turn (`turn 2`), with `members` the environment's description."""
        if self._members is not None:
            return self._members.state("description")
        return f"turn {self._turn + 1}"

    def difficulty(self) -> int:
        """Return 1, since the episodes of a server count as equally hard; with `members` that of the environment."""
        return 1 if self._members is None else self._members.state("difficulty")

    def random_action(self, rng: np.random.Generator) -> int | str:
        """Return an action of a random policy; of texts one of `example_actions`."""
        if self.action_names:
            return int(rng.integers(len(self.action_names)))
        return self.example_actions[int(rng.integers(len(self.example_actions)))]

    def render(self) -> str:
        """Return the current observation (`render_mode="ansi"`)."""
        return self._shown

    def _constant_members(self) -> Mapping[str, Any]:
        """Return the members of the environment on the servers that do not depend on the state.

        Raises:
            ConnectionError: No server answers.
            ValueError: It gives no members.
        """
        members = self._episode.about().get("members")
        if isinstance(members, Mapping):
            return members
        raise ValueError(
            f"members=true: {self._episode.url} gives no members of its environment; set members=false, or serve it by "
            "python -m ragen_pl.serve_environment"
        )

    def _take_members(self, members: Members) -> None:
        self._members = members
        self.instructions, self.rules = members.instructions, members.rules
        self.tool_schemas, self.reward_range = members.tool_schemas, members.reward_range
        self.relation_names, self.action_names = members.relation_names, members.action_names
        self.action_space = members.action_space
        if members.has_relations:
            # formats and checks ask whether there is such a method
            self.relations = members.relations
        if members.has_forfeit:
            self.forfeit = self._forfeit
        self.draws_held_out, self.format_penalty = members.draws_held_out, members.format_penalty

    def _text_of(self, action: int | str) -> str:
        if isinstance(action, str):
            return self._take_text(action)
        return self.action_names[self._take(action)]

    def _action(self, text: str) -> dict[str, Any]:
        if self._members is not None:
            return {"message": text}
        if self.action_field is not None:
            return {self.action_field: text}
        try:
            action = json.loads(text)
        # deep nesting, numbers of many digits
        except (ValueError, RecursionError):
            raise RefusedAction("error: expected a JSON object") from None
        if not isinstance(action, dict):
            raise RefusedAction("error: expected a JSON object")
        return action

    def _observed(self, data: Mapping[str, Any]) -> Observation:
        """Return the observation of an answer, and keep its text and the state."""
        observation = data.get("observation")
        if self._members is not None:
            if not isinstance(observation, Mapping):
                raise RuntimeError(f"found {observation!r}, expected an observation with text")
            self._members.update((data.get("metadata") or {}).get("state") or {})
            self._shown = str(observation.get("text"))
            images = observation.get("images")
            if images:
                return {"text": self._shown, "images": [image_of(one) for one in images]}
            return self._shown
        if self.observation_field is None:
            self._shown = json.dumps(observation, ensure_ascii=False)
        elif isinstance(observation, Mapping) and self.observation_field in observation:
            self._shown = str(observation[self.observation_field])
        else:
            fields = sorted(observation) if isinstance(observation, Mapping) else observation
            raise RuntimeError(
                f"{self._episode.url}: observation_field={self.observation_field}: found {fields}; name one of these"
            )
        return self._shown

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer."""
        answer = self._episode.ask(kind, data)
        found = answer.get("data") or {}
        if answer.get("type") != "error":
            return dict(found)
        if kind == "step" and found.get("code") in _REFUSALS:
            raise RefusedAction(f"error: {found.get('message', 'unknown')}")
        raise RuntimeError(f"{self._episode.url}: {worded(answer)}")
