"""The file of a SLURM job that trains, and is requeued until its run has ended."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.config.errors import ConfigError


@checked
@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Keys of `slurm` of `python -m ragen_pl.submit`.

    Attributes:
        partition: Partition of the cluster; null for its default.
        account: Account that pays; null for the user's default.
        time: Longest time of the job, such as `24:00:00`; null for the partition's.
        cpus_per_task: CPU cores of a rank; null for the cluster's default.
        signal_s: Seconds between SIGTERM and the end of the job's time. Longer than
            `callbacks.checkpoint.grace_seconds` and the time of writing a checkpoint.
        max_requeues: How often the job is requeued before it ends with the code of its last start; null for any number.
        setup: Shell commands before the run, such as `module load cuda`; null for none.
        options: Further options of sbatch, such as `[--gres=gpu:h100:8,--exclusive]`.
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    cpus_per_task: Count | None = None
    signal_s: Count = 180
    max_requeues: Count | None = 100
    setup: str | None = None
    options: Sequence[str] = ()


# A run that is stopped by a signal or fails is started again. It ends by itself, with code 2, where it has failed
# trainer.max_starts times at the same step. SLURM lets a requeued job wait for two minutes, and must: slurmctld sends
# srun's order to end the step of a failed rank again after 70 s to a node whose ranks have not ended within
# MessageTimeout (10 s), and the step of the next start has the same number.
_SCRIPT = """\
#!/bin/bash
{options}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
# from SLURM 22.05 on srun does not read the job's own
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
{setup}srun --kill-on-bad-exit=1 {command}
code=$?
# 0: ended; 2: refused in one line, a run without progress among others; 130: Ctrl-C; others are started again
case $code in
  0 | 2 | 130) ;;
  *){limit}
    scontrol requeue "$SLURM_JOB_ID" && sleep 60 ;;
esac
exit $code
"""
_LIMIT = """
    if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {most} ]; then
      echo "requeued $SLURM_RESTART_COUNT times, slurm.max_requeues={most}; submit the job again to go on" >&2
      exit $code
    fi"""


def job_file(
    cfg: DictConfig, settings: SlurmSettings, *, folder: Path, arguments: Sequence[str]
) -> str:
    """Return the text of a job's file.

    Args:
        cfg: Config of the run.
        settings: Settings of the job.
        folder: The run's folder, where the job's output goes.
        arguments: Arguments of `python -m ragen_pl.fit`.

    Raises:
        ConfigError: The number of ranks depends on the machine.
    """
    devices = _devices(cfg)
    options = [
        f"--job-name={cfg.env.name}",
        f"--nodes={cfg.trainer.num_nodes}",
        f"--ntasks-per-node={devices}",
        *([] if _names_gpus(cfg, settings) else [f"--gpus-per-node={devices}"]),
        *_option("partition", settings.partition),
        *_option("account", settings.account),
        *_option("time", settings.time),
        *_option("cpus-per-task", settings.cpus_per_task),
        "--requeue",
        "--open-mode=append",
        f"--signal=TERM@{settings.signal_s}",
        # sbatch replaces patterns such as %j in it
        f"--output={str(folder).replace('%', '%%')}/slurm-%j.txt",
        f"--chdir={Path.cwd()}",
    ]
    # those in quotes are written as sbatch reads them
    quoted = [*map(_quoted, options)]
    quoted += [each if set(each) & set("\"'") else _quoted(each) for each in settings.options]
    command = [sys.executable, "-m", "ragen_pl.fit", *arguments]
    most = settings.max_requeues
    limit = "" if most is None else _LIMIT.format(most=most)
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in quoted),
        setup="" if settings.setup is None else f"{settings.setup}\n",
        command=" ".join(map(shlex.quote, command)),
        limit=limit,
    )


def _devices(cfg: DictConfig) -> int:
    devices = cfg.trainer.devices
    if isinstance(devices, int) and devices > 0:
        return devices
    raise ConfigError(
        f"trainer.devices={devices}: a job asks for a number of devices; set trainer.devices=8"
    )


def _names_gpus(cfg: DictConfig, settings: SlurmSettings) -> bool:
    named = any(option.startswith(("--gres", "--gpus")) for option in settings.options)
    return named or cfg.trainer.get("accelerator") == "cpu"


def _option(name: str, value: object) -> list[str]:
    return [] if value is None else [f"--{name}={value}"]


def _quoted(option: str) -> str:
    """Return an option as sbatch reads it in a comment."""
    name, is_set, value = option.partition("=")
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}{is_set}"{escaped}"' if set(value) & set(" \t\"'#\\") else option
