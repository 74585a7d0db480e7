"""A run's folder as the live view shows it: its state, curves, marks, recorded episodes and settings.

The folder may be somebody else's. Only plain files inside it are read, of a limited size; their numbers are taken if
they are finite, their texts are shortened, and what is damaged is left out.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ragen_pl.base.foreign_files import PlainLoader, is_inside, object_in, settings_text
from ragen_pl.base.records import FILE, read_records
from ragen_pl.base.settings_files import FIRST, newest_settings
from ragen_pl.base.typed_json import typed_or_none
from ragen_pl.checkpoints import lock
from ragen_pl.metrics.proportions import Z, reports_success, success_interval
from ragen_pl.metrics.record import RecordReader, Row
from ragen_pl.metrics.shown import is_drawn
from ragen_pl.viewing.outcomes import count_kinds
from ragen_pl.viewing.page import PLAYED, outcomes, page_html
from ragen_pl.viewing.plots import EVENTS, stage_starts

_METRICS = "metrics.json"
# bytes of a file that is read
_MAX_BYTES, _MAX_BYTES_OF_RECORDS = 1 << 26, 1 << 29
# levels of folders that runs are looked for in, and of a settings file; values of a settings file; characters of a text
_LEVELS, _DEPTH, _VALUES, _LENGTH = 4, 12, 5000, 300
# metrics of other policies in a run's last metrics, the prefixes of its own, and the most policies
_OF_REFERENCES, _OF_THE_RUN, _MAX_REFERENCES = (
    ("success", "return"),
    ("val", "rollout", "update", "diagnostics"),
    8,
)
# where MLflow keeps a copy of a run's files: the settings are among them
_COPY_IN_MLFLOW = re.compile(r"(?:.*/)?[0-9a-f]{32}/artifacts")
# settings that differ between any two runs
_OWN_SETTINGS = ("paths.", "ckpt_path", "debug", "trust")
OF_SEEDS = ("seed", "model.build.seed", "warm_start.weights")
"""Settings that differ between runs of other seeds."""


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the runs in a folder, or the run that it is, by name; the newest first."""
    if (folder / FIRST).is_file():
        return {"/".join(folder.resolve().parts[-2:]): folder}
    found = {}
    for place, names, files in os.walk(folder):
        relative = Path(place).relative_to(folder)
        if FIRST in files and not _COPY_IN_MLFLOW.fullmatch(relative.as_posix()):
            found[relative.as_posix()] = Path(place)
        if FIRST in files or len(relative.parts) >= _LEVELS:
            names.clear()
    return dict(sorted(found.items(), key=lambda item: _started(item[1]), reverse=True))


def _started(folder: Path) -> float:
    file = folder / FIRST
    return file.stat().st_mtime if file.exists() else 0.0


def overview(folder: Path) -> dict[str, Any]:
    """Return a run's line of the table: state, names, iterations, last success with its interval."""
    settings = settings_of(folder)
    last, trained, measured = _last_rows(folder, _changed(RecordReader(folder).file))
    return {
        "state": state_of(folder),
        "env": settings.get("env.name", ""),
        "algorithm": settings.get("algorithm.name", ""),
        "model": _model_name(settings),
        "seed": settings.get("seed", ""),
        "iteration": last.get("iteration", 0),
        "iterations": settings.get("trainer.max_epochs", ""),
        "elapsed_s": last.get("elapsed_s", 0.0),
        "seeds": seeds_key(settings),
        "alarms": sum(1 for _ in _lines(folder, EVENTS)),
        "training": _interval(trained, "rollout/"),
        "validation": _interval(measured, "val/"),
    }


def seeds_key(settings: Mapping[str, str]) -> str:
    """Return what is equal for runs whose settings differ in nothing but the seed."""
    named = [
        (key, value)
        for key, value in settings.items()
        if key not in OF_SEEDS and not key.startswith(_OWN_SETTINGS)
    ]
    return hashlib.sha256(repr(sorted(named)).encode()).hexdigest()[:16] if named else ""


@lru_cache(maxsize=1024)
def _last_rows(folder: Path, changed: int) -> tuple[Row, Row, Row]:
    """Return the last row, the last of a rollout and the last of a validation."""
    rows = read_rows(folder)
    newest = [
        next((row for row in reversed(rows) if name in row), {})
        for name in ("iteration", "rollout/success", "val/success")
    ]
    return newest[0], newest[1], newest[2]


def _interval(row: Row, prefix: str) -> dict[str, Any] | None:
    """Return the last success, or the return where the environment reports no success, with its interval."""
    if f"{prefix}success" not in row:
        return None
    kind = "success" if reports_success(row, prefix) else "return"
    keys = {"value": kind, "low": f"{kind}_low", "high": f"{kind}_high"}
    found = {key: row[prefix + name] for key, name in keys.items() if prefix + name in row}
    return {"kind": kind} | found if "value" in found else None


def state_of(folder: Path) -> str:
    """Return whether a run is `running`, `finished`, or has `stopped` before its end."""
    if lock.is_held(folder):
        return "running"
    written = [_changed(folder / name) for name in (_METRICS, lock.FILE)]
    return "finished" if written[0] and written[0] >= written[1] else "stopped"


def _changed(file: Path) -> int:
    return file.stat().st_mtime_ns if file.is_file() else 0


def _model_name(settings: Mapping[str, str]) -> str:
    path = settings.get("model.build.path", "null")
    if path != "null":
        return Path(path).name
    return settings.get("model.build._target_", "").rpartition(".")[2].removeprefix("build_")


# ---- curves and marks


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a run's curves, with 95% intervals: `rollout/success_low`, `rollout/success_high` ..."""
    reader = _reader_of(folder)
    if not _is_readable(folder, reader.file, most=_MAX_BYTES_OF_RECORDS):
        return []
    return [_intervals(row) | row for row in reader.rows()]


def drops(folder: Path) -> int:
    """Return how often rows of a run were dropped that `read_rows` has returned, as by a resume."""
    return _reader_of(folder).drops


@lru_cache(maxsize=64)
def _reader_of(folder: Path) -> RecordReader:
    """Return the reader of a run's record, which reads each line once."""
    return RecordReader(folder, only=is_drawn)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # false for NaN


def _intervals(row: Row) -> Row:
    intervals: Row = {}
    for kind in ("rollout", "val"):
        count = row.get(f"{kind}/episodes", 0.0)
        if count <= 0:
            continue
        success = row.get(f"{kind}/success", math.nan)
        if 0 <= success <= 1:
            intervals |= success_interval(row, f"{kind}/").metrics(f"{kind}/success")
        if {f"{kind}/return", f"{kind}/return_std"} <= row.keys():
            mean = row[f"{kind}/return"]
            half = Z * abs(row[f"{kind}/return_std"]) / math.sqrt(count)
            intervals |= {f"{kind}/return_low": mean - half, f"{kind}/return_high": mean + half}
    return intervals


def read_marks(folder: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the marks of a run's curves: later stages of the curriculum, and alarms with what they did."""
    marks: list[dict[str, Any]] = [
        {"iteration": row["iteration"], "kind": "stage", "text": f"stage {stage} of the curriculum"}
        for row, stage in stage_starts(rows)
    ]
    for event in _lines(folder, EVENTS):
        if _is_finite(event.get("iteration")):
            done = event.get("done")
            texts = [event.get("message"), *(done if isinstance(done, list) else [])]
            text = ", ".join(str(part)[:_LENGTH] for part in texts[:8])
            marks.append({"iteration": event["iteration"], "kind": "alarm", "text": text})
    return marks


def read_references(folder: Path) -> dict[str, dict[str, float]]:
    """Return success and return of the other policies of a run's summary on its validation set, by policy.

    They are known when the run has ended: a random, a trivial and an optimal policy, the policy without images ...
    """
    found: dict[str, dict[str, float]] = {}
    for name, value in (object_in(_text(folder, _METRICS)) or {}).items():
        policy, _, metric = str(name).partition("/")
        if metric in _OF_REFERENCES and policy not in _OF_THE_RUN and _is_finite(value):
            found.setdefault(policy.replace("_", " ")[:_LENGTH], {})[metric] = float(value)
    return dict(islice(found.items(), _MAX_REFERENCES))


# ---- episodes


def recorded(folder: Path) -> list[str]:
    """Return the folders with records of episodes inside a run's, those of the newest iterations first."""
    patterns = (f"trajectories/*/{FILE}", f"evaluations/*/*/{FILE}")
    files = [file for pattern in patterns for file in folder.glob(pattern)]
    names = [
        file.parent.relative_to(folder).as_posix() for file in files if is_inside(folder, file)
    ]
    return sorted(names, key=_age, reverse=True)


def _age(name: str) -> tuple[bool, int, str]:
    """Return the order of a folder with records: those of training last, by the number of the iteration."""
    is_training = name.startswith("trajectories")
    # later iterations may have more digits
    return is_training, len(name) if is_training else 0, name


def episodes_page(folder: Path, name: str, *, title: str, episodes: int) -> str:
    """Return the trajectory page of one of the `recorded` folders, failed episodes first.

    Raises:
        ValueError: The records are too large, or not those of this version.
    """
    file = folder / name / FILE
    return page_html(
        list(_records(file)),
        title=title,
        images=file.parent,
        episodes=episodes,
        played=played_outcomes(folder, f"{name}/{PLAYED}"),
        failures_first=True,
    )


def played_outcomes(folder: Path, name: str) -> dict[str, int] | None:
    """Return the numbers of all episodes, of which the records are some; None if they are not known."""
    counts = typed_or_none(dict[str, int], object_in(_text(folder, name)))
    return counts if counts is not None and counts.keys() == outcomes([]).keys() else None


def outcome_counts(folder: Path, name: str) -> dict[str, int]:
    """Return the number of episodes of each kind of outcome in one of the `recorded` folders.

    Raises:
        ValueError: The records are too large, or not those of this version.
    """
    file = folder / name / FILE
    return _outcomes(file, _changed(file))


@lru_cache(maxsize=256)
def _outcomes(file: Path, changed: int) -> dict[str, int]:
    return count_kinds(_records(file))


def _records(file: Path) -> Iterator[dict[str, Any]]:
    if file.stat().st_size > _MAX_BYTES_OF_RECORDS:
        raise ValueError(f"{file}: larger than {_MAX_BYTES_OF_RECORDS} bytes")
    return read_records(file)


# ---- settings


def settings_of(folder: Path) -> dict[str, str]:
    """Return the settings of a run's last start by their dotted keys, as text; empty if no file can be read."""
    file = newest_settings(folder)
    return _settings(folder, file.name, _changed(file))


@lru_cache(maxsize=1024)
def _settings(folder: Path, name: str, changed: int) -> dict[str, str]:
    file = folder / name
    if not is_inside(folder, file):
        return {}
    try:
        # plain data only, no objects
        settings = yaml.load(settings_text(file), Loader=PlainLoader)
    except (OSError, yaml.YAMLError, ValueError):
        return {}
    return dict(islice(_leaves(settings, "", _DEPTH), _VALUES))


def _leaves(node: object, key: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict) and depth:
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name), depth - 1)
    elif isinstance(node, str | int | float | None):
        yield key, ("null" if node is None else str(node))[:_LENGTH]
    elif isinstance(node, list) and not any(isinstance(item, list | dict) for item in node):
        yield key, f"[{', '.join(str(item)[:_LENGTH] for item in node[:20])}]"[:_LENGTH]


def differences(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return the settings that differ between runs: the value of each run by key, empty where it has none."""
    settings = [settings_of(folder) for folder in folders]
    keys = sorted({key for each in settings for key in each})
    columns = {key: [each.get(key, "") for each in settings] for key in keys}
    return {
        key: values
        for key, values in columns.items()
        if len(set(values)) > 1 and not key.startswith(_OWN_SETTINGS)
    }


# ---- files


def _text(folder: Path, name: str) -> str:
    """Return the text of a file of the run, empty if there is none that may be read."""
    file = folder / name
    try:
        if not _is_readable(folder, file):
            return ""
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # removed or replaced at this moment
        return ""


def _is_readable(folder: Path, file: Path, *, most: int = _MAX_BYTES) -> bool:
    """Return whether a file is a plain one of the run, of a limited size."""
    return is_inside(folder, file) and file.stat().st_size <= most


def _lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Return the objects of a JSONL file without those lines that hold none."""
    lines = map(object_in, _text(folder, name).splitlines())
    return (line for line in lines if line is not None)
