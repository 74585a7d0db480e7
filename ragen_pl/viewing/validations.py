"""How each episode of a validation ended, and what the run had cost until then, as a file of JSON.

`<run>/validations/<validation set>/iteration_<n>.json` is of the weights after n iterations. A comparison of runs reads
these files, those of somebody else too: they are plain files of a limited size, and their types are checked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le
from typing_extensions import TypedDict

from ragen_pl.base.files import atomic_write
from ragen_pl.base.foreign_files import is_inside, object_in
from ragen_pl.base.json_text import json_text
from ragen_pl.base.records import checked_types, initial_state
from ragen_pl.trajectory import Trajectory

FOLDER = "validations"
SCHEMA = 1
_NAME = re.compile(r"iteration_([0-9]{4,9})\.json")
_MAX_BYTES = 1 << 26

# numbers that are exact, and finite, as float64
_Count = Annotated[int, Ge(0), Le(1 << 53)]
_Number = Annotated[float, Ge(-1e300), Le(1e300)]
# `return` is a word of Python
Outcome = TypedDict(
    "Outcome",
    {
        "group": int,
        "member": int,
        "seed": int,
        "state": str | None,
        "status": str,
        "success": bool,
        "return": _Number,
        "turns": _Count,
        "response_tokens": _Count,
    },
)
"""How an episode ended. `state` is a digest of the initial state, null where the environment names none."""


class Cost(TypedDict):
    """Costs of reinforcement learning so far, without its validations and without the warm start.

    Attributes:
        episodes: Number of sampled episodes.
        response_tokens: Number of sampled tokens.
        seconds: Time that has passed.
        processor_seconds: Processor time of the trainer's processes.
    """

    episodes: _Count
    response_tokens: _Count
    seconds: _Number
    processor_seconds: _Number


class Validation(TypedDict):
    """A validation, by whose types others' files are checked."""

    schema: int
    iteration: int
    validation_set: str
    cost: Cost
    episodes: list[Outcome]


def outcome_of(trajectory: Trajectory) -> Outcome:
    """Return how an episode ended."""
    return {
        "group": trajectory.group,
        "member": trajectory.member,
        "seed": trajectory.seed,
        "state": initial_state(trajectory),
        "status": str(trajectory.status),
        "success": bool(trajectory.success),
        "return": trajectory.reward,
        "turns": len(trajectory.turns),
        "response_tokens": sum(len(turn.response_ids) for turn in trajectory.turns),
    }


def write_validation(validation: Validation, run: Path) -> Path:
    """Write a validation into a run's folder and return the file's path."""
    name = f"iteration_{validation['iteration']:04d}.json"
    file = run / FOLDER / validation["validation_set"] / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as partial:
        partial.write_text(json_text(validation) + "\n", encoding="utf-8")
    return file


def validation_files(run: Path, name: str) -> dict[int, Path]:
    """Return the files of a run's validations on a validation set by the number of iterations before them."""
    folder = run / FOLDER / name
    named = ((file, _NAME.fullmatch(file.name)) for file in folder.glob("*.json"))
    found = {int(match[1]): file for file, match in named if match and is_inside(run, file)}
    return dict(sorted(found.items()))


def drop_later(run: Path, *, iteration: int) -> None:
    """Remove the validations of a run after more iterations, which come again."""
    for folder in (run / FOLDER).glob("*/"):
        for number, file in validation_files(run, folder.name).items():
            if number > iteration:
                file.unlink()


def read_validation(file: Path) -> Validation:
    """Return a validation.

    Raises:
        ValueError: The file is too large, or holds something else.
    """
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{file}: larger than {_MAX_BYTES} bytes")
    content = object_in(file.read_bytes())
    if content is not None and content.get("schema") != SCHEMA:
        raise ValueError(f"{file}: found schema {content.get('schema')}, expected {SCHEMA}")
    return checked_types(Validation, content, place=str(file))
