"""Settings of a run's folder, memory and validation; read without torch."""

from __future__ import annotations

from dataclasses import dataclass

from ragen_pl.checked import checked
from ragen_pl.constraints import Count, Positive


@checked
@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Keys of `paths`.

    Attributes:
        root: folder of all runs; a run's own is `<root>/<env.name>/<time>`.
        run_dir: folder of this run; null for a new folder, or the folder of the resumed run.
    """

    root: str = "runs"
    run_dir: str | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Keys of `memory`, the plan of a run's memory.

    Attributes:
        check: refuse a run that does not fit into memory before its model is loaded.
        device_gb: memory of a device in GB; null asks the device.
    """

    check: bool = True
    device_gb: Positive | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Keys of `validation`, without its scripted policies.

    Attributes:
        episodes: episodes of the validation set.
        held_out: hold out the initial states of the validation set; where states are few, set
            `env.held_out_fraction`.
        blank: evaluate with blank images too at the end.
    """

    episodes: Count = 512
    held_out: bool = True
    blank: bool = False
