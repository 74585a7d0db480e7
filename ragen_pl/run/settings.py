"""Settings of a run's folder, memory, ranks and validation; read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Note, Positive


@checked
@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Keys of `paths`.

    Attributes:
        root: Folder of all runs; a run's own is `<root>/<env.name>/<time>`.
        run_dir: Folder of this run; null for a new folder, or the folder of the resumed run.
    """

    root: str = "runs"
    run_dir: str | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Keys of `memory`, the plan of a run's memory.

    Attributes:
        check: Refuse a run that does not fit into memory before its model is loaded.
        device_gb: Memory of a device in GB; null asks the device.
    """

    check: bool = True
    device_gb: Positive | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """Keys of `trainer` that limit ranks and starts, beside the arguments of Lightning's Trainer.

    Attributes:
        timeout_s: Longest wait of a rank for another one, which may roll out for longer.
        rollout_timeout_s: Longest wait at the end of a rollout, up to `timeout_s`; null for `timeout_s`.
        stall_s: Longest time of one of several ranks without a turn, minibatch or validation batch; it then prints its
            stacks and ends the run; null for no limit.
        shared_folder_s: Time within which a file of the first rank has to appear in the run's folder on all machines.
        max_starts: Failed starts from one step, after which a run is not started again; null for any number.
    """

    timeout_s: Annotated[float, Gt(0), Note("seconds")] = 1800
    rollout_timeout_s: Annotated[float, Gt(0), Note("seconds")] | None = None
    stall_s: Annotated[float, Gt(0), Note("seconds")] | None = 7200
    shared_folder_s: Annotated[float, Ge(0), Note("seconds")] = 10
    max_starts: Count | None = 3


@checked
@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Keys of `validation`, without its scripted policies.

    Attributes:
        episodes: Episodes of the validation set.
        held_out: Hold out the initial states of the validation set; where states are few, set
            `env.held_out_fraction`.
        blank: Evaluate with blank images too at the end.
    """

    episodes: Count = 512
    held_out: bool = True
    blank: bool = False
