"""An environment and its episode behind the messages of OpenEnv (0.10), for a server.

    {"type": "reset", "data": {"seed": 7, "options": {…}}}                     -> observation
    {"type": "step", "data": {"message": "Left", "metadata": {"step": 1}}}     -> observation, or error
    {"type": "state"}                                                          -> state

A step that has a number is taken once: the number of the last one is answered with the stored answer. One with
`"forfeit": true` in its metadata ends the episode by the environment's `forfeit`. What the trainer
reads beside observation and reward travels in `metadata`: `members` of the environment with each reset, `state` and
`info` with each observation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NotRequired, TypeVar

import gymnasium
import numpy as np
from typing_extensions import TypedDict

from ragen_pl.base.constraints import CountOrZero
from ragen_pl.base.data_url import data_url
from ragen_pl.base.error_text import named_error
from ragen_pl.base.typed_json import OR_NONE, TypeFault, typed
from ragen_pl.environments.answers import AnswerReader
from ragen_pl.environments.causes import cause_of
from ragen_pl.environments.manager import CREATION_FACTOR
from ragen_pl.environments.members import EnvironmentMembers
from ragen_pl.environments.process import ProcessEnvironment
from ragen_pl.environments.workers import EnvironmentWorkers
from ragen_pl.prompts.parsing import action_indices
from ragen_pl.trajectory import FailureCause, Observation

T = TypeVar("T")
Message = dict[str, Any]
Maker = Callable[[], gymnasium.Env[Any, Any]]


class _Reset(TypedDict, total=False):
    seed: CountOrZero | None
    options: dict[str, Any] | None
    episode_id: Any


class _Step(TypedDict):
    message: str
    metadata: NotRequired[Annotated[dict[str, Any] | None, OR_NONE]]


class SessionBroken(ConnectionError):
    """Infrastructure has failed under an environment: its episode can go on in another one only."""


class _Refused(Exception):
    """A request that cannot be carried out, with one of OpenEnv's codes."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class HostedEnvironment:
    """An environment in a thread of its own. All methods block.

    Args:
        make: Makes the environment.
        target: gymnasium id or class path, for messages.
        timeout_s: Longest time of a reset or a step in seconds; ten times as long for the creation; None for no limit.

    Attributes:
        is_over: Whether no episode is under way.
        is_usable: Whether it can play another episode.
        steps: Number of steps taken, refused ones among them.
        repeated: Number of steps that were asked for again and answered without being taken.

    Raises:
        Exception: That of the constructor.
    """

    def __init__(self, make: Maker, *, target: str, timeout_s: float | None) -> None:
        self._workers: EnvironmentWorkers[Any] = EnvironmentWorkers(1, timeout_s=timeout_s)
        self._reader = AnswerReader(target=target)
        self.is_usable, self.is_over = True, True
        self.steps = self.repeated = 0
        self._number = 0
        self._answer: Message | None = None
        self._episode: object = None
        self._env = self._call(make, time_limit_factor=CREATION_FACTOR)
        self._members = EnvironmentMembers(self._env)

    def described(self) -> Message:
        """Return the members that do not depend on the state."""
        members: Message = self._call(self._described)
        return members

    def answer(self, request: Message) -> Message:
        """Return the answer to a request.

        Raises:
            SessionBroken: Infrastructure has failed; the environment is not usable any more.
        """
        kind, data = request.get("type"), request.get("data") or {}
        try:
            if kind == "reset":
                return self._reset(data)
            if kind == "step":
                return self._step(data)
            if kind == "state":
                state = {"episode_id": self._episode, "step_count": self._number}
                return {"type": "state", "data": state}
            raise _Refused("UNKNOWN_TYPE", f"found {kind!r}, expected reset, step, state or close")
        except _Refused as refusal:
            return error_message(refusal.code, str(refusal))
        except TypeFault as fault:
            return error_message("VALIDATION_ERROR", str(fault))
        except Exception as error:  # an environment may raise anything
            self.is_usable, self.is_over = False, True
            text = named_error(error)
            if cause_of(error) is FailureCause.INFRASTRUCTURE:
                raise SessionBroken(text) from error
            return error_message("EXECUTION_ERROR", text)

    def close(self) -> None:
        """Close the environment, or end its process; it may hang."""
        if isinstance(self._env, ProcessEnvironment):
            self._env.kill()
        else:
            # one that hangs is in its thread, where alone it could be closed
            self._workers.submit([(0, self._env.close)])

    def _reset(self, data: object) -> Message:
        given = typed(_Reset, data)
        self._answer, self._number, self._episode = None, 0, given.get("episode_id")
        answer: Message = self._call(partial(self._begun, given.get("seed"), given.get("options")))
        self.is_over = False
        return answer

    def _begun(self, seed: int | None, options: Mapping[str, Any] | None) -> Message:
        raw = self._reader.reset(self._env.reset(seed=seed, options=dict(options or {}) or None))
        if (seats := self._members.seats) > 1:
            raise ValueError(
                f"it has seats={seats}, and a server has one for each session; let the environment play the others, "
                "such as env.kwargs.opponent=random"
            )
        metadata = {"step": 0, "members": self._described(), "state": self._state()}
        return _observation(
            self._reader.observation(raw), reward=None, done=False, metadata=metadata
        )

    def _step(self, data: object) -> Message:
        given = typed(_Step, data)
        about = given.get("metadata") or {}
        number, forfeits = about.get("step"), about.get("forfeit") is True
        if number is not None and number == self._number and self._answer is not None:
            self.repeated += 1
            return self._answer
        if number is not None and number != self._number + 1:
            raise _Refused(
                "SESSION_ERROR", f"found step {number!r}, expected {self._number + 1} or a repeat"
            )
        if self.is_over:
            raise _Refused("SESSION_ERROR", "no episode is under way; send a reset first")
        self._number += 1
        self.steps += 1
        try:
            self._answer = self._call(partial(self._stepped, given["message"], forfeits=forfeits))
        except _Refused as refusal:
            self._answer = error_message(refusal.code, str(refusal))
            self._answer["data"]["metadata"] = {"step": self._number}
        self.is_over = bool(self._answer["data"].get("done"))
        return self._answer

    def _stepped(self, text: str, *, forfeits: bool) -> Message:
        answer: Any = self._members.forfeit(0) if forfeits else self._env.step(self._action(text))
        step = self._reader.step(answer)
        metadata = {
            "step": self._number,
            "success": bool(step.success),
            "action_is_valid": step.action_is_valid,
            "action_is_effective": step.action_is_effective,
            "truncated": step.truncated,
            "terminated": step.terminated,
            "info": plain(step.info),
            "state": self._state(),
        }
        if step.reward_parts is not None:
            metadata["reward_parts"] = dict(step.reward_parts)
        return _observation(
            self._reader.observation(step.raw),
            reward=float(answer[1]),
            done=step.terminated or step.truncated,
            metadata=metadata,
        )

    def _action(self, text: str) -> int | str:
        """Return the action of a text: the text itself, or the number of the action of that name."""
        names, longest = self._members.action_names, self._members.max_action_length
        if names is None:
            if longest is not None and len(text) > longest:
                raise _Refused(
                    "VALIDATION_ERROR", f"message: expected at most {longest} characters"
                )
            return text
        number = action_indices(tuple(names)).get(text.strip().casefold())
        if number is None:
            raise _Refused("VALIDATION_ERROR", f"message: expected one of {', '.join(names)}")
        return number

    def _described(self) -> Message:
        members = self._members
        return {
            "instructions": members.instructions,
            "rules": members.rules,
            "tool_schemas": plain(list(members.tool_schemas)),
            "action_names": None if members.action_names is None else list(members.action_names),
            "max_action_length": members.max_action_length,
            "reward_range": members.reward_range,
            "relation_names": list(members.relation_names),
            "has_relations": "relations" in dir(self._env.unwrapped),
            "has_forfeit": members.forfeits,
            "draws_held_out": members.draws_held_out,
            "format_penalty": members.format_penalty,
        }

    def _state(self) -> Message:
        members = self._members
        return {
            "state_key": members.state_key(),
            "description": members.describe(),
            "difficulty": members.difficulty(),
            "relations": plain(members.relations()),
        }

    def _call(self, job: Callable[[], T], *, time_limit_factor: float = 1.0) -> T:
        """Return the result of a call in the environment's thread, or raise its error."""
        (outcome,) = self._workers.run([(0, job)], time_limit_factor=time_limit_factor)
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, BaseException):
            raise RuntimeError(named_error(outcome))
        result: T = outcome
        return result


def error_message(code: str, text: str) -> Message:
    """Return an error as a message.

    Args:
        code: One of OpenEnv's codes.
        text: What went wrong.
    """
    return {"type": "error", "data": {"message": text, "code": code}}


def plain(value: object) -> Any:
    """Return a value as JSON can hold it; what it cannot hold as text.

    >>> plain({"at": np.arange(2), "by": {3}})
    {'at': [0, 1], 'by': '{3}'}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return str(value)


def _observation(
    observation: Observation, *, reward: float | None, done: bool, metadata: Message
) -> Message:
    content: Message = {"text": observation.text}
    if observation.images:
        content["images"] = [data_url(image) for image in observation.images]
    data = {"observation": content, "reward": reward, "done": done, "metadata": metadata}
    return {"type": "observation", "data": data}
