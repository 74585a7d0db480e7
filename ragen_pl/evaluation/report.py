"""An evaluation's tables: printed, as Markdown and as JSON, all from the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ragen_pl.base.files import atomic_write
from ragen_pl.base.json_text import json_text
from ragen_pl.base.phases import wide_console
from ragen_pl.metrics.proportions import reports_success
from ragen_pl.metrics.shown import SIMULATED_USER, VALIDATED

POLICY, BLANK_IMAGES, WARM_START = "policy", "blank images", "warm start"
"""Names in the tables of the trained policy, of the same with blank images, and of its warm start."""
JSON, MARKDOWN = "evaluation.json", "evaluation.md"
"""Files of an evaluation's settings and metrics, and of its tables."""

Rows = list[list[str]]
ValidationResults = Mapping[str, Mapping[str, Any]]
"""Settings and metrics by the validation set's name, as in `evaluation.json`."""

_FIRST_POLICIES = (POLICY, BLANK_IMAGES, WARM_START)
# Columns of a log, which has no width of its own; rich's default of 80 would wrap the tables.
_LOG_WIDTH = 140


def main_rows(validation_sets: ValidationResults) -> tuple[list[str], Rows]:
    """Return head and rows of the table of all validation sets and policies."""
    # the success has an interval
    (success, _, _), *others = VALIDATED[:4]
    labels = [success, *(label for label, _, _ in others)]
    played = [metrics for one in validation_sets.values() for metrics in one["policies"].values()]
    # a policy whose episodes have failed may have none
    names = dict.fromkeys(name for metrics in played for name in metrics)
    passes = [name for name in names if name.startswith("pass@") and name[5:].isdigit()]
    users = SIMULATED_USER if any("user_errors" in metrics for metrics in played) else ()
    head = ["validation set", "policy", *labels, *passes, *(label for label, _, _ in users)]
    rows = []
    for name, validation_set in validation_sets.items():
        for number, policy in enumerate(policies(validation_set)):
            metrics = validation_set["policies"][policy]
            rows.append(
                [
                    "" if number else name,
                    policy,
                    _success(metrics, "success"),
                    *(_decimal(metrics, metric, digits) for _, metric, digits in others),
                    *(_success(metrics, pass_name) for pass_name in passes),
                    *(_decimal(metrics, metric, digits) for _, metric, digits in users),
                ]
            )
    return head, rows


def difficulty_rows(validation_sets: ValidationResults) -> tuple[list[str], Rows]:
    """Return head and rows of success by difficulty, for validation sets with several difficulties."""
    columns = list(
        dict.fromkeys(
            policy
            for validation_set in validation_sets.values()
            for policy in policies(validation_set)
        )
    )
    rows = []
    for name, validation_set in validation_sets.items():
        by_policy = {
            policy: metrics.get("by_difficulty", {})
            for policy, metrics in validation_set["policies"].items()
        }
        # each without the episodes of its own that have failed
        episodes: dict[str, float] = {}
        for levels in by_policy.values():
            for level, metrics in levels.items():
                episodes[level] = max(episodes.get(level, 0.0), metrics["episodes"])
        if len(episodes) < 2 or not any(map(reports_success, validation_set["policies"].values())):
            continue
        for number, level in enumerate(sorted(episodes, key=int)):
            cells = [by_policy.get(policy, {}).get(level, {}) for policy in columns]
            rows.append(
                ["" if number else name, level, f"{episodes[level]:.0f}"]
                + [proportion(cell, "success") for cell in cells]
            )
    return ["validation set", "difficulty", "episodes", *columns], rows


def policies(validation_set: Mapping[str, Any]) -> list[str]:
    """Return the policies of a validation set: the trained one and its variants, then the scripted ones."""
    names = list(validation_set["policies"])
    first = [name for name in _FIRST_POLICIES if name in names]
    return first + [name for name in names if name not in _FIRST_POLICIES]


def _decimal(metrics: Mapping[str, float], name: str, digits: int) -> str:
    """Return a number of a table, or a dash."""
    return f"{metrics[name]:.{digits}f}" if name in metrics else "-"


def proportion(metrics: Mapping[str, float], name: str) -> str:
    """Return a proportion with its 95% interval, or a dash.

    >>> proportion({"success": 1.0, "success_low": 0.91, "success_high": 1.0}, "success")
    '1.000 [0.910, 1.000]'
    """
    if name not in metrics:
        return "-"
    return f"{metrics[name]:.3f} [{metrics[f'{name}_low']:.3f}, {metrics[f'{name}_high']:.3f}]"


def _success(metrics: Mapping[str, float], name: str) -> str:
    """Return success or pass@k with its interval, or a dash where no step has said whether the task is solved."""
    return proportion(metrics, name) if reports_success(metrics) else "-"


def notes(about: Mapping[str, Any], validation_sets: ValidationResults) -> list[str]:
    """Return the lines that explain the tables."""
    sampling = "greedy" if about["greedy"] else f"sampled at temperature {about['temperature']:g}"
    sampling += "".join(f", {name} {value:g}" for name, value in about["truncation"].items())
    samples = f"{about['samples']} episode{'s' * (about['samples'] > 1)} from each initial state"
    lines = [
        f"{about['checkpoint']}, {sampling}, {samples}, seed {about['seed']}.",
        "In brackets: the 95% interval (Wilson).",
    ]
    for name, validation_set in validation_sets.items():
        set_aside, total = validation_set["set_aside"], validation_set["initial_states"]
        if validation_set["key"] == "held_out" and 0 < set_aside < total:
            lines.append(
                f"{name}: training held out the first {set_aside} of the {total} initial states; "
                "it may have used the others."
            )
        played = validation_set["policies"].values()
        if played and not any(map(reports_success, played)):
            lines.append(f"{name}: no step says whether the task is solved; compare the returns.")
        distinct = [each.get("distinct_states") for each in played]
        if distinct and distinct[0] is not None and distinct[0] < total:
            lines.append(
                f"{name}: {distinct[0]:.0f} of the {total} initial states are distinct; episodes from equal ones "
                "depend on each other, which widens the intervals."
            )
        for policy, metrics in validation_set["policies"].items():
            if failed := metrics.get("failed_episodes"):
                total = failed + metrics["episodes"]
                lines.append(
                    f"{name}, {policy}: {failed:.0f} of {total:.0f} episodes failed and are left out; the warnings "
                    "name their errors."
                )
    return lines


def print_tables(
    about: Mapping[str, Any],
    validation_sets: ValidationResults,
    *,
    console: Console | None = None,
) -> None:
    """Print the tables."""
    screen = console or wide_console(_LOG_WIDTH)
    for title, (head, rows) in _tables(validation_sets).items():
        table = Table(title=title)
        for number, name in enumerate(head):
            table.add_column(name, justify="left" if number < 2 else "right")
        for number, row in enumerate(rows):
            table.add_row(*row, end_section=number + 1 < len(rows) and bool(rows[number + 1][0]))
        if rows:
            screen.print(table)
    for line in notes(about, validation_sets):
        screen.print(line, highlight=False, markup=False, soft_wrap=True)


def write_report(
    about: Mapping[str, Any], validation_sets: ValidationResults, *, folder: Path
) -> None:
    """Write `evaluation.json` and `evaluation.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    evaluation = {"about": about, "validation_sets": validation_sets}
    for name, text in {
        JSON: json_text(evaluation, indent=1, ensure_ascii=False),
        MARKDOWN: markdown(about, validation_sets),
    }.items():
        with atomic_write(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")


def markdown(about: Mapping[str, Any], validation_sets: ValidationResults) -> str:
    """Return the tables as Markdown."""
    blocks = ["# Evaluation", *notes(about, validation_sets)]
    for title, (head, rows) in _tables(validation_sets).items():
        if rows:
            lines = [head, ["---"] * len(head), *rows]
            blocks.append(f"## {title}")
            blocks.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(blocks) + "\n"


def _tables(validation_sets: ValidationResults) -> dict[str, tuple[list[str], Rows]]:
    return {
        "Validation sets": main_rows(validation_sets),
        "Success by difficulty": difficulty_rows(validation_sets),
    }
