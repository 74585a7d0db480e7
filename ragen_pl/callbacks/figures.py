"""The metrics of a run in words: which are shown, and how."""

from __future__ import annotations

from collections.abc import Mapping

# What a reader wants to know of an iteration: word, metric, format.
SHOWN = (
    ("success", "rollout/success", "{:.3f}"),
    ("reward", "rollout/return", "{:.3f}"),
    ("entropy", "rollout/entropy", "{:.3f}"),
    ("validation set", "val/success", "{:.3f}"),
)


def iteration_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Return an iteration's metrics in words; those without a metric are left out.

    >>> iteration_metrics({"rollout/success": 0.5, "val/success": 0.25, "other": 1.0})
    ['success 0.500', 'validation set 0.250']
    """
    return [
        f"{word} {form.format(float(metrics[name]))}"
        for word, name, form in SHOWN
        if name in metrics
    ]


def duration(seconds: float) -> str:
    """Return a time in minutes and seconds, with hours where there are any.

    >>> duration(75), duration(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
