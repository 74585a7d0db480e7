"""RecordedStep: the inputs of a rank's forward and backward passes in an optimizer step, in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ragen_pl.base.files import atomic_write
from ragen_pl.base.tensor_files import load_plain
from ragen_pl.data.batch import Minibatch


@dataclass(kw_only=True, slots=True)
class RecordedStep:
    """An optimizer step of one rank. The weights before it are in a file next to it, which all ranks share."""

    phase: str
    """`update` or `warm start`."""
    iteration: int
    """Counted from 1; 0 in the warm start."""
    step: int
    """Optimizer step of the phase, counted from 1."""
    rank: int
    ranks: int
    minibatches: list[Minibatch]
    """Those that the step accumulates."""
    random: list[dict[str, Tensor]]
    """State of torch's generators before each minibatch, as `seeding.random_state` returns it; empty if unknown."""
    suspect: int | None
    """Index of the first minibatch with a number that is not finite, None if it is unknown."""
    weights: str
    """Name of the file with the weights."""
    versions: dict[str, str]
    """Versions of ragen_pl and its libraries."""

    def write(self, file: Path) -> None:
        """Write the step to a file that `read` reads. It holds tensors and plain values."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        state["minibatches"] = [minibatch.state_dict() for minibatch in self.minibatches]
        with atomic_write(file) as partial:
            torch.save(state, partial)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return the step in a file of `write`.

        Raises:
            ValueError: It holds something else.
        """
        state = load_plain(file)
        try:
            return cls(**{**state, "minibatches": _minibatches(state)})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("expected the file of a recorded step") from error


def _minibatches(state: Mapping[str, Any]) -> list[Minibatch]:
    return [Minibatch.from_state_dict(minibatch) for minibatch in state["minibatches"]]
