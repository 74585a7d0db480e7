"""Errors that cannot be shown, and an environment that raises them.

A process of an environment imports this module, so it imports little.
"""

from __future__ import annotations

import gymnasium


class StrRaises(Exception):
    def __str__(self):
        raise ValueError("no text")


class StrIsNoText(Exception):
    def __str__(self):
        return 7  # type: ignore[return-value]


class ReprRaises(Exception):
    """An error whose argument can't be shown."""

    def __init__(self) -> None:
        super().__init__(self)

    def __repr__(self):
        raise RuntimeError("no repr")


class Endless(Exception):
    def __str__(self):
        return str(self)


class HalfACharacter(Exception):
    def __str__(self):
        return "half \ud83d"


class StatusRaises(Exception):
    @property
    def status(self):
        raise OSError("no status")


class DiskStrRaises(OSError):
    def __str__(self):
        raise ValueError("no text")


ERRORS = (StrRaises, StrIsNoText, ReprRaises, Endless, HalfACharacter, StatusRaises)


class Breaks(gymnasium.Env):
    """Raises one of the errors in every second episode."""

    action_names = ("Go",)
    instructions = "Go."
    action_space = gymnasium.spaces.Discrete(1)
    observation_space = gymnasium.spaces.Text(100)

    def __init__(self, error: int, where: str) -> None:
        self.error, self.where = ERRORS[error], where

    def _break(self, where: str) -> None:
        if where == self.where and self.seed % 2:
            raise self.error()

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        self._break("reset")
        return "go", {}

    def step(self, action):
        self._break("step")
        return "gone", 1.0, True, False, {"success": True}

    def close(self):
        pass
