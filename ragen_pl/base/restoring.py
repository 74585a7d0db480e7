"""Parts of a run that are chosen by the config and keep a state in its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

log = logging.getLogger(__name__)


class KeepsState(Protocol):
    """Part of a run with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""


def restore(part: KeepsState, state: Mapping[str, Any], *, key: str) -> None:
    """Restore the state of a part; one of another kind, which the config has replaced, is left with a line.

    Args:
        part: Part of the present run.
        state: State in the checkpoint. It may lack entries that earlier versions did not write.
        key: Key of the part in the config.
    """
    if not state:
        # of a part without a state
        return
    if state.keys() <= part.state_dict().keys():
        part.load_state_dict(state)
    else:
        log.warning(f"{key}: the checkpoint has the state of another kind; this one begins anew")
