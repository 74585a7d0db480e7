"""Reader of the values that environments return from `reset` and `step`, with a check of each.

A value of another type than the protocol asks for is refused and never guessed at: the text "no" is not false. The
error names what was found and what was expected, and costs the episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

import numpy as np
from PIL import Image

from ragen_pl.base.rgb import rgb_array
from ragen_pl.trajectory import MAX_REWARD, REWARD_PART, AnswerOutcome, ChatRequest, Observation

# of a declared range of rewards, for rounding
_TOLERANCE = 1e-6
_GRAY = 128
# truth values, whole numbers and floats of numpy
_NUMBERS = "biuf"


@dataclass(slots=True, kw_only=True)
class Step:
    """Values of a step.

    Attributes:
        raw: Observation, not read yet.
        reward: The reward.
        reward_parts: Its named parts; None where the environment names none.
        terminated: Whether the task ended.
        truncated: Whether an external limit was reached.
        success: Whether the task is solved; None where the environment does not say so.
        action_is_valid: Whether the rules allow the action.
        action_is_effective: Whether the action changed the state.
        answer: What came of the answer to a program's request.
        info: What came in addition.
        seat_rewards: Reward of each seat, empty where there is one.
        seat_success: Whether each seat has solved its task.
        user_errors: Errors of the simulated user in its turn; None in a step without a turn of one.
    """

    raw: object
    reward: float
    reward_parts: Mapping[str, float] | None
    terminated: bool
    truncated: bool
    success: bool | None
    action_is_valid: bool
    action_is_effective: bool
    answer: AnswerOutcome
    info: dict[str, Any]
    seat_rewards: Sequence[float] = ()
    seat_success: Sequence[bool] = ()
    user_errors: list[str] | None = None

    @property
    def reward_terms(self) -> dict[str, float]:
        """The reward by its named parts, or whole as `environment`."""
        if self.reward_parts is None:
            return {"environment": self.reward}
        return {f"{REWARD_PART}{name}": amount for name, amount in self.reward_parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReader:
    """Read the return values of an environment.

    Attributes:
        target: gymnasium id or class path, for messages.
        blank_images: Whether images are replaced by gray ones.
    """

    target: str
    blank_images: bool = False

    def reset(self, answer: Any) -> object:
        """Return the observation of a reset, not read yet.

        Raises:
            TypeError: The reset returned something else.
        """
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            raise TypeError(
                f"reset returned {_kind(answer)}, expected (observation, info); return both"
            )
        return answer[0]

    def step(
        self,
        answer: Any,
        *,
        reward_range: tuple[float, float] | None = None,
        seats: int = 1,
        mover: int = 0,
    ) -> Step:
        """Read the return value of a step.

        Args:
            answer: The five values.
            reward_range: Lowest and highest reward, where the environment declares them.
            seats: Number of seats.
            mover: Seat that has moved, whose reward and success the step returns.

        Raises:
            TypeError: A value has another type.
            ValueError: The reward is not finite, outside its range, not the sum of its parts or not that of its seat;
                or a metric is no finite number.
        """
        if not (isinstance(answer, tuple) and len(answer) == 5 and isinstance(answer[4], dict)):
            raise TypeError(
                f"step returned {_kind(answer)}, expected (observation, reward, terminated, truncated, info)"
            )
        raw, given, terminated, truncated, info = answer
        reward = self._reward(given, reward_range)
        info = dict(info)
        outcome = info.get(AnswerOutcome.KEY)
        if isinstance(outcome, AnswerOutcome):
            del info[AnswerOutcome.KEY]
        else:
            outcome = AnswerOutcome()
        if "metrics" in info:
            info["metrics"] = self._metrics(info["metrics"])
        seat_rewards, seat_success = (
            self._of_seats(info, reward, mover=mover, seats=seats, reward_range=reward_range)
            if seats > 1
            else ([], [])
        )
        return Step(
            raw=raw,
            reward=reward,
            reward_parts=self._reward_parts(info.get("reward_parts"), reward),
            terminated=self._flag(terminated, "terminated"),
            truncated=self._flag(truncated, "truncated"),
            success=self._flag(info["success"], "info['success']") if "success" in info else None,
            action_is_valid=self._flag(
                info.get("action_is_valid", True), "info['action_is_valid']"
            ),
            action_is_effective=self._flag(
                info.get("action_is_effective", True), "info['action_is_effective']"
            ),
            answer=outcome,
            info=info,
            seat_rewards=seat_rewards,
            seat_success=seat_success,
            user_errors=self._user_errors(info.get("user_errors")),
        )

    def _user_errors(self, names: object) -> list[str] | None:
        """Return the names of a simulated user's errors."""
        if names is None:
            return None
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return [*names]
        raise TypeError(
            f"{self.target} returned info['user_errors']={shortened(names)}; expected a list of the names of the "
            "simulated user's errors, empty where it made none"
        )

    def _of_seats(
        self,
        info: Mapping[str, Any],
        reward: float,
        *,
        mover: int,
        seats: int,
        reward_range: tuple[float, float] | None,
    ) -> tuple[list[float], list[bool]]:
        """Return the reward of each seat and whether it has solved its task."""
        given = {name: info.get(name) for name in ("seat_rewards", "seat_success")}
        for name, values in given.items():
            listed = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
            if values is None or not listed or len(values) != seats:
                raise TypeError(
                    f"{self.target} returned info[{name!r}]={shortened(values)}; expected one value for each of its "
                    f"seats={seats}"
                )
        if info.get("reward_parts") is not None:
            raise ValueError(
                f"{self.target} returned info['reward_parts'] with seats={seats}; a seat has one reward, leave them "
                "out"
            )
        rewards = [self._reward(value, reward_range) for value in given["seat_rewards"] or ()]
        if rewards[mover] != reward:
            raise ValueError(
                f"{self.target} returned reward {reward:g} and info['seat_rewards'][{mover}]={rewards[mover]:g} for "
                "the seat that moved; expected the same"
            )
        success = [
            self._flag(value, "info['seat_success']") for value in given["seat_success"] or ()
        ]
        return rewards, success

    def observation(self, raw: object) -> Observation:
        """Read an observation.

        Raises:
            TypeError: It is neither text nor text with images.
            UnicodeEncodeError: It has a lone surrogate, which no tokenizer can read.
        """
        match raw:
            case str():
                return Observation(text=_encodable(raw))
            case {"text": str(text), "images": [*images], "request": ChatRequest() as request}:
                shown = [self._image(image) for image in images]
                return Observation(text=text, images=shown, request=request)
            case {"text": str(text), "image": image}:
                return Observation(text=_encodable(text), images=[self._image(image)])
            case {"text": str(text), "images": [*images]}:
                shown = [self._image(image) for image in images]
                return Observation(text=_encodable(text), images=shown)
        kind = type(raw).__name__
        keys = f" with {shortened(list(raw))}" if isinstance(raw, Mapping) else ""
        raise TypeError(
            f"{self.target} returned an observation of type {kind}{keys}; expected a str, or a dict with 'text' (str) "
            "and 'image' (uint8 [height, width, 3]) or 'images' (a list of these, empty in a turn without an image)"
        )

    def _image(self, raw: object) -> np.ndarray:
        picture = raw if isinstance(raw, Image.Image) else np.asarray(raw)
        try:
            image = rgb_array(picture)
        except ValueError as error:
            raise TypeError(f"{self.target} returned {error}") from error
        # an environment may draw its next image into the same array
        return np.full_like(image, _GRAY) if self.blank_images else image.copy()

    def _flag(self, value: object, name: str) -> bool:
        """Return a truth value; 0 and 1 are ones too."""
        if isinstance(value, bool):
            return value
        number = _number(value)
        if number not in (0.0, 1.0):
            raise TypeError(
                f"{self.target} returned {name}={shortened(value)}; expected true or false"
            )
        return bool(number)

    def _reward(self, value: object, reward_range: tuple[float, float] | None) -> float:
        reward = _number(value)
        if (problem := _reward_problem(reward)) is not None:
            found = shortened(value) if reward is None else f"{reward:g}"
            raise ValueError(f"{self.target} returned reward {found}; {problem}")
        assert reward is not None
        low, high = reward_range or (-math.inf, math.inf)
        if not low - _TOLERANCE <= reward <= high + _TOLERANCE:
            raise ValueError(
                f"{self.target} returned reward {reward:g}, outside of its reward_range=({low:g}, {high:g}); correct "
                "one of them"
            )
        return reward

    def _reward_parts(self, parts: object, reward: float) -> dict[str, float] | None:
        """Return the named parts of a reward, None without any."""
        if parts is None:
            return None
        amounts = self._amounts(parts)
        for name, amount in (amounts or {}).items():
            if (problem := _reward_problem(amount)) is not None:
                raise ValueError(
                    f"{self.target} returned info['reward_parts'][{shortened(name)}]={amount:g}; {problem}"
                )
        if amounts is None or not math.isclose(
            sum(amounts.values()), reward, rel_tol=1e-6, abs_tol=1e-6
        ):
            raise ValueError(
                f"{self.target} returned reward {reward} and info['reward_parts']={shortened(parts)}; expected named "
                "numbers that sum to the reward"
            )
        return amounts

    def _metrics(self, metrics: object) -> dict[str, float]:
        """Return the metrics that a step names."""
        amounts = self._amounts(metrics)
        if amounts is None or not all(map(math.isfinite, amounts.values())):
            raise ValueError(
                f"{self.target} returned info['metrics']={shortened(metrics)}; expected finite numbers by name"
            )
        return amounts

    @staticmethod
    def _amounts(parts: object) -> dict[str, float] | None:
        """Return named parts of a reward, or metrics, as numbers, None if they are none."""
        if not isinstance(parts, Mapping):
            return None
        amounts = {str(name): _number(value) for name, value in parts.items()}
        known = {name: amount for name, amount in amounts.items() if amount is not None}
        return known if len(known) == len(amounts) else None


def _number(value: object) -> float | None:
    """Return a number of Python, numpy or torch as a float; None for anything else, a text of digits among it."""
    if type(value) is float or type(value) is int:
        return float(value)
    try:
        array = np.asarray(value)
    # lists of different lengths
    except ValueError:
        return None
    return float(array) if array.ndim == 0 and array.dtype.kind in _NUMBERS else None


def _reward_problem(amount: float | None) -> str | None:
    """Return the fault of a reward or of a part of one, None where there is none."""
    if amount is None or not math.isfinite(amount):
        return "expected a finite number"
    if abs(amount) >= MAX_REWARD:
        return (
            f"expected a number below {MAX_REWARD:g}, so that sums of rewards stay finite; scale it"
        )
    return None


def _encodable(text: str) -> str:
    """Return the text, or raise UnicodeEncodeError for a lone surrogate."""
    text.encode()
    return text


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return f"a {type(value).__name__}"
