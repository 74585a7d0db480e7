"""`ragen_pl.train(env="frozenlake", …)`: a training run as a Python call."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from ragen_pl.base.machine import collection_paused, rarer_collections
from ragen_pl.base.stop_signals import stopped_by_signals
from ragen_pl.checkpoints.folder import is_launched
from ragen_pl.config.composition import composed
from ragen_pl.ranks.ranks import ranks_end_together

if TYPE_CHECKING:
    from ragen_pl.run.train import TrainedRun


def train(*, config_dir: str | PathLike[str] | None = None, **settings: Any) -> TrainedRun:
    """Train an agent, as `python -m ragen_pl.fit` does.

    Args:
        config_dir: Folder with YAML files of your own.
        settings: Overrides. A string chooses an option of a group (`env="frozenlake"`, `algorithm="grpo"`), `env` may
            also be an environment's class, or a module's function that makes one. A dict sets the keys below
            (`trainer={"max_epochs": 20}`); a key with dots is given by `**{"rollout.groups": 32}`.

    Returns:
        Its last metrics, its folder and the trained policy.

    Raises:
        ConfigError: The settings cannot be run. The message is one line.

    Example:
        >>> run = ragen_pl.train(env="bandit", model="small_lm", trainer={"max_epochs": 20})  # doctest: +SKIP
        >>> run.metrics["val/success"]  # doctest: +SKIP
        1.0
    """
    with _messages_shown():
        return train_config(composed("fit", settings, directory=config_dir))


@contextmanager
def _messages_shown() -> Iterator[None]:
    """Print the messages of a run, as the command does, in a program that has not set up logging."""
    logger = logging.getLogger("ragen_pl")
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(sys.stdout), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def train_config(cfg: DictConfig) -> TrainedRun:
    """Train an agent by a checked configuration. An error on one rank ends all.

    Raises:
        ConfigError: It cannot be run.
    """
    from ragen_pl.run.checks import check_run

    devices, nodes = cfg.trainer.devices, cfg.trainer.num_nodes
    with (
        stopped_by_signals(),
        rarer_collections(),
        ranks_end_together(devices=devices if isinstance(devices, int) else 1, nodes=nodes),
    ):
        check_run(cfg)
        with collection_paused():
            from ragen_pl.memory.named import is_pretrained
            from ragen_pl.run.train import quieten, train

        # the plan of the memory builds a Trainer too
        quieten()

        # a process that another rank has launched runs what that rank has planned
        plan = None
        if not is_launched() and is_pretrained(cfg):
            from ragen_pl.memory.report import check_memory

            plan = check_memory(cfg)
        return train(cfg, checkpoint_bytes=None if plan is None else plan.checkpoint)
