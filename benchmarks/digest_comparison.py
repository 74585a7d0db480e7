"""Comparison of two records of digests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, renamed: Mapping[str, str | None], tolerance: float | None
) -> list[str]:  # fmt: skip
    """Return the differences between two records of a case, one phrase each."""
    phrases = _first(old, new, "training", "trajectories", word="iteration")
    phrases += _first(old, new, "validation", "trajectories", word="rollout")
    if tolerance is None:
        phrases += _first(old, new, "training", "likelihoods", word="iteration")
        phrases += _first(old, new, "validation", "likelihoods", word="rollout")
        for part in ("warm_start", "weights"):
            if old[part]["all"] != new[part]["all"]:
                phrases.append(f"{part}{_tensors(old[part]['tensors'], new[part]['tensors'])}")
        for part in old["advantages"][0] if old["advantages"] else ():
            phrases += _first(old, new, "advantages", part, word="iteration")
    return phrases + _metric_differences(
        old["metrics"], new["metrics"], renamed=renamed, tolerance=tolerance
    )


def _first(
    old: Mapping[str, Any], new: Mapping[str, Any], part: str, detail: str, *, word: str
) -> list[str]:
    """Return where the digests of a part differ first."""
    before, after = ([digests.get(detail) for digests in side[part]] for side in (old, new))
    if before == after:
        return []
    name = f"{part} ({detail})"
    if len(before) != len(after):
        return [f"{name}: {len(before)} {word}s before, {len(after)} after"]
    pairs = enumerate(zip(before, after, strict=True))
    number = next(number for number, (old_digest, new_digest) in pairs if old_digest != new_digest)
    return [f"{name} from {word} {number}"]


def _tensors(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return how many tensors differ and the name of the first one."""
    if set(old) != set(new):
        return f" ({len(set(old.values()) - set(new.values()))} of {len(old)} tensors)"
    names = [name for name in old if old[name] != new[name]]
    return f" ({len(names)} of {len(old)} tensors, first {names[0]})"


def _metric_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, renamed: Mapping[str, str | None], tolerance: float | None
) -> list[str]:  # fmt: skip
    expected = {new_name(name, renamed): points for name, points in old.items()}
    expected.pop(None, None)
    phrases = []
    for word, names in (
        ("missing", [name for name in expected if name not in new]),
        ("new", [name for name in new if name not in expected]),
        ("different", [name for name in expected if name in new and not _alike(expected[name], new[name], tolerance)]),
    ):  # fmt: skip
        if names:
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            phrases.append(f"metrics {word}: {', '.join(map(str, names[:6]))}{more}")
    return phrases


def new_name(name: str, renamed: Mapping[str, str | None]) -> str | None:
    """Return the new name of a metric, None if it is omitted.

    >>> new_name("a/b/c", {"a/": "x/", "a/b/": "y/"}), new_name("a/b", {"a/b": "c"}), new_name("d", {"d": None})
    ('y/c', 'c', None)
    """
    matches = [
        key for key in renamed if name == key or (key.endswith("/") and name.startswith(key))
    ]
    if not matches:
        return name
    key = max(matches, key=len)
    target = renamed[key]
    return None if target is None else target + name.removeprefix(key)


def _alike(old: Sequence[Any], new: Sequence[Any], tolerance: float | None) -> bool:
    """Return whether two curves have the same steps and values."""
    if tolerance is None or len(old) != len(new):
        return old == new
    return all(
        step == other and _close(x, y, tolerance)
        for (step, x), (other, y) in zip(_numbers(old), _numbers(new), strict=True)
    )


def _close(old: float, new: float, tolerance: float) -> bool:
    """Return whether two values agree. Values below 0.01, often sums that cancel, count as 0.01."""
    if math.isnan(old) or math.isnan(new):
        return math.isnan(old) and math.isnan(new)
    return math.isclose(old, new, rel_tol=tolerance, abs_tol=tolerance / 100)


def _numbers(points: Sequence[Any]) -> Iterator[tuple[int | None, float]]:
    for step, value in points:
        yield step, float.fromhex(value)


def compare(
    before: Path, after: Path, *, renamed: Path | None, tolerance: float | None, only: str
) -> int:
    """Print one line per case. Return the exit code."""
    old, new = (json.loads(file.read_text()) for file in (before, after))
    names = json.loads(renamed.read_text()) if renamed else {}
    renamed_cases = names.pop("cases", {})
    for key, value in old["surroundings"].items():
        if key != "commit" and value != new["surroundings"].get(key):
            print(f"note: {key} {value} before, {new['surroundings'].get(key)} after")
    first = {renamed_cases.get(name, name): case for name, case in old["cases"].items()}
    second, different = new["cases"], 0
    selected = [name for name in dict.fromkeys([*first, *second]) if fnmatch(name, only)]
    for name in selected:
        if name not in first or name not in second:
            phrases = [f"not in the {'first' if name not in first else 'second'} record"]
        else:
            phrases = differences(first[name], second[name], renamed=names, tolerance=tolerance)
        different += bool(phrases)
        print(f"{name:<36}{'; '.join(phrases) or 'identical'}")
    print(f"{different} of {len(selected)} cases differ")
    return int(bool(different) or not selected)
