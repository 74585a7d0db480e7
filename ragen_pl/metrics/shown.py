"""Which metrics are shown where: in lines of progress, tables, plots and the live view. Trackers get all metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable

VALIDATED = (
    ("success", "success", 3),
    ("return", "return", 3),
    ("turns", "turns", 2),
    ("valid actions", "valid_actions", 3),
    ("response tokens", "response_tokens", 1),
)
"""Columns of tables of policies on a validation set: label, metric, digits."""

SIMULATED_USER = (
    ("user errors", "user_errors", 3),
    ("episodes without", "without_user_errors", 3),
    ("success in these", "success_without_user_errors", 3),
)
"""Columns of those tables where a policy has played with a simulated user."""

PROGRESS = (
    ("success", "rollout/success", 3),
    ("return", "rollout/return", 3),
    ("valid actions", "rollout/valid_actions", 3),
    ("entropy", "rollout/entropy", 3),
    ("user errors", "rollout/user_errors", 3),
    ("validation success", "val/success", 3),
    ("truncated", "rollout/truncated", 3),
    ("skipped steps", "update/skipped_steps", 0),
    ("steps without a token", "update/empty_steps_policy", 0),
)
"""Metrics of an iteration's line: label, metric, digits."""
ABOVE_ZERO = frozenset({"rollout/truncated", "update/skipped_steps", "update/empty_steps_policy"})
"""Those of what should not happen, which the line shows where it did."""

PHASES = ("rollout", "update", "validation", "other")
"""Phases of an iteration, whose seconds are `time/<phase>_s`."""

_PLAYED = (("val", "validation"), ("rollout", "training"))
_FRACTION = (0, 1)


def _played(name: str) -> list[tuple[str, str]]:
    return [(f"{prefix}/{name}", label) for prefix, label in _PLAYED]


CHARTS = (
    ("Success", _played("success"), _FRACTION),
    ("Return", _played("return"), None),
    ("Entropy, nats per token", [("rollout/entropy", "training")], None),
    (
        "KL, nats per token",
        [("update/approx_kl", "of the update"), ("update/reference_kl", "to the reference")],
        None,
    ),
    ("Clipped fraction of tokens", [("update/clip_fraction", "update")], None),
    ("Valid actions", _played("valid_actions"), _FRACTION),
    ("Turns", _played("turns"), None),
    ("Tokens of a response", _played("response_tokens"), None),
    ("Actions with an effect", _played("effective_actions"), _FRACTION),
    ("Responses at their length limit", _played("overlong_responses"), _FRACTION),
    ("Truncated episodes", _played("truncated"), _FRACTION),
    ("Failed episodes", _played("failed_episodes"), None),
    ("Turns of the simulated user with an error", _played("user_errors"), _FRACTION),
    ("Seconds by phase", [(f"time/{phase}_s", phase) for phase in PHASES], None),
)
"""Charts of the live view: title, lines (metric and label), and the axis if it is fixed."""
FAMILIES = (
    ("Gradient norm before clipping", "update/gradient_norm_"),
    ("Learning rate", "update/learning_rate"),
    ("Memory in use, GiB", "memory/"),
)
"""Charts of all metrics with a prefix: title, prefix."""
REWARD_PART = "rollout/reward/"
"""Prefix of the parts of a reward, each of which has a chart with that of `val/reward/` beside it."""

# for intervals, stages of the curriculum and advice
_FURTHER = (
    "episodes",
    "success_low",
    "success_high",
    "return_low",
    "return_high",
    "return_std",
    "group_return_std",
    "entropy",
    "turn_limit",
    "success_reported",
    "curriculum_stage",
)
_DRAWN = {
    "elapsed_s",
    *(metric for _, lines, _ in CHARTS for metric, _ in lines),
    *(metric for name in _FURTHER for metric, _ in _played(name)),
}
_PREFIXES = (REWARD_PART, "val/reward/", *(prefix for _, prefix in FAMILIES))


# of parts of the reward and of metrics that an environment names
_NAMED = ("reward", "metrics")
# of an environment of a mixture
_OF_ENVIRONMENT = re.compile(
    r"(?:val|rollout)/[\w-]+/(?:success|success_low|success_high|return|episodes)"
)


def environments_in(names: Iterable[str]) -> list[str]:
    """Return the environments of a mixture that have a success among a validation's metrics, in alphabetical order.

    A part of the reward is `reward/<part>`, a metric that an environment names `metrics/<name>`.

    >>> environments_in(["success", "lake/success", "lake/return", "reward/shop", "reward/success"])
    ['lake']
    """
    parts = [name.split("/") for name in names]
    return sorted({one[0] for one in parts if one[1:] == ["success"] and one[0] not in _NAMED})


def is_drawn(name: str) -> bool:
    """Return whether plots and the live view draw a metric.

    >>> is_drawn("val/lake/success"), is_drawn("val/lake/turns")
    (True, False)
    """
    return (
        name in _DRAWN or name.startswith(_PREFIXES) or _OF_ENVIRONMENT.fullmatch(name) is not None
    )
