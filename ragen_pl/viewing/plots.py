"""Plots of a run: the learning curve with intervals, by iteration and by wall time, and time by phase.

Drawn from rows, one an iteration; `ragen_pl.callbacks.plots` keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragen_pl.files import atomic_write
from ragen_pl.metrics.intervals import wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, float]
"""Of an iteration: `iteration`, `elapsed_s`, `rollout/success`, `val/success` …, `time/rollout_s` …"""

PHASES = ("rollout", "update", "validation", "other")
_COLOURS = {"rollout": "#2f7fd6", "update": "#e07b1f", "validation": "#3a9a63", "other": "#9aa3b2"}
_MINUTE = 60.0


def draw_plots(rows: Sequence[Row], folder: Path, *, title: str) -> list[Path]:
    """Draw the plots that the rows have metrics for into a folder and return their files.

    A file appears under its name once it is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    if any("val/success" in row or "rollout/success" in row for row in rows):
        drawn += [
            _figure(folder / "learning_by_iteration.png", title, lambda axes: _learning(axes, rows, by="iteration")),
            _figure(folder / "learning_by_time.png", title, lambda axes: _learning(axes, rows, by="elapsed_s")),
        ]  # fmt: skip
    if any(f"time/{phase}_s" in row for row in rows for phase in PHASES):
        drawn.append(_figure(folder / "time_by_phase.png", title, lambda axes: _phases(axes, rows)))
    return drawn


def _figure(path: Path, title: str, draw: Callable[[Axes], None]) -> Path:
    # the object-oriented way: pyplot would keep metrics, choose a backend and want a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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


def _learning(axes: Axes, rows: Sequence[Row], *, by: str) -> None:
    """Success of what was sampled in training and of the held-out validation set, with 95% intervals."""
    curves = (
        ("rollout", "sampled in training", "#9aa3b2"),
        ("val", "held-out validation set", "#2257bf"),
    )
    divisor = _MINUTE if by == "elapsed_s" else 1.0
    for prefix, label, color in curves:
        known = [row for row in rows if not math.isnan(row.get(f"{prefix}/success", math.nan))]
        if not known:
            continue
        places = [row[by] / divisor for row in known]
        shares = [row[f"{prefix}/success"] for row in known]
        few = len(known) < 60
        axes.plot(places, shares, color=color, label=label, marker="o" if few else "", markersize=3)
        bounds = [
            wilson(share, count=row.get(f"{prefix}/episodes") or math.inf)
            for row, share in zip(known, shares, strict=True)
        ]
        lows, highs = [one.low for one in bounds], [one.high for one in bounds]
        axes.fill_between(places, lows, highs, color=color, alpha=0.2, linewidth=0)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("success (95% interval, Wilson)")
    axes.set_xlabel("iterations" if by == "iteration" else "minutes of reinforcement learning")
    axes.legend(frameon=False)


def _phases(axes: Axes, rows: Sequence[Row]) -> None:
    """Seconds of each iteration by phase, stacked; the legend tells the totals."""
    timed = [row for row in rows if any(f"time/{phase}_s" in row for phase in PHASES)]
    columns = {phase: [row.get(f"time/{phase}_s", 0.0) for row in timed] for phase in PHASES}
    total = sum(map(sum, columns.values())) or 1.0
    bottom = [0.0] * len(timed)
    for phase, seconds in columns.items():
        share = f"{phase}: {sum(seconds) / _MINUTE:.1f} min, {100 * sum(seconds) / total:.0f}%"
        places = [row["iteration"] for row in timed]
        axes.bar(places, seconds, bottom=bottom, width=0.9, color=_COLOURS[phase], label=share)
        bottom = [low + one for low, one in zip(bottom, seconds, strict=True)]
    axes.set_xlabel("iterations")
    axes.set_ylabel("seconds")
    axes.set_ylim(0, 1.4 * max(bottom, default=1.0))  # room for the legend
    axes.legend(frameon=False)
