"""What the keys of `conf/play.yaml` and `conf/page.yaml` may be; the rest of the table is in `schema`."""

from __future__ import annotations

from ragen_pl.config.rules import Kind, Rule

LOOKING: dict[str, Rule] = {
    "policy": Rule(kind=Kind.TEXT, choices=("agent", "human", "random", "optimal")),
    "episode": Rule(kind=Kind.INT, minimum=0, note="which start of the held-out validation set"),
    "delay": Rule(kind=Kind.FLOAT, minimum=0, note="seconds"),
    "width": Rule(kind=Kind.INT, minimum=1, note="columns"),
    "records": Rule(kind=Kind.PATH, note="a trajectories.jsonl, or the folder that it is in"),
    "episodes": Rule(kind=Kind.INT, minimum=1, note="shown at most, about"),
}

LOOKING_TEXT: tuple[str, ...] = ("save", "title")
