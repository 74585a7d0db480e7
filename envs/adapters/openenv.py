"""Environments on OpenEnv servers, played over a WebSocket."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Annotated, Any

import gymnasium
import numpy as np
from annotated_types import Ge
from gymnasium import spaces

from envs.adapters.openenv_members import Members, image_of
from envs.adapters.openenv_session import (
    MAX_MESSAGE_MIB,
    Session,
    SessionLost,
    fetched,
    step_of,
)
from envs.base import Count, Environment, Observation, checked_arguments

log = logging.getLogger(__name__)
# The server's words for an action that it does not take, and for a session that it does not have.
_REFUSALS = frozenset({"VALIDATION_ERROR", "INVALID_JSON"})
_LOSSES = frozenset({"CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"})
_KEY = "RAGEN_PL_ENVIRONMENT_KEY"
_MIB = 1024 * 1024
# sessions that may be lost over one request
_MAX_LOSSES = 3
# seconds before a second look at all servers, doubled with each one up to the longest
_PAUSE_S, _LONGEST_S = 0.1, 2.0
# environments of this process, which begin at different servers, and servers that do not repeat episodes
_made = count(random.SystemRandom().randrange(1000))
_differing: set[str] = set()


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
    - `members`: whether they are servers of `ragen_pl.serve_environment`, which tell the members of their environment:
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
        self.urls = _addresses(urls)
        self.instructions = rules
        self.action_field, self.observation_field = action_field, observation_field
        self.example_actions, self.reset_data = tuple(example_actions), dict(reset or {})
        self.success_reward, self.timeout_s = success_reward, timeout_s
        self.connect_timeout_s, self.search_s = connect_timeout_s, search_s
        self.action_space: spaces.Space[Any] = spaces.Text(max_action_length)
        self.observation_space = spaces.Text(MAX_MESSAGE_MIB * _MIB)
        self.idle_limit_s, self.replay = idle_limit_s, replay
        self.replayed_steps = 0
        """Number of steps that were played again in new sessions."""
        self._session: Session | None = None
        self._next = next(_made)
        # messages since the reset, each with a digest of its answer
        self._episode: list[tuple[Mapping[str, Any], bytes]] = []
        self._is_numbered = self._has_failed = False
        self._shown, self._turn = "", 0
        self._members: Members | None = None
        if members:
            self._take_members(Members(self._about()))

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode.

        Raises:
            ConnectionError: no server answers.
            RuntimeError: it answers with an error.
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
        self._has_failed = False
        data = self._ask("reset", message)
        self._turn, self._over = 0, bool(data.get("done"))
        return self._observed(data), {}

    def step(self, action: int | str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Send an action.

        Raises:
            ConnectionError: no server answers, or none goes on with the episode.
            RuntimeError: it answers with an error that is not the action's.
        """
        text = self._text_of(action)
        self._turn += 1
        replayed = self.replayed_steps
        try:
            data = self._ask("step", self._action(text))
        except RefusedAction as error:
            return str(error), 0.0, False, False, {"success": False, "action_is_valid": False}
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
        if self.replayed_steps > replayed:
            info["replayed_steps"] = self.replayed_steps - replayed
        return shown, reward, terminated, truncated, info

    def close(self) -> None:
        """End the session."""
        self._disconnect()

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

    def relations(self) -> list[tuple[str, int, int]]:
        """Return the positions of things relative to the player, with `members`."""
        if self._members is None:
            raise NotImplementedError("the server tells no positions")
        return [(name, down, right) for name, down, right in self._members.state("relations")]

    def random_action(self, rng: np.random.Generator) -> int | str:
        """Return an action of a random policy; of texts one of `example_actions`."""
        if self.action_names:
            return int(rng.integers(len(self.action_names)))
        return self.example_actions[int(rng.integers(len(self.example_actions)))]

    def render(self) -> str:
        """Return the current observation (`render_mode="ansi"`)."""
        return self._shown

    def _about(self) -> Mapping[str, Any]:
        """Return the members of the environment on the servers.

        Raises:
            ConnectionError: no server answers.
            ValueError: it tells no members.
        """
        until = time.monotonic() + self.search_s
        for number in count():
            url = self._url()
            try:
                about = fetched(
                    f"{_http(url)}/metadata", timeout_s=self.connect_timeout_s, key=_key()
                )
            except ConnectionError as error:
                self._look_on(number, until, error)
                continue
            if not isinstance(about.get("members"), Mapping):
                raise ValueError(
                    f"members=true: {url} tells no members of its environment; set members=false, or serve it by "
                    "python -m ragen_pl.serve_environment"
                )
            return dict(about["members"])
        raise AssertionError

    def _take_members(self, members: Members) -> None:
        self._members = members
        self.instructions, self.rules = members.instructions, members.rules
        self.tool_schemas, self.reward_range = members.tool_schemas, members.reward_range
        self.relation_names, self.action_names = members.relation_names, members.action_names
        self.action_space = members.action_space

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
                f"{self._url()}: observation_field={self.observation_field}: found {fields}; name one of these"
            )
        return self._shown

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer; a lost session is replaced by a new one."""
        content, number = dict(data), None
        message = {"type": kind, "data": content}
        if kind == "reset":
            self._episode = []
        elif self._is_numbered:
            number = len(self._episode)
            given = content.get("metadata")
            content["metadata"] = (given if isinstance(given, dict) else {}) | {"step": number}
        try:
            answer = self._exchange(message, number)
        except (ConnectionError, RuntimeError):
            self._has_failed = True
            self._disconnect()
            raise
        if kind == "reset":
            self._is_numbered = step_of(answer) == 0
        self._episode.append((message, _digest(answer)))
        found = answer.get("data") or {}
        if answer.get("type") != "error":
            return dict(found)
        error, code = found.get("message", "unknown"), found.get("code", "UNKNOWN")
        if kind == "step" and code in _REFUSALS:
            raise RefusedAction(f"error: {error}")
        raise RuntimeError(f"{self._url()}: {error} ({code})")

    def _exchange(self, message: Mapping[str, Any], number: int | None) -> dict[str, Any]:
        """Return the answer to a message of the present episode, in a new session where the old one is lost."""
        is_reset = message["type"] == "reset"
        if self._has_failed:
            raise ConnectionResetError(f"{self._url()}: the server has ended the session")
        until, losses = time.monotonic() + self.search_s, 0
        for looks in count():
            asked = False
            try:
                session = self._session or self._connected()
                asked = True
                answer = session.ask(message, number=number)
                if (code := _code(answer)) in _LOSSES:
                    asked = code == "SESSION_ERROR"
                    raise SessionLost(f"{session.url}: {answer['data'].get('message')} ({code})")
                return answer
            except SessionLost as loss:
                had_one = self._session is not None and asked
                self._disconnect()
                losses += had_one
                if not is_reset and not self._replays:
                    raise
                if losses > _MAX_LOSSES:
                    raise
                log.debug("a session is lost: %s", loss)
                if had_one and losses == 1:
                    # the first one may have been lost in a pause: no reason to wait
                    continue
                self._look_on(looks, until, loss)
        raise AssertionError

    def _look_on(self, looks: int, until: float, error: ConnectionError) -> None:
        """Turn to the next server, after all of them with a pause; once it has taken too long, raise the error."""
        if time.monotonic() > until:
            raise error
        self._next += 1
        rounds = (looks + 1) // len(self.urls)
        if (looks + 1) % len(self.urls) == 0:
            longest = min(_LONGEST_S, _PAUSE_S * 2 ** min(rounds, 10))
            time.sleep(random.SystemRandom().uniform(0.5, 1.0) * longest)

    @property
    def _replays(self) -> bool:
        return self.replay and self._name not in _differing

    @property
    def _name(self) -> str:
        return json.dumps([self.urls, self.reset_data], default=str)

    def _connected(self) -> Session:
        """Return a new session in which the episode has been played up to now.

        Raises:
            SessionLost: there is none.
            ConnectionError: the episode goes differently there.
        """
        url = self._url()
        session = Session(
            url,
            timeout_s=self.timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            idle_limit_s=self.idle_limit_s,
            key=_key(),
        )
        self._session = session
        for number, (message, seen) in enumerate(self._episode):
            answer = session.ask(message, number=number if self._is_numbered else None)
            if (code := _code(answer)) in _LOSSES:
                raise SessionLost(f"{url}: {answer['data'].get('message')} ({code})")
            if _digest(answer) != seen:
                if self._name not in _differing:
                    _differing.add(self._name)
                    log.warning(
                        "%s: the same seed and actions have other answers in another session; episodes whose session "
                        "is lost are not replayed any more",
                        url,
                    )
                raise ConnectionError(
                    f"{url}: a new session answered differently after {number} of the same actions, so the episode "
                    "cannot go on"
                )
            self.replayed_steps += message["type"] == "step"
        return session

    def _url(self) -> str:
        return self.urls[self._next % len(self.urls)]

    def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(ConnectionError):
                session.close()


def _addresses(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of WebSockets.

    Raises:
        ValueError: there is none, or one is no address.
    """
    given = (urls,) if isinstance(urls, str) else tuple(urls)
    addresses = []
    for url in given:
        scheme, found, place = url.rstrip("/").partition("://")
        if not found or scheme not in ("http", "https", "ws", "wss"):
            raise ValueError(
                f"urls: found {url!r}, expected an address such as http://127.0.0.1:8000"
            )
        addresses.append(f"{scheme.replace('http', 'ws')}://{place}/ws")
    if not addresses:
        raise ValueError("urls: found none, expected addresses such as [http://127.0.0.1:8000]")
    return tuple(addresses)


def _http(url: str) -> str:
    """Return the address of a server by that of its WebSocket."""
    return "http" + url.removeprefix("ws").removesuffix("/ws")


def _key() -> str | None:
    return os.environ.get(_KEY) or None


def _code(answer: Mapping[str, Any]) -> str | None:
    """Return the code of an error, None for another answer."""
    return (answer.get("data") or {}).get("code") if answer.get("type") == "error" else None


def _digest(answer: Mapping[str, Any]) -> bytes:
    """Return a digest of an answer's episode, without metadata, which may hold times and names of sessions."""
    data = answer.get("data") or {}
    content = [
        answer.get("type"),
        *(data.get(name) for name in ("observation", "reward", "done", "code")),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
