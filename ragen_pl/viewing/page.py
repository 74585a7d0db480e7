"""The trajectory page: records of episodes as one HTML file that needs nothing else, no network either.

Responses are untrusted text. They travel as JSON in which `<` is escaped and enter the document as text
nodes; the page's policy lets no script run but its own, whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ragen_pl.files import atomic_write

PAGE = "page.html"
_DROPPED = frozenset({"prompt_ids", "response_ids", "info"})  # the JSONL keeps them
_DIGITS = 5  # of metrics; more would only make the page larger


def write_page(
    records: Iterable[Mapping[str, Any]],
    path: Path,
    *,
    title: str,
    images: Path | None = None,
    episodes: int = 64,
    played: int | None = None,
) -> Path:
    """Write a page of episodes and return its path; it appears under its name once it is whole.

    Args:
        records: of `ragen_pl.viewing.records`.
        path: the file to write.
        title: the page's heading.
        images: folder that the records' image paths start from; default the page's own.
        episodes: at most about so many are shown: whole groups, spread evenly.
        played: how many were played in all, where the records are a sample already.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = page_html(
        list(records), title=title, images=images or path.parent, episodes=episodes,
        played=played,
    )  # fmt: skip
    with atomic_write(path) as file:
        file.write_text(text, encoding="utf-8")
    return path


def page_html(
    records: Sequence[Mapping[str, Any]],
    *,
    title: str,
    images: Path,
    episodes: int = 64,
    played: int | None = None,
) -> str:
    """Return the page; the arguments are those of `write_page`."""
    kept = sample_groups(records, count=episodes)
    total = len(records) if played is None else played
    note = f"{len(kept)} of {total} episodes, whole groups" if len(kept) < total else ""
    data = {
        "note": note,
        "episodes": [_slim(record) for record in kept],
        "images": {name: _data_uri(images / name) for name in _image_names(kept)},
    }
    folder = files("ragen_pl.viewing")
    script = (folder / "trajectories.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": html.escape(title),
        "data": in_script(data),
        "script": script,
        "script_hash": f"sha256-{digest}",
    }
    template = (folder / "trajectories.html").read_text(encoding="utf-8")
    # one pass, so that a placeholder's name inside the data stays what it is
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def sample_groups(records: Sequence[Mapping[str, Any]], *, count: int) -> list[Mapping[str, Any]]:
    """Return about `count` of the records: all of a start's episodes, of starts spread evenly.

    >>> [one["group"] for one in sample_groups([{"group": g} for g in (0, 1, 2, 3)], count=2)]
    [0, 2]
    """
    groups: dict[object, list[Mapping[str, Any]]] = {}
    for record in records:
        key = (record.get("iteration"), record.get("validation_set"), record["group"])
        groups.setdefault(key, []).append(record)
    members = list(groups.values())
    size = max(map(len, members), default=1)
    wanted = min(-(-count // size), len(members))
    return [one for number in range(wanted) for one in members[number * len(members) // wanted]]


def in_script(value: object) -> str:
    r"""Return JSON that may stand in a `<script>` element whatever text it holds.

    >>> in_script({"response": "</script>"})
    '{"response":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(
        _finite(value), ensure_ascii=True, separators=(",", ":"), default=str, allow_nan=False
    )
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _finite(value: object) -> object:
    """Return a value in JSON's types, floats shortened; what is not finite has no place in JSON."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _slim(record: Mapping[str, Any]) -> dict[str, Any]:
    turns = [
        {name: value for name, value in turn.items() if name not in _DROPPED}
        | {"prompt_tokens": len(turn["prompt_ids"])}
        for turn in record["turns"]
    ]
    # a seed may have more digits than a number of JavaScript keeps
    return {**record, "seed": str(record["seed"]), "turns": turns}


def _image_names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for record in records:
        for turn in record["turns"]:
            names |= dict.fromkeys([*turn["images"], *turn["prompt_images"]])
        names |= dict.fromkeys(record["final_images"])
    return list(names)


def _data_uri(file: Path) -> str | None:
    """Return an image as text; None where the file has gone, and the page does without."""
    try:
        return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    except OSError:
        return None
