"""Tasks of agent programs: rows of a JSONL file, of a dataset's folder, or of a Python iterable; and those held out."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@lru_cache(maxsize=8)
def load_tasks(source: str, place: str | None = None) -> Sequence[Any]:
    """Return all tasks.

    Args:
        source: A file of JSON lines; a folder with such files or Parquet files, as datasets of the Hugging Face Hub are
            stored; or the import path of an iterable, or of a function that returns one.
        place: Key and value that name them; None for those of `env.tasks`.

    Raises:
        ValueError: There are no tasks, or one is no JSON value.
    """
    path, place = Path(source).expanduser(), place or f"env.tasks={source}"
    if not path.exists() and not _is_importable(source):
        raise ValueError(
            f"{place}: no such file or folder, and no such module; give a file or folder of JSON lines or "
            "Parquet, or the import path of an iterable"
        )
    try:
        rows = _rows(path) if path.exists() else _imported(source)
        tasks = [json.loads(json.dumps(row, sort_keys=True)) for row in rows]
    # any error of the user's module or files
    except Exception as error:
        raise ValueError(
            f"{place}: {type(error).__name__}: {error}; expected a file or folder of JSON lines or "
            "Parquet, or the import path of an iterable of JSON values"
        ) from error
    if not tasks:
        raise ValueError(f"{place}: it has no tasks")
    return tasks


@lru_cache(maxsize=8)
def split_tasks(source: str, held_out: str | float | None) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the tasks of training and those of validation, which have no task in common.

    Args:
        source: All tasks, or those of training; see `load_tasks`.
        held_out: The tasks of validation, given as `source` is, which training then leaves out; or the fraction of the
            different tasks that training leaves out, chosen by a hash of their content; None for all tasks in both.

    Raises:
        ValueError: There are no tasks, or none are left for training.
    """
    tasks = load_tasks(source)
    if held_out is None:
        return tasks, tasks
    place = f"env.validation_tasks={held_out}"
    if isinstance(held_out, str):
        validation = load_tasks(held_out, place)
    else:
        different = {_content(task): task for task in tasks}
        if len(different) < 2:
            raise ValueError(
                f"{place}: env.tasks={source} has one task only; set null, or give other tasks"
            )
        ranked = sorted(different, key=lambda text: hashlib.sha256(text.encode()).digest())
        validation = [different[text] for text in ranked[: math.ceil(held_out * len(ranked))]]
    aside = set(map(_content, validation))
    training = [task for task in tasks if _content(task) not in aside]
    if not training:
        raise ValueError(
            f"{place}: all tasks of env.tasks={source} are in it; hold fewer of them out"
        )
    return training, validation


def _content(task: Any) -> str:
    return json.dumps(task, sort_keys=True)


def _rows(path: Path) -> Iterable[Any]:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in files:
        if file.suffix in (".jsonl", ".json"):
            # lines end with \n only: a text may hold other line ends
            lines = file.read_text(encoding="utf-8").split("\n")
            yield from (json.loads(line) for line in lines if line.strip())
        elif file.suffix == ".parquet":
            yield from _parquet(file)
        elif file == path:
            raise ValueError("expected a file that ends in .jsonl or .parquet")


def _parquet(file: Path) -> Iterable[Any]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    rows: list[Any] = parquet.read_table(file).to_pylist()
    return rows


def _imported(source: str) -> Iterable[Any]:
    module, _, name = source.rpartition(".")
    tasks = getattr(importlib.import_module(module), name)
    rows: Iterable[Any] = tasks() if callable(tasks) else tasks
    return rows


def _is_importable(source: str) -> bool:
    """Return whether a text is a name in a module that is there."""
    module, _, _ = source.rpartition(".")
    try:
        is_path = all(part.isidentifier() for part in source.split("."))
        return is_path and bool(module) and find_spec(module) is not None
    # of a package above the module
    except ImportError:
        return False
