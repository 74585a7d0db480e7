"""The trajectory page: records of episodes as one HTML file that loads nothing else and needs no network.

Responses are untrusted text. They travel as JSON in which `<` is escaped, and enter the document as text
nodes. The page's content security policy names the hash of its own script and lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ragen_pl.base.files import atomic_write
from ragen_pl.base.json_text import json_text
from ragen_pl.base.records import read_image, sample_groups
from ragen_pl.trajectory import EpisodeStatus, Span

PAGE = "page.html"
PLAYED = "played.json"
"""File beside records of some episodes: the `outcomes` of all."""
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
    played: Mapping[str, int] | None = None,
) -> Path:
    """Write a page of episodes and return its path.

    Args:
        records: Records of `ragen_pl.base.records`.
        path: File to write.
        title: Heading of the page.
        images: Folder that the records' image paths start from, and that holds them; default is the page's folder.
        episodes: Approximate number of episodes shown: whole groups. Up to half of them have an episode without success
            if there are as many; each kind is spread evenly.
        played: `outcomes` of all episodes, if the records are already a sample.
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
    played: Mapping[str, int] | None = None,
    failures_first: bool = False,
) -> str:
    """Return the page's HTML; the arguments are those of `write_page`.

    `failures_first` puts episodes without success first in a training page too.
    """
    # the environments of a mixture number their groups by themselves
    named = ("iteration", "validation_set", "environment", "group")
    groups = [tuple(record.get(name) for name in named) for record in records]
    indices = _shown(groups, records, count=episodes)
    kept = [records[index] for index in indices]
    rows = {group: row for row, group in enumerate(dict.fromkeys(groups))}
    is_evaluation = all(record.get("validation_set") for record in records)
    totals = played or outcomes((record["status"], bool(record["success"])) for record in records)
    data = {
        "note": _note(kept, records, total=totals["episodes"]),
        "totals": totals,
        "order": "no success first" if is_evaluation or failures_first else "as played",
        "episodes": [_slim(records[index]) | {"row": rows[groups[index]]} for index in indices],
        "spans": [span.name.lower() for span in Span],
        "images": {name: _data_uri(images, name) for name in _image_names(kept)},
    }
    script = script_of("trajectories.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    fields = {
        "title": html.escape(title),
        "data": json_for_script(data),
        "style": text_of("elements.css"),
        "script": script,
        "script_hash": f"sha256-{digest}",
    }
    return filled("trajectories.html", fields)


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Return a template of this package with its `{{placeholders}}` replaced."""
    # One pass: the name of a placeholder inside a field stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], text_of(template))


def script_of(name: str) -> str:
    """Return the script of a page, with the functions that all pages share."""
    return text_of("elements.js") + text_of(name)


def text_of(name: str) -> str:
    """Return the text of a file of this package."""
    return (files("ragen_pl.viewing") / name).read_text(encoding="utf-8")


def _shown(
    groups: Sequence[Hashable], records: Sequence[Mapping[str, Any]], *, count: int
) -> list[int]:
    """Return the indices of the episodes of a page, in order."""
    lost_groups = {
        group for group, record in zip(groups, records, strict=True) if not record["success"]
    }
    lost = [index for index, group in enumerate(groups) if group in lost_groups]
    won = [index for index, group in enumerate(groups) if group not in lost_groups]
    # what the others leave free is added
    of_lost = _sample(lost, groups, count=max(count // 2, count - len(won)))
    of_won = _sample(won, groups, count=count - len(of_lost))
    return sorted([*of_lost, *of_won])


def _sample(indices: Sequence[int], groups: Sequence[Hashable], *, count: int) -> list[int]:
    if not indices or count < 1:
        return []
    return [indices[place] for place in sample_groups([groups[i] for i in indices], count=count)]


def outcomes(episodes: Iterable[tuple[str, bool]]) -> dict[str, int]:
    """Return the numbers of all episodes, of successes and of those that failed.

    Args:
        episodes: Status and success of each.

    >>> outcomes([("terminated", True), ("turn_limit", False), ("failed", False)])
    {'episodes': 3, 'success': 1, 'failed': 1}
    """
    ended = list(episodes)
    return {
        "episodes": len(ended),
        "success": sum(success for _, success in ended),
        "failed": sum(status == EpisodeStatus.FAILED for status, _ in ended),
    }


def _note(
    kept: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], *, total: int
) -> str:
    """Return which of the episodes a page shows, empty for all."""
    if len(kept) == total:
        return ""
    note = f"{len(kept)} of {total} episodes, whole groups"
    lost, shown = (sum(not record["success"] for record in some) for some in (records, kept))
    if len(kept) < len(records) and lost:
        note += f", with {shown} of the {lost} without success"
    return note


def json_for_script(value: object) -> str:
    r"""Return JSON that may stand in a `<script>` element whatever text it holds.

    >>> json_for_script({"response": "</script>"})
    '{"response":"\\u003c/script\\u003e"}'
    """
    text = json_text(value, default=str, digits=_SIGNIFICANT_DIGITS, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


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
