"""The judge of `make soak-memory` fails on each kind of growth, and on nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from soak.soak_judge import findings
from support.runs.module_process import ROOT, run_module

HERE = Path(__file__).parent
LIMIT_S = 900


@pytest.mark.slow
def test_growth_on_purpose_is_found(tmp_path: Path) -> None:
    code, output = run_module(
        str(HERE / "leaking.py"),
        [],
        folder=tmp_path,
        paths=(ROOT / "tests", ROOT),
        timeout=LIMIT_S,
    )
    assert code == 0, output
    failing = json.loads(output.splitlines()[-1])
    assert failing.pop("nothing") == []
    for leak, found in failing.items():
        assert any(name.removeprefix("least ").startswith(leak) for name in found), (leak, found)


def measured(*, process: int, threads: list[int]) -> list[dict[str, float]]:
    """Return the measurements of a process that grows in nothing but its threads."""
    whole = dict.fromkeys(
        ("memory", "memory_of_children", "children", "objects", "descriptors", "shared"), 1000.0
    )
    return [
        whole
        | {"process": process, "iteration": 10 * number, "threads": count}
        | {"database": 3000.0 * number, "points": 10.0 * number}
        for number, count in enumerate(threads)
    ]


def failing(*processes: dict[str, list[int]]) -> list[str]:
    lines = [
        line
        for number, settings in enumerate(processes)
        for line in measured(process=number, **settings)
    ]
    return [name for name, _, _, passes in findings(lines) if not passes]


def test_the_start_of_a_process_is_not_judged() -> None:
    """Its first validation starts threads."""
    assert failing({"threads": [9] * 12}, {"threads": [12, 12, *[14] * 8]}) == []
    assert failing({"threads": [12, 12, 14, 14, 14, 14, 15, 15, 15, 15]}) == ["least threads"]


def test_a_run_that_is_too_short_is_not_judged() -> None:
    with pytest.raises(ValueError, match="5 measurements of the last process after its first 20"):
        failing({"threads": [14] * 20}, {"threads": [14] * 7})
