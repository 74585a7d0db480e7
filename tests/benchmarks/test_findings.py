"""Findings: arms that compose, a verdict by the criterion, runs that are continued, and the page of what has ended."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.runs.composing import composed
from support.runs.small_runs import SMALL

from ragen_pl.metrics.paired import Estimate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("findings")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("finding_cases")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("findings_report")


@pytest.mark.slow
def test_every_arm_composes_and_differs_from_the_others_in_what_it_names(
    findings: ModuleType, tmp_path: Path
) -> None:
    for name, finding in findings.FINDINGS.items():
        criterion = finding.criterion
        assert {criterion.more, criterion.less} <= set(finding.arms), name
        assert set(finding.starts or {}) <= set(finding.arms), name
        cells = findings.cells(name, seeds=1)
        assert [cell.arm for cell in cells[:2]] == [criterion.more, criterion.less]
        assert len({cell.folder(tmp_path) for cell in cells}) == len(finding.arms)
        settings = set()
        for cell in cells:
            start = cell.start(tmp_path) / "warm_start.pt"
            if not start.exists():
                start.parent.mkdir(parents=True)
                start.touch()
                composed(*cell.start_overrides())
            settings.add(str(composed(*cell.overrides(tmp_path))))
        assert len(settings) == len(finding.arms), name


@pytest.mark.parametrize(
    ("low", "value", "high", "seeds", "expected"),
    [
        (0.01, 0.1, 0.2, 5, "holds"),
        (-0.01, 0.1, 0.2, 5, "inconclusive"),
        (0.001, 0.01, 0.03, 5, "inconclusive"),
        (-0.2, -0.1, -0.05, 5, "does not hold"),
        # an effect, and smaller than counts
        (0.001, 0.005, 0.01, 5, "does not hold"),
        (0.01, 0.1, 0.2, 4, "inconclusive (4 of 5 seeds)"),
    ],
)
def test_verdict(
    cases: ModuleType,
    report: ModuleType,
    low: float,
    value: float,
    high: float,
    seeds: int,
    expected: str,
) -> None:
    criterion = cases.Criterion(more="a", less="b", least=0.02)
    assert report.verdict(Estimate(value, low, high), criterion, seeds=seeds) == expected


@pytest.mark.slow
def test_a_finding_is_run_once_and_reported(
    findings: ModuleType,
    cases: ModuleType,
    report: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = tuple(
        line for line in SMALL if not line.startswith(("trainer.", "callbacks.", "logger="))
    )
    tiny = cases.Finding(
        question="Does an update help?",
        claim="It does.",
        source="this test",
        task="tiny",
        arms={"one epoch": ("update.epochs=1",), "two epochs": ("update.epochs=2",)},
        criterion=cases.Criterion(more="two epochs", less="one epoch"),
        iterations=2,
        followed="turns",
    )
    monkeypatch.setitem(cases.TASKS, "tiny", small)
    declared = {
        "tiny": tiny,
        "later": replace(tiny, question="And later?"),
        "tiny_frozenlake": replace(tiny, task="frozenlake", repeats="tiny"),
    }
    monkeypatch.setattr(findings, "FINDINGS", declared)
    # of a start that was killed
    killed = findings.Cell(name="tiny", arm="two epochs", seed=0).folder(tmp_path)
    killed.mkdir(parents=True)
    (killed / "cost.jsonl").write_text('{"seconds": 100.0, "processor_seconds": 50.0}\n')
    for _ in range(2):
        findings.run("tiny", tmp_path, seeds=1, jobs=1)
    costs = {
        file.parent: [json.loads(line) for line in file.read_text().splitlines()]
        for file in tmp_path.rglob("cost.jsonl")
    }
    assert len(costs) == 3 and [len(costs[folder]) for folder in costs if folder != killed] == [
        1,
        1,
    ]
    assert len(costs[killed]) == 2 and costs[killed][1]["processor_seconds"] > 0.5
    page = tmp_path / "findings.md"
    report.write_report(declared, findings.cells, out=tmp_path, page=page)
    text = page.read_text()
    difference = re.search(r"\*\*Inconclusive \(1 of 5 seeds\)\*\*: ([+-][\d.]+) \[", text)[1]
    expected = f"[inconclusive (1 of 5 seeds), {difference}](#tiny) | [open](#tiny_frozenlake) |"
    assert f"| [tiny](#tiny) | Does an update help? | {expected}" in text
    assert "| [later](#later) | And later? | [open](#later) |  |" in text
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["tiny", "tiny_frozenlake", "later"]
    assert "16 episodes from" in text and "| two epochs | 1 | " in text
    curves = [report.curve_of(one.folder(tmp_path)) for one in findings.cells("tiny", seeds=1)]
    assert all(list(curve.iterations) == [0, 1, 2] for curve in curves)
    seconds = min(curve.seconds[-1] for curve in curves)
    assert f"| success after {seconds:.0f} processor s of RL |" in text
    written = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    turns = [
        one["metrics"]["val/turns"] for one in written if "val/turns" in one.get("metrics", {})
    ]
    assert "`turns` before and after RL |" in text
    assert f" | {turns[0]:.1f} to {turns[-1]:.1f} |" in text
    lower = all(curve.success[-1] < curve.success[0] for curve in curves)
    assert ("lower than before RL" in text) == lower
    (row,) = re.findall(r"^\| two epochs \|.*", text, re.MULTILINE)
    sampled = [
        one["metrics"]["rollout/success"]
        for one in written
        if "rollout/success" in one.get("metrics", {})
    ]
    assert len(sampled) == 2 and f"| {sampled[0]:.3f} to {sampled[1]:.3f} |" in row
    trained = next(curve for curve in curves if curve.seconds[-1] > 0)
    assert row.startswith(f"| two epochs | 1 | {trained.success[0]:.3f} |")
    first = replace(curves[0], seconds=np.array([0.0, 4.0, 8.0]), success=np.array([0.0, 0.2, 1.0]))
    assert [first.success_at(at) for at in (2.0, 6.0, 8.0)] == pytest.approx([0.1, 0.6, 1.0])
    assert (tmp_path / "findings_tiny.png").stat().st_size > 1000
    # a run of other settings is another run
    declared["later"] = replace(tiny, overrides=("update.epochs=3",))
    others = {one.folder(tmp_path).parent.name for one in findings.cells("later", seeds=1)}
    assert others and not others & {folder.parent.name for folder in costs}
    declared["later"] = replace(tiny, question="And later?")
    # on another machine, which has other findings' runs or none
    declared["tiny"] = replace(tiny, remark="A remark.")
    report.write_report(declared, findings.cells, out=tmp_path / "none", page=page)
    again = page.read_text()
    assert again.replace("- A remark.\n", "") == text and again != text
