"""The trajectory page: records of episodes as one HTML file that loads nothing else and needs no network.

Responses are untrusted text. They travel as JSON in which `<` is escaped, and enter the document as text
nodes. The page's content security policy names the hash of its own script and lets no other script run.
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
from ragen_pl.trajectory import Span
from ragen_pl.viewing.records import read_image, sample_groups

PAGE = "page.html"
# Left out of the page, which would be several times as large; the JSONL has them.
_LEFT_OUT = frozenset({"prompt_ids", "response_ids", "info"})
_SIGNIFICANT_DIGITS = 5


def write_page(
    records: Iterable[Mapping[str, Any]],
    path: Path,
    *,
    title: str,
    images: Path | None = None,
    episodes: int = 64,
    played: int | None = None,
) -> Path:
    """Write a page of episodes and return its path.

    Args:
        records: records of `ragen_pl.viewing.records`.
        path: file to write.
        title: heading of the page.
        images: folder that the records' image paths start from, and that holds them; default is the page's folder.
        episodes: approximate number of episodes shown: whole groups, spread evenly.
        played: number of episodes played, if the records are already a sample.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = page_html(
        list(records),
        title=title,
        images=images or path.parent,
        episodes=episodes,
        played=played,
    )
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def page_html(
    records: Sequence[Mapping[str, Any]],
    *,
    title: str,
    images: Path,
    episodes: int = 64,
    played: int | None = None,
) -> str:
    """Return the page's HTML; the arguments are those of `write_page`."""
    groups = [
        (record.get("iteration"), record.get("validation_set"), record["group"])
        for record in records
    ]
    kept = [records[index] for index in sample_groups(groups, count=episodes)]
    total = len(records) if played is None else played
    data = {
        "note": f"{len(kept)} of {total} episodes, whole groups" if len(kept) < total else "",
        "episodes": [_slim(record) for record in kept],
        "spans": [span.name.lower() for span in Span],
        "images": {name: _data_uri(images, name) for name in _image_names(kept)},
    }
    folder = files("ragen_pl.viewing")
    script = (folder / "trajectories.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    fields = {
        "title": html.escape(title),
        "data": json_for_script(data),
        "script": script,
        "script_hash": f"sha256-{digest}",
    }
    template = (folder / "trajectories.html").read_text(encoding="utf-8")
    # One pass: the name of a placeholder inside the data stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], template)


def json_for_script(value: object) -> str:
    r"""Return JSON that may stand in a `<script>` element whatever text it holds.

    >>> json_for_script({"response": "</script>"})
    '{"response":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(
        _finite(value), ensure_ascii=True, separators=(",", ":"), default=str, allow_nan=False
    )
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _finite(value: object) -> object:
    """Return a value as JSON types: floats rounded, infinite ones and NaN as null."""
    if isinstance(value, float):
        return float(f"{value:.{_SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _slim(record: Mapping[str, Any]) -> dict[str, Any]:
    turns = [
        {name: value for name, value in turn.items() if name not in _LEFT_OUT}
        | {"prompt_tokens": len(turn["prompt_ids"])}
        for turn in record["turns"]
    ]
    # As text: a seed may have more digits than a number in JavaScript holds.
    return {**record, "seed": str(record["seed"]), "turns": turns}


def _image_names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for record in records:
        for turn in record["turns"]:
            names |= dict.fromkeys([*turn["images"], *turn["prompt_images"]])
        names |= dict.fromkeys(record["final_images"])
    return list(names)


def _data_uri(folder: Path, name: str) -> str | None:
    """Return an image as a data URI, or None where there is none; the page then leaves the image out."""
    data = read_image(folder, name)
    return None if data is None else f"data:image/png;base64,{base64.b64encode(data).decode()}"
