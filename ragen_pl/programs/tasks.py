"""Tasks of agent programs: rows of a JSONL file, of a dataset's folder, or of a Python iterable."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@lru_cache(maxsize=8)
def load_tasks(source: str) -> Sequence[Any]:
    """Return all tasks.

    Args:
        source: a file of JSON lines; a folder with such files or Parquet files, as datasets of the Hugging Face Hub are
            stored; or the import path of an iterable, or of a function that returns one.

    Raises:
        ValueError: there are no tasks, or one is no JSON value.
    """
    path = Path(source).expanduser()
    if not path.exists() and not _is_importable(source):
        raise ValueError(
            f"env.tasks={source}: no such file or folder, and no such module; give a file or folder of JSON lines or "
            "Parquet, or the import path of an iterable"
        )
    try:
        rows = _rows(path) if path.exists() else _imported(source)
        tasks = [json.loads(json.dumps(row, sort_keys=True)) for row in rows]
    # any error of the user's module or files
    except Exception as error:
        raise ValueError(
            f"env.tasks={source}: {type(error).__name__}: {error}; expected a file or folder of JSON lines or "
            "Parquet, or the import path of an iterable of JSON values"
        ) from error
    if not tasks:
        raise ValueError(f"env.tasks={source}: it has no tasks")
    return tasks


def _rows(path: Path) -> Iterable[Any]:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in files:
        if file.suffix in (".jsonl", ".json"):
            lines = file.read_text().splitlines()
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
