"""Report of the comparison: a table and two plots per environment, from the folders of finished runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from ragen_pl.metrics.record import RecordReader

# Two-sided 95% quantiles of Student's t by degrees of freedom.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}
Key = tuple[str, str, int]
"""(environment, algorithm, seed)"""


@dataclass(frozen=True, slots=True)
class Curve:
    """Greedy success of one run on its validation set, by iteration and by time.

    Attributes:
        iterations: Iterations before each validation.
        seconds: Seconds before each validation.
        success: Success of each validation.
        sampled: Success of the sampled episodes of the last quarter of the iterations, NaN where it is not read.
        metrics: The run's last metrics.
    """

    iterations: np.ndarray
    seconds: np.ndarray
    success: np.ndarray
    sampled: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)

    def success_at(self, seconds: float) -> float:
        """Return the success after so many seconds, interpolated between validations."""
        return float(np.interp(seconds, self.seconds, self.success))


def read_curve(folder: Path) -> Curve:
    """Read the curve of a run from its record, and its final metrics."""
    all_rows = RecordReader(folder).rows()
    rows = [row for row in all_rows if "val/success" in row]
    sampled = [row["rollout/success"] for row in all_rows if "rollout/success" in row]
    last = sampled[-math.ceil(len(sampled) / 4) :]
    iterations, seconds, success = (
        np.array([row[name] for row in rows]) for name in ("iteration", "elapsed_s", "val/success")
    )
    metrics = json.loads((folder / "metrics.json").read_text())
    return Curve(iterations, seconds, success, float(np.mean(last)) if last else math.nan, metrics)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and half the width of its 95% interval (Student's t).

    >>> mean, half = interval([0.8, 0.9, 1.0])
    >>> round(mean, 3), round(half, 3)
    (0.9, 0.248)
    """
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, math.nan
    spread = float(np.std(values, ddof=1)) / math.sqrt(count)
    degrees = count - 1
    # within 0.02
    quantile = _T95.get(degrees, 1.96 + 2.37 / degrees + 2.82 / degrees**2)
    return mean, quantile * spread


def write_report(folders: Mapping[Key, Path], *, page: Path, budget: str) -> None:
    """Write the page and its plots. Environments without finished runs are omitted.

    Args:
        folders: Folder of each finished run.
        page: Page to write; its plots lie beside it.
        budget: What each run had, such as "4 minutes of RL".
    """
    curves = {key: read_curve(folder) for key, folder in folders.items()}
    environments = list(dict.fromkeys(environment for environment, _, _ in curves))
    sections = [_INTRODUCTION.format(budget=budget)]
    for environment in environments:
        of_environment = {key[1:]: curve for key, curve in curves.items() if key[0] == environment}
        plot = page.with_name(f"{page.stem}_{environment}.png")
        draw(of_environment, title=environment, file=plot)
        sections += [
            f"## {environment}\n",
            table(of_environment),
            paired(of_environment),
            f"![Success by iteration and by time]({plot.name})\n",
        ]
    notes = page.with_name(f"{page.stem}_notes.md")
    if notes.exists():
        sections.append(notes.read_text())
    page.write_text("\n".join(sections))
    print(f"{len(curves)} runs: {page}")


def table(curves: Mapping[tuple[str, int], Curve]) -> str:
    """Return a Markdown table with one row per algorithm."""
    lines = [
        "| algorithm | seeds | warm start | final | best and worst seed | iterations | mean over time "
        "| sampled | think accuracy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for algorithm in dict.fromkeys(name for name, _ in curves):
        runs = [curve for (name, _), curve in curves.items() if name == algorithm]
        final = [float(run.success[-1]) for run in runs]
        mean, half = interval(final)
        start, _ = interval([float(run.success[0]) for run in runs])
        area, area_half = interval([_area(run) for run in runs])
        spread = f"{max(final):.3f}, {min(final):.3f}"
        accuracy = [run.metrics.get("val/think_accuracy", math.nan) for run in runs]
        sampled = with_half_width(*interval([run.sampled for run in runs]))
        final_text = with_half_width(mean, half)
        iterations = np.mean([run.iterations[-1] for run in runs])
        lines.append(
            f"| {algorithm} | {len(runs)} | {start:.3f} | {final_text} | {spread} | {iterations:.0f} | "
            f"{with_half_width(area, area_half)} | {sampled} | {np.mean(accuracy):.2f} |"
        )
    return "\n".join(lines) + "\n"


def paired(curves: Mapping[tuple[str, int], Curve]) -> str:
    """Return a Markdown table of the differences to the first algorithm, paired by seed; empty for less than two."""
    first, *others = dict.fromkeys(name for name, _ in curves)
    readings: list[Callable[[Curve], float]] = [
        lambda run: float(run.success[-1]),
        _area,
        lambda run: run.sampled,
    ]
    lines = [
        f"| less {first}, by seed | seeds | final | mean over time | sampled |",
        "|---|---|---|---|---|",
    ]
    for algorithm in others:
        seeds = [seed for name, seed in curves if name == algorithm and (first, seed) in curves]
        pairs = [(curves[algorithm, seed], curves[first, seed]) for seed in seeds]
        if not pairs:
            continue
        cells = [
            with_half_width(*interval([read(own) - read(other) for own, other in pairs]), sign="+")
            for read in readings
        ]
        lines.append(f"| {algorithm} | {len(pairs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def with_half_width(mean: float, half: float, *, sign: str = "") -> str:
    """Return a mean and half the width of its interval as text."""
    return f"{mean:{sign}.3f}" if math.isnan(half) else f"{mean:{sign}.3f} ± {half:.3f}"


def _area(curve: Curve) -> float:
    """Return the mean success over the time of the run."""
    width = curve.seconds[-1] - curve.seconds[0]
    if width <= 0:
        return float(curve.success[-1])
    return float(np.trapezoid(curve.success, curve.seconds) / width)


def draw(
    curves: Mapping[tuple[str, int], Curve],
    *,
    title: str,
    file: Path,
    clock: str = "minutes of RL",
) -> None:
    """Draw the mean success over seeds by iteration and by minutes of a clock, with the range of the seeds shaded."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for color, algorithm in enumerate(dict.fromkeys(name for name, _ in curves)):
        runs = [curve for (name, _), curve in curves.items() if name == algorithm]
        for axis, scale in ((axes[0], 1.0), (axes[1], 60.0)):
            xs = [run.iterations if axis is axes[0] else run.seconds / scale for run in runs]
            grid = np.linspace(max(x[0] for x in xs), min(x[-1] for x in xs), 60)
            values = np.stack(
                [np.interp(grid, x, run.success) for x, run in zip(xs, runs, strict=True)]
            )
            axis.plot(grid, values.mean(0), color=f"C{color}", label=algorithm)
            axis.fill_between(grid, values.min(0), values.max(0), color=f"C{color}", alpha=0.12)
    axes[0].set(
        xlabel="iteration", ylabel="greedy success on held-out episodes", title=title, ylim=(0, 1)
    )
    axes[1].set(xlabel=clock)
    axes[1].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    plt.close(figure)


_INTRODUCTION = """# Comparison of algorithms

Generated by `python benchmarks/comparison.py run`, which can be interrupted and continued; `report` writes this
page again. Each run is a small model built from its config, on one CPU thread, with {budget}.
All algorithms use the same constant learning rate; everything else is as in `conf/algorithm/`. All runs of a seed
start from the same weights, except RICO: its samples are whole episodes, and it has its own warm start with about
as many demonstrated turns. Numbers of groups and group sizes are those of the files. The metric is greedy success on
held-out episodes: mean over seeds ± half of its 95% interval (Student's t); a second table has the differences to the
first algorithm, seed by seed. *Sampled* is the success of the episodes that were trained on in the last quarter of the
iterations. The shaded area is the range of the seeds. *Think accuracy* is the share of think blocks that equal the
true state description.
"""
