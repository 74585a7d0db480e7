"""Environments on OpenEnv servers, played over a WebSocket."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from gymnasium import spaces

from envs.adapters.openenv_session import MAX_MESSAGE_MIB, Session, SessionLost
from envs.base import Count, Environment, Observation, checked_arguments

# The server's words for an action that it does not take.
_REFUSALS = frozenset({"VALIDATION_ERROR", "INVALID_JSON"})
_MIB = 1024 * 1024


class RefusedAction(Exception):
    """The server does not take an action; with its reason."""


class OpenEnv(Environment):
    """Play an environment on an OpenEnv server.

    ## Description
    One environment holds one session, which answers the server's pings at all times. It speaks the WebSocket protocol
    of the library openenv: a message is
    `{"type": "reset", "data": {"seed": 7}}` or `{"type": "step", "data": <action>}`, an answer
    `{"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false, "metadata": {...}}}`.
    The library's HTTP endpoints (0.10) make an environment for each request, and so hold no episode.

    ## Action Space
    `Text(max_action_length)`: text that the action holds in `action_field`, or a whole action as JSON where that is
    null.

    ## Observation Space
    `Text`: `observation_field` of the observation, or all of it as JSON where that is null.

    ## Starting State
    As the server draws it from the seed.

    ## Rewards, Episode End
    Those of the server; an episode ends where it says `done`.

    ## Information
    `success`: `success` in the server's metadata, otherwise a last reward of at least `success_reward`.
    `action_is_valid`: false for an action that the server's types do not allow. `reward_parts`: those of the metadata.

    ## Arguments
    - `url`: address of the server, such as `http://127.0.0.1:8000`.
    - `reset`: data of each reset beside the seed. `timeout_s`: longest wait for an answer.
    - `idle_limit_s`: seconds without a request after which the server gives a session up (`session_timeout` of the
      library); null where it never does.
    - `replay`: whether an episode whose session is lost goes on in a new one, where its actions are played again and
      the answers compared; otherwise the episode fails.
    - `rules`: instructions in full sentences.
    - `example_actions`: actions from which a random policy chooses.
    """

    @checked_arguments
    def __init__(
        self,
        *,
        url: str,
        rules: str = "",
        action_field: str | None = "message",
        observation_field: str | None = None,
        example_actions: Sequence[str] = ("hello",),
        reset: Mapping[str, Any] | None = None,
        success_reward: float = 1.0,
        timeout_s: Annotated[float, Ge(1e-3)] = 30.0,
        idle_limit_s: Annotated[float, Ge(1e-3)] | None = None,
        replay: bool = True,
        max_action_length: Count = 4000,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        scheme, found, place = url.rstrip("/").partition("://")
        if not found or scheme not in ("http", "https", "ws", "wss"):
            raise ValueError(
                f"url: found {url!r}, expected an address such as http://127.0.0.1:8000"
            )
        self.url = f"{scheme.replace('http', 'ws')}://{place}/ws"
        self.instructions = rules
        self.action_field, self.observation_field = action_field, observation_field
        self.example_actions, self.reset_data = tuple(example_actions), dict(reset or {})
        self.success_reward, self.timeout_s = success_reward, timeout_s
        self.action_space = spaces.Text(max_action_length)
        self.observation_space = spaces.Text(MAX_MESSAGE_MIB * _MIB)
        self.idle_limit_s, self.replay = idle_limit_s, replay
        self._session: Session | None = None
        # messages since the reset, each with a digest of its answer
        self._episode: list[tuple[Mapping[str, Any], bytes]] = []
        self._shown, self._turn = "", 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode.

        Raises:
            ConnectionError: the server does not answer.
            RuntimeError: it answers with an error.
        """
        self._begin(seed=seed, options=options)
        drawn = int(self.np_random.integers(2**31))
        data = self._ask("reset", {**self.reset_data, "seed": drawn})
        self._turn, self._over = 0, bool(data.get("done"))
        self._shown = self._text(data)
        return self._shown, {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Send an action.

        Raises:
            ConnectionError: the server does not answer.
            RuntimeError: it answers with an error that is not the action's.
        """
        text = self._take_text(action)
        self._turn += 1
        try:
            data = self._ask("step", self._action(text))
        except RefusedAction as error:
            return str(error), 0.0, False, False, {"success": False, "action_is_valid": False}
        self._shown, self._over = self._text(data), bool(data.get("done"))
        reward, metadata = float(data.get("reward") or 0.0), data.get("metadata") or {}
        won = self._over and reward >= self.success_reward
        info = {
            "success": bool(metadata.get("success", won)),
            "action_is_valid": bool(metadata.get("action_is_valid", True)),
        }
        if "reward_parts" in metadata:
            info["reward_parts"] = metadata["reward_parts"]
        return self._shown, reward, self._over, False, info

    def close(self) -> None:
        """End the session."""
        self._disconnect()

    def state_key(self) -> str:
        """Return the observation: the server's state is not known."""
        return self._shown

    def describe(self) -> str:
        """Return the number of this turn: `turn 2`."""
        return f"turn {self._turn + 1}"

    def difficulty(self) -> int:
        """Return 1: the episodes of a server count as equally hard."""
        return 1

    def random_action(self, rng: np.random.Generator) -> str:
        """Return one of `example_actions`."""
        return self.example_actions[int(rng.integers(len(self.example_actions)))]

    def render(self) -> str:
        """Return the current observation (`render_mode="ansi"`)."""
        return self._shown

    def _action(self, text: str) -> dict[str, Any]:
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

    def _text(self, data: Mapping[str, Any]) -> str:
        observation = data.get("observation")
        if self.observation_field is None:
            return json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, Mapping) or self.observation_field not in observation:
            fields = sorted(observation) if isinstance(observation, Mapping) else observation
            raise RuntimeError(
                f"{self.url}: observation_field={self.observation_field}: found {fields}; name one of these"
            )
        return str(observation[self.observation_field])

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer; a lost session is replaced by a new one."""
        message = {"type": kind, "data": dict(data)}
        try:
            answer = self._exchange(message)
        except ConnectionError:
            self._disconnect()
            raise
        self._episode.append((message, _digest(answer)))
        found = answer.get("data") or {}
        if answer.get("type") != "error":
            return dict(found)
        error, code = found.get("message", "unknown"), found.get("code", "UNKNOWN")
        if kind == "step" and code in _REFUSALS:
            raise RefusedAction(f"error: {error}")
        raise RuntimeError(f"{self.url}: {error} ({code})")

    def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        is_reset = message["type"] == "reset"
        if is_reset:
            self._episode = []
            if self._session is None or self._session.is_lost:
                self._connect()
        if self._session is None:
            raise ConnectionResetError(f"{self.url}: the server has ended the session")
        try:
            return self._session.ask(message)
        except SessionLost as loss:
            if not (self.replay or is_reset):
                raise
            self._connect()
            self._replay(loss)
            return self._session.ask(message)

    def _replay(self, loss: SessionLost) -> None:
        """Play the episode up to now in the new session.

        Raises:
            ConnectionError: it goes differently there.
        """
        assert self._session is not None
        for number, (message, seen) in enumerate(self._episode):
            if _digest(self._session.ask(message)) != seen:
                raise ConnectionError(
                    f"{loss}; a new session answered differently after {number} of the same actions, so the episode "
                    "cannot go on"
                )

    def _connect(self) -> None:
        self._disconnect()
        self._session = Session(self.url, timeout_s=self.timeout_s, idle_limit_s=self.idle_limit_s)

    def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(ConnectionError):
                session.close()


def _digest(answer: Mapping[str, Any]) -> bytes:
    """Return a digest of an answer's episode, without metadata, which may hold times and names of sessions."""
    data = answer.get("data") or {}
    content = [
        answer.get("type"),
        *(data.get(name) for name in ("observation", "reward", "done", "code")),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
