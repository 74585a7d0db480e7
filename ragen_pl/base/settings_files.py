"""Files of settings in a run's folder: `config.yaml` of the first start, `config_2.yaml` of the next with others."""

from __future__ import annotations

import re
from pathlib import Path

FIRST = "config.yaml"
SETTINGS = "settings"
"""Entry of a checkpoint, and of the weights of a recorded step: name of the file with the settings of its start."""

_LATER = re.compile(r"config_([1-9][0-9]*)\.yaml")


def number_of(name: str) -> int | None:
    """Return the number of a file of settings by its name; None for another file.

    >>> number_of("config.yaml"), number_of("config_2.yaml"), number_of("../config.yaml")
    (1, 2, None)
    """
    later = _LATER.fullmatch(name)
    return int(later[1]) if later else 1 if name == FIRST else None


def settings_file(number: int) -> str:
    """Return the name of the file of settings with a number."""
    return FIRST if number == 1 else f"config_{number}.yaml"


def newest_settings(folder: Path) -> Path:
    """Return the settings of a run's last start with settings of its own, or of its first start."""
    numbers = (number_of(file.name) for file in folder.glob("config_*.yaml"))
    return folder / settings_file(max((number for number in numbers if number), default=1))


def settings_of_weights(folder: Path, name: object) -> Path:
    """Return the settings of the start that wrote weights; of a run's last start where they name none.

    Args:
        folder: The run's folder.
        name: Entry `SETTINGS` of the weights, which earlier versions did not write.
    """
    is_known = isinstance(name, str) and number_of(name) is not None
    return folder / str(name) if is_known else newest_settings(folder)
