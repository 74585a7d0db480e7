"""Report of findings: for each the published claim, ours with intervals, curves, and the verdict of its criterion."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from comparison_report import Curve, draw, interval, with_half_width
from runner import cost_of, is_finished

from ragen_pl.evaluation.comparison import METRICS, Comparison, compare, with_interval
from ragen_pl.evaluation.played import Question
from ragen_pl.metrics.paired import Estimate
from ragen_pl.metrics.record import RecordReader
from ragen_pl.viewing.validations import read_validation, validation_files

if TYPE_CHECKING:
    from findings import Cell, Criterion, Finding

HOLDS, NOT, INCONCLUSIVE = "holds", "does not hold", "inconclusive"
_SET = "held_out"
_SAMPLED = "rollout/success"
_HOURS = "took {} processor hours, and their warm starts {}"
_LOWER = (
    "In all arms greedy success is lower than before RL: the difference compares how much is lost."
)
_OPEN = "**Open**: no run of the two arms that decide has ended."


def verdict(difference: Estimate, criterion: Criterion, *, seeds: int) -> str:
    """Return the verdict of a difference on a finding.

    It holds if the interval lies above 0 and the difference is at least the least effect. It does not hold if the whole
    interval is below that effect. Else, or with fewer seeds than the criterion asks for, it is inconclusive.
    """
    if seeds < criterion.seeds:
        return f"{INCONCLUSIVE} ({seeds} of {criterion.seeds} seeds)"
    if difference.high < criterion.least:
        return NOT
    holds = difference.low > 0 and difference.value >= criterion.least
    return HOLDS if holds else INCONCLUSIVE


def write_report(
    findings: Mapping[str, Finding],
    cells: Callable[..., Sequence[Cell]],
    *,
    out: Path,
    page: Path,
) -> None:
    """Write the page, and the curves of each finding beside it.

    A finding without runs in `out` keeps its results from the page, as where they were made on another machine.

    Args:
        findings: The findings by name.
        cells: Returns the runs of a finding.
        out: Folder of the runs.
        page: Page to write.
    """
    kept = _kept_results(page.read_text(encoding="utf-8")) if page.exists() else {}
    bodies: dict[str, list[str]] = {}
    for name, finding in findings.items():
        runs: dict[str, dict[int, Cell]] = {}
        for cell in cells(name, seeds=_seeds_in(out / name)):
            if is_finished(cell.folder(out)):
                runs.setdefault(cell.arm, {})[cell.seed] = cell
        results = _results(name, finding, runs, out=out, page=page) if runs else kept.get(name)
        bodies[name] = results or [_OPEN]
    # repetitions after what they repeat
    order = sorted(findings, key=lambda name: list(findings).index(findings[name].repeats or name))
    sections = [
        "\n\n".join([f"## {name}", _claim(name, findings[name]), *bodies[name]]) for name in order
    ]
    head = _verdicts(findings, {name: body[0] for name, body in bodies.items()})
    text = "\n\n".join([_INTRODUCTION, head, _total("\n".join(sections)), *sections])
    page.write_text(f"{text}\n", encoding="utf-8")
    print(page)


def _total(sections: str) -> str:
    """Return the hours of all findings of a page."""
    hours = [
        (float(run), float(start))
        for run, start in re.findall(_HOURS.format(*[r"([\d.]+)"] * 2), sections)
    ]
    spent, before = (sum(column) for column in zip(*hours, strict=True)) if hours else (0.0, 0.0)
    return (
        f"In all {spent:.1f} processor hours, and {before:.1f} of warm starts; those that several findings share are "
        "counted in each."
    )


def _verdicts(findings: Mapping[str, Finding], results: Mapping[str, str]) -> str:
    """Return the table of all verdicts, with a column a task."""
    tasks = list(dict.fromkeys(finding.task for finding in findings.values()))
    lines = [f"| finding | question | {' | '.join(tasks)} |", "|---|---|" + "---|" * len(tasks)]
    for name, finding in findings.items():
        if finding.repeats is not None:
            continue
        by_task = {findings[one].task: one for one in findings if findings[one].repeats == name}
        by_task[finding.task] = name
        cells = [
            f"[{_in_short(results[by_task[task]])}](#{by_task[task]})" if task in by_task else ""
            for task in tasks
        ]
        lines.append(f"| [{name}](#{name}) | {finding.question} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _in_short(result: str) -> str:
    """Return the verdict and the difference that decides, from the first line of a finding's results."""
    _, result, rest = result.split("**", 2)
    difference = re.match(r": ([+-]?[\d.]+) ", rest)
    return result[0].lower() + result[1:] + (f", {difference[1]}" if difference else "")


def _kept_results(page: str) -> dict[str, list[str]]:
    """Return the blocks below the claim of each finding on a page that was written before."""
    kept = {}
    for section in page.split("\n## ")[1:]:
        name, _, text = section.partition("\n")
        _, found, results = text.partition("\n\n**")
        if found:
            kept[name] = [f"**{results.strip()}"]
    return kept


def _seeds_in(folder: Path) -> int:
    """Return one more than the highest seed of a finding's runs."""
    numbers = (int(run.name) for run in folder.glob("*/*") if run.name.isdecimal())
    return max(numbers, default=-1) + 1


def _claim(name: str, finding: Finding) -> str:
    criterion = finding.criterion
    return "\n".join(
        [
            f"{finding.question}",
            "",
            f"- Published: {finding.claim} ({finding.source}; {finding.figure or 'no figure'})",
            f"- Criterion: {METRICS[criterion.metric]} of *{criterion.more}* less that of *{criterion.less}* after "
            f"{finding.iterations} iterations is at least {criterion.least:g}; {criterion.seeds} seeds.",
            f"- Command: `python benchmarks/findings.py run {name} --seeds {criterion.seeds}`",
            *([] if finding.remark is None else [f"- {finding.remark}"]),
        ]
    )


def _results(
    name: str, finding: Finding, runs: Mapping[str, Mapping[int, Cell]], *, out: Path, page: Path
) -> list[str]:
    """Return the blocks below the claim. The first one has the verdict."""
    criterion = finding.criterion
    question = Question(set=_SET, may_differ=finding.may_differ)
    base = runs.get(criterion.less, {})
    found: dict[str, Comparison] = {}
    for arm in finding.arms:
        seeds = sorted(runs.get(arm, {}).keys() & base.keys())
        if arm != criterion.less and seeds:
            sides = [[str(side[seed].folder(out)) for seed in seeds] for side in (runs[arm], base)]
            found[arm] = compare(*sides, question)
    if criterion.more not in found:
        return [_OPEN]
    decided = found[criterion.more]
    difference = decided.metrics[criterion.metric].difference
    result = verdict(difference, criterion, seeds=len(decided.sides[0]))
    plot = page.with_name(f"{page.stem}_{name}.png")
    curves = {
        (arm, seed): curve_of(cell.folder(out))
        for arm, ended in runs.items()
        for seed, cell in ended.items()
    }
    draw(curves, title=name, file=plot, clock="processor minutes of RL")
    missing = [arm for arm in finding.arms if arm not in runs]
    by_arm = {arm: [curve for (name, _), curve in curves.items() if name == arm] for arm in runs}
    is_lower = all(
        sum(curve.success[-1] - curve.success[0] for curve in of_arm) < 0
        for of_arm in by_arm.values()
    )
    return [
        f"**{result[0].upper()}{result[1:]}**: {with_interval(difference)}.",
        _table(finding, runs, found, by_arm, out=out),
        *([f"Open: {', '.join(missing)}."] if missing else []),
        *([_LOWER] if is_lower else []),
        f"{decided.episodes} episodes from {decided.states} initial states. {_hours(runs, out=out)}",
        f"![Success by iteration and by processor time]({plot.name})",
    ]


def _table(
    finding: Finding,
    runs: Mapping[str, Mapping[int, Cell]],
    found: Mapping[str, Comparison],
    curves: Mapping[str, Sequence[Curve]],
    *,
    out: Path,
) -> str:
    less = finding.criterion.less
    # a run without RL has one validation
    seconds = min(
        float(one.seconds[-1])
        for of_arm in curves.values()
        for one in of_arm
        if len(one.seconds) > 1
    )
    columns = (
        "arm", "seeds", "before RL", "success", f"less *{less}*", f"return, less *{less}*",
        f"success after {seconds:.0f} processor s of RL", "sampled success", "sampled tokens", "processor s of a run",
        "and of its warm start",
        *([] if finding.followed is None else [f"`{finding.followed}` before and after RL"]),
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    first = next(iter(found.values()))
    for arm in finding.arms:
        if arm != less and arm not in found:
            continue
        one, side = (found[arm], 0) if arm in found else (first, 1)
        pair = one.metrics["success"]
        own = (pair.left, pair.right)[side]
        differences = [
            with_interval(one.metrics[name].difference) if arm in found else ""
            for name in ("success", "return")
        ]
        spent, before = (
            np.mean([cost_of(folder).processor_seconds for folder in folders])
            for folders in (
                [cell.folder(out) for cell in runs[arm].values()],
                [cell.start(out) for cell in runs[arm].values()],
            )
        )
        at_time = [curve.success_at(seconds) for curve in curves[arm]]
        start = np.mean([curve.success[0] for curve in curves[arm]])
        cells = (
            arm, str(len(one.sides[side])), f"{start:.3f}", f"{own.value:.3f} [{own.low:.3f}, {own.high:.3f}]",
            *differences, with_half_width(*interval(at_time)),
            _sampled([cell.folder(out) for cell in runs[arm].values()]),
            f"{one.costs[side]['response_tokens']:,.0f}", f"{spent:.0f}", f"{before:.0f}",
        )  # fmt: skip
        if finding.followed is not None:
            ends = [_ends(cell.folder(out), finding.followed) for cell in runs[arm].values()]
            cells += (" to ".join(f"{value:.1f}" for value in np.mean(ends, axis=0)),)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _hours(runs: Mapping[str, Mapping[int, Cell]], *, out: Path) -> str:
    ended = [cell for of_arm in runs.values() for cell in of_arm.values()]
    spent, before = (
        sum(cost_of(folder).processor_seconds for folder in folders) / 3600
        for folders in ({cell.folder(out) for cell in ended}, {cell.start(out) for cell in ended})
    )
    return f"{len(ended)} runs {_HOURS.format(f'{spent:.2f}', f'{before:.2f}')}; some of those are other findings' too."


def _sampled(folders: Sequence[Path]) -> str:
    """Return the mean success of the rollouts in the first and the last quarter of the iterations."""
    quarters = []
    for folder in folders:
        values = _values(folder, _SAMPLED)
        size = max(1, len(values) // 4)
        if values:
            quarters.append([np.mean(values[:size]), np.mean(values[-size:])])
    return " to ".join(f"{value:.3f}" for value in np.mean(quarters, axis=0)) if quarters else ""


def _ends(folder: Path, metric: str) -> tuple[float, float]:
    """Return a metric of a run's first and last validation."""
    values = _values(folder, f"val/{metric}")
    return values[0], values[-1]


def _values(folder: Path, metric: str) -> list[float]:
    """Return all values of a metric in a run's record, in their order."""
    points = RecordReader(folder, only=lambda own: own == metric).points()
    return [point.metrics[metric] for point in points if metric in point.metrics]


def curve_of(folder: Path) -> Curve:
    """Return the success of a run's validations by iteration and by processor seconds."""
    read = [read_validation(file) for file in validation_files(folder, _SET).values()]
    success = [np.mean([one["success"] for one in validation["episodes"]]) for validation in read]
    return Curve(
        iterations=np.array([validation["iteration"] for validation in read]),
        seconds=np.array([validation["cost"]["processor_seconds"] for validation in read]),
        success=np.array(success),
    )


_INTRODUCTION = """# Findings of papers, repeated

Generated by `python benchmarks/findings.py report` from runs of `python benchmarks/findings.py run NAME`, which can be
interrupted and continued. `benchmarks/finding_cases.py` declares each finding: the claim, its source, the arms and
the criterion, all written before the runs. The models are small and built from their config; a finding about large
models may hold for those and not here.

Success is greedy, of the last weights, on held-out episodes that are the same for all runs. An arm has the
interquartile mean over its seeds, and in brackets the 95% interval of a bootstrap over seeds and initial states
([how](evaluation.md#compare-runs)). Differences are paired by seed and by episode. A finding *holds* if the interval
of the difference that decides lies above 0 and the difference is as large as the criterion says. It *does not hold* if
the whole interval is below that. Else it is *inconclusive*. *Before RL* is the mean greedy success of the warm starts,
and *sampled success* that of the rollouts, on states of training, in the first and in the last quarter of the
iterations. A finding without runs is open. The table has a column for each task; where a cell is empty, no run is
declared. The processor seconds of a run are those of its whole process, start, validations and summary included.
Success at equal time is interpolated between the validations of each run, at the processor time of rollouts and
updates in which the fastest run has ended, as a mean over seeds with its 95% interval (Student's t)."""
