"""Environments on OpenEnv servers, played over a WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import aiohttp
import numpy as np
from annotated_types import Ge
from gymnasium import spaces

from envs.base import Count, Environment, Observation, checked_arguments

# The server's words for an action that it does not take.
_REFUSALS = frozenset({"VALIDATION_ERROR", "INVALID_JSON"})
_MIB = 1024 * 1024
_MAX_MESSAGE_MIB = 100


class RefusedAction(Exception):
    """The server does not take an action; with its reason."""


class OpenEnv(Environment):
    """Play an environment on an OpenEnv server.

    ## Description
    One environment holds one session. It speaks the WebSocket protocol of the library openenv: a message is
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
    - `rules`: instructions in full sentences.
    - `example_actions`: actions from which a random player chooses.
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
        self.observation_space = spaces.Text(_MAX_MESSAGE_MIB * _MIB)
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
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
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._disconnect())
            self._loop.close()

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
        """Send a message and return the data of its answer."""
        try:
            answer = self._loop.run_until_complete(
                self._exchange({"type": kind, "data": dict(data)})
            )
        except (aiohttp.ClientError, OSError, TimeoutError, TypeError, ValueError) as error:
            self._loop.run_until_complete(self._disconnect())
            raise ConnectionError(f"{self.url}: {type(error).__name__}: {error}") from error
        found = answer.get("data") or {}
        if answer.get("type") != "error":
            return dict(found)
        message, code = found.get("message", "unknown"), found.get("code", "UNKNOWN")
        if kind == "step" and code in _REFUSALS:
            raise RefusedAction(f"error: {message}")
        raise RuntimeError(f"{self.url}: {message} ({code})")

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(self.timeout_s):
            # a new episode begins a new connection where the old one is lost
            if self._socket is None or self._socket.closed:
                if message["type"] != "reset":
                    raise ConnectionResetError("the server has ended the session")
                await self._disconnect()
                self._session = aiohttp.ClientSession()
                self._socket = await self._session.ws_connect(
                    self.url, max_msg_size=_MAX_MESSAGE_MIB * _MIB
                )
            await self._socket.send_json(message)
            answer: dict[str, Any] = await self._socket.receive_json()
        return answer

    async def _disconnect(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()
        self._session = self._socket = None
