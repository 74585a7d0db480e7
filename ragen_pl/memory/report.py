"""The plan of a run's memory as a table, with the settings that make it fit; and its check before a run."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from ragen_pl.callbacks.summary import run_overrides
from ragen_pl.config.errors import ConfigError, config_errors, in_one_line
from ragen_pl.memory.named import is_pretrained
from ragen_pl.memory.plan import Counts, MemoryPlan, plan_memory
from ragen_pl.memory.remedies import remedies

log = logging.getLogger(__name__)
# width of a log, which has none of its own
_LOG_WIDTH = 120
# fraction of a device beyond which the allocator's fragmentation may not leave enough
_TIGHT = 0.9


def check_memory(cfg: DictConfig) -> MemoryPlan | None:
    """Check that a pretrained model can be trained in the memory that there is. Nothing is loaded.

    A model that is built from its config is small, and not checked.

    A model that cannot be planned is reported and not refused.

    Returns:
        The plan, None if there is none.

    Raises:
        ConfigError: It cannot.
    """
    if not cfg.memory.check or not is_pretrained(cfg):
        return None
    log.info("memory: planning, which takes seconds to a minute; memory.check=false does without")
    try:
        plan = plan_memory(cfg)
    except Exception as error:  # of any model that does not run without data
        log.info(f"memory: not planned ({in_one_line(error)})")
        return None
    if plan.fits:
        log.info(f"memory: {_summary(plan)}")
        if crowding := _crowding(plan):
            log.warning(f"memory: {crowding}")
        return plan
    command = shlex.join(["python", "-m", "ragen_pl.doctor", *run_overrides()])
    raise ConfigError(
        f"memory: {_summary(plan)}; {command} says what makes it fit, and memory.check=false starts it anyway"
    )


def show_plan(cfg: DictConfig, *, console: Console | None = None) -> bool:
    """Print a run's plan and, if it does not fit, settings with which it does; return whether it fits as it is.

    Args:
        cfg: Config of the run.
        console: Where to print; the terminal by default.
    """
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    counts = Counts()
    with config_errors("memory"), _progress(console, "Planning: an iteration runs without data"):
        plan = plan_memory(cfg, counts)
    console.print(_table(plan))
    console.print(_assumptions(plan), highlight=False)
    summary = _summary(plan)
    console.print(f"{summary[0].upper()}{summary[1:]}.", highlight=False)
    if crowding := _crowding(plan):
        console.print(f"{crowding[0].upper()}{crowding[1:]}.", highlight=False, soft_wrap=True)
    if not plan.fits:
        _show_remedies(cfg, plan, counts, console)
    return plan.fits


@contextmanager
def _progress(console: Console, doing: str) -> Iterator[None]:
    """Show that a plan is being made, which takes seconds to a minute."""
    if not console.is_terminal:
        console.print(f"{doing} …", highlight=False)
    with console.status(f"{doing} …"):
        yield


def _show_remedies(cfg: DictConfig, plan: MemoryPlan, counts: Counts, console: Console) -> None:
    steps = []
    with _progress(console, "What makes it smaller, one after the other"):
        for step in remedies(cfg, plan, counts):
            steps.append(step)
            overrides = " ".join(step.overrides)
            console.print(
                f"  {overrides:<60} {_gigabytes(step.plan.highest.total)} ({step.plan.highest.name})",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )
    if steps and steps[-1].plan.fits:
        # of a key that was lowered several times the last value
        written = [override for step in steps for override in step.overrides]
        added = {override.split("=")[0]: override for override in written}.values()
        console.print(
            "It fits with: " + " ".join(added), highlight=False, soft_wrap=True, markup=False
        )
    else:
        console.print("That is not enough: take a smaller model, or a larger device.")


def _table(plan: MemoryPlan) -> Table:
    parts = {part: None for phase in plan.phases for part, size in phase.parts.items() if size}
    table = Table(title="Memory of a device at the peak of each phase, GB", title_justify="left")
    table.add_column("")
    for phase in plan.phases:
        table.add_column(phase.name, justify="right")
    for part in parts:
        table.add_row(part, *(_number(phase.parts.get(part, 0)) for phase in plan.phases))
    table.add_section()
    table.add_row("total", *(_number(phase.total) for phase in plan.phases), style="bold")
    return table


def _assumptions(plan: MemoryPlan) -> str:
    work, devices = plan.workload, "device" if plan.ranks == 1 else "devices"
    images = f", {len(work.images)} images" if work.images else ""
    return (
        f"{plan.parameters / 1e6:,.0f} M parameters, {plan.trained / 1e6:,.1f} M of them trained, on {plan.ranks} "
        f"{devices}.\n"
        f"Rollout: {work.episodes} episodes at once, prompts of {work.prompt} tokens, responses of {work.response}.\n"
        f"Update: {work.rows} samples of {work.length} tokens{images} in a microbatch, {work.sampled} sampled in each."
    )


def _summary(plan: MemoryPlan) -> str:
    highest = plan.highest
    need = f"the {highest.name} needs {_gigabytes(highest.total)}"
    if plan.device is None:
        return f"{need}, and the memory of the device is unknown"
    has = f"{plan.device.name} has {_gigabytes(plan.device.size)}"
    if not plan.fits:
        return f"{need}, and {has}"
    tight = highest.total > _TIGHT * plan.device.size
    return f"{need}, and {has}" + (", which is tight" if tight else "")


def _crowding(plan: MemoryPlan) -> str:
    """Return the free memory of the device in words if it is less than the run needs, else an empty text."""
    device, need = plan.device, plan.highest.total
    if device is None or not device.in_use or need <= device.size - device.in_use:
        return ""
    return (
        f"other processes use {_gigabytes(device.in_use)} of GPU {device.index} now, which leaves less than the run "
        "needs; end them, or choose other GPUs by trainer.devices or CUDA_VISIBLE_DEVICES"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _number(size: int) -> str:
    return f"{size / 1e9:.2f}" if size else ""
