"""Comparison of runs on the same held-out episodes: paired differences with intervals, as tables, JSON and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ragen_pl.base.files import atomic_write
from ragen_pl.base.json_text import json_text
from ragen_pl.base.phases import wide_console
from ragen_pl.config.errors import ConfigError
from ragen_pl.evaluation.played import (
    Key,
    Played,
    Question,
    check_comparable,
    differing,
    named_by,
    read_played,
)
from ragen_pl.metrics.paired import (
    Estimate,
    Paired,
    paired_difference,
    sign_test,
)
from ragen_pl.tracking.checkpoints import text_of
from ragen_pl.viewing.run_files import OF_SEEDS, differences

METRICS = {
    "success": "success",
    "return": "return",
    "turns": "turns",
    "response_tokens": "response tokens",
}
"""Compared values of an episode, with their names in tables."""

COSTS = {
    "iterations": "iterations",
    "episodes": "sampled episodes",
    "response_tokens": "sampled tokens",
    "seconds": "seconds",
    "processor_seconds": "processor seconds",
}
"""Costs of a run before its validation, with names in tables."""

_LOG_WIDTH = 120
# settings in a note
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Metrics of two sides on the same episodes.

    Attributes:
        sides: Folders of each side.
        iterations: Iterations before the validation of each run of each side; None for evaluations.
        episodes: Number of compared episodes of a run.
        states: Number of different initial states among them.
        failed: Number of episodes left out since one of the runs failed in them.
        same_seeds: Whether the runs of both sides are pairs too.
        metrics: By name of `METRICS`.
        costs: Mean over the runs of each side, by name of `COSTS`.
        only: Of one run on each side, episodes that only the first and only the second solved, and the p-value of the
            states' signs; None for several runs.
        notes: Sentences about the comparison.
    """

    sides: tuple[list[str], list[str]]
    iterations: tuple[list[int | None], list[int | None]]
    episodes: int
    states: int
    failed: int
    same_seeds: bool
    metrics: dict[str, Paired]
    costs: tuple[dict[str, float], dict[str, float]]
    only: tuple[int, int, float] | None
    notes: list[str]


def compare(run: Sequence[str], other: Sequence[str], question: Question) -> Comparison:
    """Compare two sides, each of one run or of several, such as those of other seeds.

    Args:
        run: Folders of the first side.
        other: Folders of the second side, which is subtracted.
        question: What is compared.

    Raises:
        ConfigError: They have not played the same held-out episodes, or what they have written can't be read.
    """
    named = {"run": run, "with": other}
    sides = [
        sorted(
            (read_played(place, question, key=key) for place in places),
            key=lambda one: -1 if one.seed is None else one.seed,
        )
        for key, places in named.items()
    ]
    for key, side in zip(named, sides, strict=True):
        if not side:
            raise ConfigError(f"{key}=[]: expected a folder")
    check_comparable(sides, question)
    return compare_played(sides[0], sides[1], question)


def compare_played(
    left: Sequence[Played], right: Sequence[Played], question: Question
) -> Comparison:
    """Compare two sides that have played the same episodes.

    Raises:
        ConfigError: Every episode failed in some run.
    """
    played = [*left, *right]
    keys = [
        key
        for key in sorted(left[0].outcomes)
        if all(one.outcomes[key]["status"] != "failed" for one in played)
    ]
    failed = len(left[0].outcomes) - len(keys)
    if not keys:
        raise ConfigError(
            f"{left[0].place}: each of the {failed} episodes failed in one of the runs; see the errors in their records"
        )
    states = [left[0].outcomes[key]["state"] or key[0] for key in keys]
    seeds = [[one.seed for one in side] for side in (left, right)]
    same_seeds = seeds[0] == seeds[1] and None not in seeds[0] and len(set(seeds[0])) == len(left)
    metrics = {
        name: paired_difference(
            _values(left, keys, name),
            _values(right, keys, name),
            states=states,
            same_seeds=same_seeds,
            is_success=name == "success",
            resamples=question.resamples,
            seed=question.seed,
        )
        for name in METRICS
    }
    return Comparison(
        sides=([one.place for one in left], [one.place for one in right]),
        iterations=(_iterations(left), _iterations(right)),
        episodes=len(keys),
        states=len(set(states)),
        failed=failed,
        same_seeds=same_seeds,
        metrics=metrics,
        costs=(_mean_cost(left), _mean_cost(right)),
        only=_only(left[0], right[0], keys, states) if len(played) == 2 else None,
        notes=_notes(left, right, question),
    )


def _values(side: Sequence[Played], keys: Sequence[Key], name: str) -> np.ndarray:
    """Return a value of each episode of each run, float64 `[runs, episodes]`."""
    outcomes: list[list[Mapping[str, Any]]] = [[one.outcomes[key] for key in keys] for one in side]
    return np.array([[outcome[name] for outcome in row] for row in outcomes], dtype=np.float64)


def _iterations(side: Sequence[Played]) -> list[int | None]:
    return [int(one.cost["iterations"]) if one.cost else None for one in side]


def _mean_cost(side: Sequence[Played]) -> dict[str, float]:
    if not all(one.cost for one in side):
        return {}
    return {name: sum(one.cost[name] for one in side) / len(side) for name in COSTS}


def _only(
    left: Played, right: Played, keys: Sequence[Key], states: Sequence[object]
) -> tuple[int, int, float]:
    by_state: dict[object, int] = {}
    counts = [0, 0]
    for key, state in zip(keys, states, strict=True):
        less = left.outcomes[key]["success"] - right.outcomes[key]["success"]
        counts[0] += less > 0
        counts[1] += less < 0
        by_state[state] = by_state.get(state, 0) + less
    more = sum(sign > 0 for sign in by_state.values())
    fewer = sum(sign < 0 for sign in by_state.values())
    return counts[0], counts[1], sign_test(more, fewer)


def _notes(left: Sequence[Played], right: Sequence[Played], question: Question) -> list[str]:
    notes = []
    if len(left) == len(right) == 1:
        notes.append(
            "One run on each side: the intervals are of these two runs. Runs of other seeds differ by more; give "
            "several, run=[A1,A2] with=[B1,B2]."
        )
    for side in (left, right):
        folders = [one.folder for one in side if one.folder is not None]
        mixed = [key for key in differences(folders) if key not in OF_SEEDS]
        if len(folders) > 1 and mixed:
            names = text_of(", ".join(mixed[:_SHOWN]))
            notes.append(
                f"The runs of {side[0].place} … differ in {names}, and not in the seed only."
            )
    allowed = named_by(differing(left[0], right[0]), question.may_differ)
    for key in sorted(allowed):
        values = [text_of(side[0].panel.get(key)) for side in (left, right)]
        notes.append(f"{text_of(key)}: {' and '.join(values)}.")
    notes += [
        f"Response tokens of {one.place} are characters: its model is behind an API."
        for one in (*left, *right)
        if one.counts_characters
    ]
    if question.overlap:
        notes.append("Training may have used some of the initial states.")
    return notes


# ---- tables


def tables(found: Comparison) -> dict[str, list[list[str]]]:
    """Return the rows of each table, with its head as the first."""
    rows = [["", "run", "with", "run - with [95%]"]]
    rows += [
        [
            METRICS[name],
            _number(one.left.value),
            _number(one.right.value),
            with_interval(one.difference),
        ]
        for name, one in found.metrics.items()
    ]
    costs = [["", "run", "with"]]
    for name, label in COSTS.items():
        cells = [f"{cost[name]:,.0f}" if cost else "-" for cost in found.costs]
        costs.append([label, *cells])
    return {"The same held-out episodes": rows, "Learning until then": costs}


def with_interval(one: Estimate) -> str:
    """Return a difference with its interval.

    >>> with_interval(Estimate(0.125, -0.0625, 0.25))
    '+0.125 [-0.062, +0.250]'
    """
    return f"{one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def sentences(found: Comparison) -> list[str]:
    """Return the lines below the tables."""
    several = max(map(len, found.sides)) > 1
    runs = " and ".join(
        f"{name}: {', '.join(side)}{_after(iterations)}"
        for name, side, iterations in zip(
            ("run", "with"), found.sides, found.iterations, strict=True
        )
    )
    lines = [
        f"{runs}.",
        f"{found.episodes} episodes from {found.states} initial states"
        + (f", {found.failed} left out that failed in some run" if found.failed else "")
        + ". In brackets: the 95% interval of a bootstrap over initial states"
        + (" and runs" if several else "")
        + ".",
    ]
    if several:
        lines.append(
            "The runs of a side have their interquartile mean"
            + (", and runs of the same seed are pairs." if found.same_seeds else ".")
        )
    if found.only is not None:
        first, second, p = found.only
        lines.append(
            f"Only run solved {first} episodes, only with {second}; p = {p:.3g} (exact sign test of initial states)."
        )
    return lines + found.notes


def _after(iterations: Sequence[int | None]) -> str:
    numbers = sorted({number for number in iterations if number is not None})
    return f" after {', '.join(map(str, numbers))} iterations" if numbers else ""


def print_comparison(found: Comparison, *, console: Console | None = None) -> None:
    """Print the tables and what they mean."""
    screen = console or wide_console(_LOG_WIDTH)
    for title, (head, *rows) in tables(found).items():
        table = Table(title=title, title_justify="left")
        for number, name in enumerate(head):
            table.add_column(name, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        screen.print(table)
    for line in sentences(found):
        screen.print(line, highlight=False, markup=False, soft_wrap=True)


def markdown(found: Comparison) -> str:
    """Return the tables as Markdown."""
    blocks = ["# Comparison"]
    for title, (head, *rows) in tables(found).items():
        lines = [head, ["---"] * len(head), *rows]
        blocks += [f"## {title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join([*blocks, *sentences(found)]) + "\n"


def write_comparison(found: Comparison, to: str) -> Path:
    """Write `comparison.json` and `comparison.md` into a folder and return it."""
    folder = Path(to).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "comparison.json": json_text(asdict(found), indent=1, ensure_ascii=False) + "\n",
        "comparison.md": markdown(found),
    }.items():
        with atomic_write(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return folder
