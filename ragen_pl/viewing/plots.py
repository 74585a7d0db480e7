"""Plots of a run: success by iteration and by wall time, with intervals, and time by phase.

They are drawn from rows, one an iteration, of the run's record (`ragen_pl.metrics.record`). The live
view reads the same rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen_pl.base.files import atomic_write
from ragen_pl.metrics.proportions import success_interval
from ragen_pl.metrics.record import Row
from ragen_pl.metrics.shown import PHASES, environments_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = "plots"
"""Folder of a run's plots."""
EVENTS = "collapse.jsonl"
"""File of a run's alarms."""

_PHASE_COLORS = {
    "rollout": "#2f7fd6",
    "update": "#e07b1f",
    "validation": "#3a9a63",
    "other": "#9aa3b2",
}
# Prefix of the metrics, label and color of each learning curve.
_CURVES = (
    ("rollout", "sampled in training", "#9aa3b2"),
    ("val", "validation set, greedy", "#2257bf"),
)
_STAGE = "rollout/curriculum_stage"
_STAGE_COLOR = "#8a5aa8"
_MINUTE = 60.0
_MANY = 1000


def draw_plots(rows: Sequence[Row], folder: Path, *, title: str) -> list[Path]:
    """Draw the plots that the rows have metrics for into a folder and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Axes], None]] = {}
    if any("val/success" in row or "rollout/success" in row for row in rows):
        plots["learning_by_iteration.png"] = partial(_learning, rows=rows, by="iteration")
        plots["learning_by_time.png"] = partial(_learning, rows=rows, by="elapsed_s")
    validated = [
        name.removeprefix("val/") for row in rows for name in row if name.startswith("val/")
    ]
    if names := environments_in(validated):
        plots["success_by_environment.png"] = partial(_by_environment, rows=rows, names=names)
    if any(_is_timed(row) for row in rows):
        plots["time_by_phase.png"] = partial(_phases, rows=rows)
    return [_figure(folder / name, title, draw) for name, draw in plots.items()]


def _by_environment(axes: Axes, *, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Draw success on the validation set of each environment of a mixture, with 95% intervals."""
    for number, name in enumerate(names):
        _curve(axes, rows, prefix=f"val/{name}", label=name, color=f"C{number}", by="iteration")
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("success (95% interval)")
    axes.set_xlabel("iteration")
    axes.legend(frameon=False)


def _is_timed(row: Row) -> bool:
    return any(f"time/{phase}_s" in row for phase in PHASES)


def _figure(path: Path, title: str, draw: Callable[[Axes], None]) -> Path:
    # Without pyplot, which keeps figures in memory and selects a backend that may need a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # MLflow imports it in another thread, and a figure reads its version: this waits for the end of the import
    if "IPython" in sys.modules:
        import_module("IPython")
    figure = Figure(figsize=(7.2, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(color="#e3e6ec")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    draw(axes)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."))
    return path


def _learning(axes: Axes, *, rows: Sequence[Row], by: str) -> None:
    """Draw success of the sampled episodes and on the validation set, with 95% intervals."""
    for prefix, label, color in _CURVES:
        _curve(axes, rows, prefix=prefix, label=label, color=color, by=by)
    _mark_stages(axes, rows=rows, by=by)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("success (95% interval)")
    axes.set_xlabel("iteration" if by == "iteration" else "minutes of reinforcement learning")
    # the best place is searched for among all points
    axes.legend(frameon=False, loc="lower right" if len(rows) > _MANY else "best")


def _curve(
    axes: Axes, rows: Sequence[Row], *, prefix: str, label: str, color: str, by: str
) -> None:
    """Draw the success of the metrics with a prefix, where they have one, with its interval."""
    name, divisor = f"{prefix}/success", _MINUTE if by == "elapsed_s" else 1.0
    points = [row for row in rows if math.isfinite(row.get(name, math.nan))]
    if not points:
        return
    x = [row[by] / divisor for row in points]
    rates = [row[name] for row in points]
    marker = "o" if len(points) < 60 else ""
    axes.plot(x, rates, color=color, label=label, marker=marker, markersize=3)
    intervals = [success_interval(row, f"{prefix}/") for row in points]
    low, high = [one.low for one in intervals], [one.high for one in intervals]
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _mark_stages(axes: Axes, *, rows: Sequence[Row], by: str) -> None:
    """Draw a line where a later stage of the curriculum begins: success is then that of harder initial states."""
    divisor = _MINUTE if by == "elapsed_s" else 1.0
    for number, (row, stage) in enumerate(stage_starts(rows)):
        place = row[by] / divisor
        # only labels without an underscore at their beginning are in the legend
        label = "_" if number else "next stage of the curriculum"
        axes.axvline(place, color=_STAGE_COLOR, linestyle="--", linewidth=1, label=label)
        text_style: dict[str, Any] = {
            "fontsize": 8,
            "color": _STAGE_COLOR,
            "textcoords": "offset points",
        }
        axes.annotate(f"{stage}", (place, 1.0), xytext=(3, -8), **text_style)


def stage_starts(rows: Sequence[Row]) -> list[tuple[Row, int]]:
    """Return the rows in which a later stage of the curriculum begins, with the number of the stage from 0.

    >>> rows = [{"iteration": n, "rollout/curriculum_stage": n // 2} for n in range(4)]
    >>> [(row["iteration"], stage) for row, stage in stage_starts(rows)]
    [(2, 1)]
    """
    staged = [row for row in rows if _STAGE in row]
    pairs = pairwise(staged)
    return [(row, int(row[_STAGE])) for before, row in pairs if row[_STAGE] > before[_STAGE]]


def _phases(axes: Axes, *, rows: Sequence[Row]) -> None:
    """Draw the seconds of each iteration by phase, stacked, with the totals in the legend."""
    timed = [row for row in rows if _is_timed(row)]
    x = [row["iteration"] for row in timed]
    columns = {phase: [row.get(f"time/{phase}_s", 0.0) for row in timed] for phase in PHASES}
    total = sum(map(sum, columns.values())) or 1.0
    edges = [one - 0.5 for one in x] + [x[-1] + 0.5]
    bottom = [0.0] * len(timed)
    for phase, seconds in columns.items():
        label = f"{phase}: {sum(seconds) / _MINUTE:.1f} min, {100 * sum(seconds) / total:.0f}%"
        top = [low + height for low, height in zip(bottom, seconds, strict=True)]
        # one shape for all iterations: a bar for each takes seconds where there are thousands
        axes.stairs(top, edges, baseline=bottom, fill=True, color=_PHASE_COLORS[phase], label=label)
        bottom = top
    axes.set_xlabel("iteration")
    axes.set_ylabel("seconds")
    # Room for the legend above the bars.
    axes.set_ylim(0, 1.4 * max(bottom, default=1.0))
    axes.legend(frameon=False, loc="upper left")
