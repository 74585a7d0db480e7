"""A rollout engine whose responses finish one at a time, the latest request first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import Generation, GenerationRequest


class OneAtATime(TransformersEngine):
    """Engine that requests may join while others are under way."""

    continuous = True

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._waiting: list[GenerationRequest] = []

    def submit(self, requests: Sequence[GenerationRequest], *, keep: bool) -> None:
        self._waiting.extend(requests)

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        if self._waiting:
            super().submit([self._waiting.pop()], keep=False)
        return super().collect()

    def release(self) -> None:
        super().release()
        self._waiting = []
