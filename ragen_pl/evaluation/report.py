"""An evaluation's tables: printed, as Markdown, as JSON. One list of rows serves all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = list[list[str]]
_ORDER = ("policy", "images blanked", "warm start")


def main_rows(validation_sets: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], Rows]:
    """Return head and rows of the table of all validation sets and players."""
    first = next(iter(validation_sets.values()))["policies"]["policy"]
    passes = [name for name in first if name.startswith("pass@") and name[5:].isdigit()]
    head = ["validation_set", "policy", "success", "return", "turns", "valid actions", *passes]
    rows = []
    for name, validation_set in validation_sets.items():
        for number, policy_name in enumerate(policies(validation_set)):
            found = validation_set["policies"][policy_name]
            rows.append(
                [
                    "" if number else name,
                    policy_name,
                    share(found, "success"),
                    f"{found['return']:.3f}",
                    f"{found['turns']:.2f}",
                    f"{found['valid_actions']:.3f}" if "valid_actions" in found else "-",
                    *(share(found, name) for name in passes),
                ]
            )
    return head, rows


def difficulty_rows(validation_sets: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], Rows]:
    """Return head and rows of success by difficulty; no rows where no environment tells any, or only one."""
    names = list(
        dict.fromkeys(
            policy_name
            for validation_set in validation_sets.values()
            for policy_name in policies(validation_set)
        )
    )
    rows = []
    for name, validation_set in validation_sets.items():
        levels = validation_set["policies"]["policy"].get("by_difficulty", {})
        if len(levels) < 2:
            continue
        for number, (level, found) in enumerate(levels.items()):
            cells = [
                validation_set["policies"].get(policy_name, {}).get("by_difficulty", {}).get(level)
                for policy_name in names
            ]
            rows.append(
                ["" if number else name, level, f"{found['episodes']:.0f}"]
                + [share(cell, "success") if cell else "-" for cell in cells]
            )
    return ["validation_set", "difficulty", "episodes", *names], rows


def policies(validation_set: Mapping[str, Any]) -> list[str]:
    """Return who played a validation set: the policy, itself at other times, then the scripted policies."""
    known = list(validation_set["policies"])
    return [name for name in _ORDER if name in known] + [
        name for name in known if name not in _ORDER
    ]


def share(found: Mapping[str, float], name: str) -> str:
    """Return a share with its 95% interval.

    >>> share({"success": 1.0, "success_low": 0.91, "success_high": 1.0}, "success")
    '1.000 [0.910, 1.000]'
    """
    return f"{found[name]:.3f} [{found[f'{name}_low']:.3f}, {found[f'{name}_high']:.3f}]"


def notes(about: Mapping[str, Any], validation_sets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the sentences that a reader of the table needs."""
    how = "greedy" if about["greedy"] else f"sampled at temperature {about['temperature']:g}"
    told = [
        f"{about['checkpoint']}, {how}, {about['samples']} from each start, seed {about['seed']}.",
        "In brackets: the 95% interval (Wilson).",
    ]
    for name, validation_set in validation_sets.items():
        if (
            validation_set["key"] == "held_out"
            and 0 < validation_set["set_aside"] < validation_set["starts"]
        ):
            told.append(
                f"{name}: training set the first {validation_set['set_aside']} of the {validation_set['starts']} starts aside; "
                "the others may have occurred in it."
            )
    return told


def print_tables(
    about: Mapping[str, Any],
    validation_sets: Mapping[str, Mapping[str, Any]],
    *,
    console: Console | None = None,
) -> None:
    """Print the tables."""
    screen = console or Console()
    if not screen.is_terminal and console is None:
        screen.width = 140  # a log has no width of its own, and 80 would wrap the table
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
    about: Mapping[str, Any], validation_sets: Mapping[str, Mapping[str, Any]], *, folder: Path
) -> None:
    """Write `evaluation.json` and `evaluation.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {"about": about, "validation_sets": validation_sets}, indent=1, ensure_ascii=False
    )
    (folder / "evaluation.json").write_text(text, encoding="utf-8")
    (folder / "evaluation.md").write_text(markdown(about, validation_sets), encoding="utf-8")


def markdown(about: Mapping[str, Any], validation_sets: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables as Markdown."""
    parts = ["# Evaluation", *notes(about, validation_sets)]
    for title, (head, rows) in _tables(validation_sets).items():
        if rows:
            lines = [head, ["---"] * len(head), *rows]
            parts.append(f"## {title}")
            parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts) + "\n"


def _tables(validation_sets: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[list[str], Rows]]:
    return {
        "Validation sets": main_rows(validation_sets),
        "Success by difficulty": difficulty_rows(validation_sets),
    }
