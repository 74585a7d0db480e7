"""Lines that a run logs at its start: where it computes, how it can be watched, what its chat template does."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence

import torch
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import Logger

from ragen_pl.assembly.build import choose_accelerator
from ragen_pl.base.constraints import path_override
from ragen_pl.base.instances import instances
from ragen_pl.callbacks.summary import open_command
from ragen_pl.chat_formats.messages import History
from ragen_pl.checkpoints.folder import Run
from ragen_pl.prompts.context import ContextManager

log = logging.getLogger(__name__)


def report_views(run: Run, loggers: Sequence[Logger]) -> None:
    """Log how the run can be watched while it trains: by its folder, and in MLflow."""
    place = shlex.quote(path_override("run", run.folder))
    log.info(f"watch it: python -m ragen_pl.watch {place}")
    for logger in instances(loggers, MLFlowLogger):
        log.info(f"MLflow: {open_command(str(logger._tracking_uri))}")


def report_accelerator(name: str) -> None:
    """Log which accelerator `trainer.accelerator=auto` chose, and why."""
    if name != "auto":
        return
    if choose_accelerator(name) == "cpu":
        log.info("accelerator: cpu, since torch finds no CUDA GPU")
    else:
        gpu = torch.cuda.get_device_name()
        log.info(
            f"accelerator: cuda, since torch finds a GPU ({gpu}); trainer.accelerator=cpu forces the CPU"
        )


def report_template(context: ContextManager) -> None:
    """Log the changes of the model's chat template to earlier responses, and the date that it shows."""
    template = context.template
    if template.pinned is not None:
        log.info(
            f"chat template: it shows today's date, pinned to {template.pinned} so that prompts stay the same"
        )
    if context.window == 1 or (template.history is History.KEPT and template.is_static):
        return
    does = {
        History.KEPT: "the text around a message depends on its place",
        History.TRIMMED: "it trims blanks around earlier responses",
        History.WITHOUT_THOUGHTS: "it strips the thoughts of earlier responses",
        History.REWRITTEN: "it rewrites earlier responses",
    }[template.history]
    if context.joins:
        follows = "prompts keep the sampled tokens as they are"
        follows += ", so an episode is one sample" if context.grows else ""
    else:
        follows = "each turn is a sample of its own: correct, but slower; context.window=1 avoids the cost"
        if template.history is History.WITHOUT_THOUGHTS and template.is_static:
            follows += ", context.keep_thoughts=true makes an episode one sample"
    log.info(f"chat template: {does}; {follows}")
