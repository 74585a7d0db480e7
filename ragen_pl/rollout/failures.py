"""Errors of failed episodes: logged once for each kind, and counted.

A failed episode is one that its environment, a server or a scripted policy broke. It says nothing about the agent: it
counts neither as success nor as reward 0, and is not trained on.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Sequence

from ragen_pl.base.error_text import shortened
from ragen_pl.trajectory import EpisodeStatus, Trajectory

log = logging.getLogger(__name__)

# characters of an error that are logged
_LONGEST = 500
# kinds that are told apart
_MAX_KINDS, _OTHERS = 100, "others"
# of a rollout's episodes, from which errors that are known are reported again
_MANY = 0.05


class FailureLog:
    """Log the errors of failed episodes.

    The first error of a kind is logged with its text. Later ones are counted, and their number is logged where many
    episodes of a rollout fail.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of failed episodes by kind of error."""
        # a rollout ahead has a thread of its own
        self._lock = threading.Lock()

    def note(self, trajectories: Sequence[Trajectory]) -> None:
        """Count and log the errors of a rollout."""
        errors = errors_of(trajectories)
        if not errors:
            return
        kinds = Counter(map(kind_of, errors))
        with self._lock:
            room = _MAX_KINDS - len(self.counts)
            new = [kind for kind in kinds if kind not in self.counts][: max(0, room)]
            for kind, count in kinds.items():
                self.counts[kind if kind in self.counts or kind in new else _OTHERS] += count
        for kind in new:
            text = next(error for error in errors if kind_of(error) == kind)
            log.warning(
                "%d of %d episodes failed with %s",
                kinds[kind],
                len(trajectories),
                shortened(text, longest=_LONGEST),
            )
        if not new and len(errors) >= _MANY * len(trajectories):
            log.warning(
                "%d of %d episodes failed with errors that are named above",
                len(errors),
                len(trajectories),
            )


def errors_of(trajectories: Sequence[Trajectory]) -> list[str]:
    """Return the errors of the failed episodes."""
    return [
        trajectory.error or "an unknown error"
        for trajectory in trajectories
        if trajectory.status is EpisodeStatus.FAILED
    ]


def kind_of(error: str) -> str:
    """Return the text of an error without its numbers, which differ from episode to episode.

    >>> kind_of("KeyError: order 17 at 0x7f3a") == kind_of("KeyError: order 4 at 0x11")
    True
    """
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "#", shortened(error, longest=_LONGEST))


def most_common(errors: Sequence[str]) -> str:
    """Return the most common kind of errors by an example and its number.

    >>> most_common(["ValueError: seed 1", "OSError: gone", "ValueError: seed 2"])
    'ValueError: seed 1 (2 times)'
    """
    kind, count = Counter(map(kind_of, errors)).most_common(1)[0]
    example = next(error for error in errors if kind_of(error) == kind)
    text = shortened(example, longest=_LONGEST)
    return f"{text} ({count} times)" if count > 1 else text
