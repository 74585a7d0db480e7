"""Checks of an evaluation before heavy packages are imported."""

from __future__ import annotations

import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ragen_pl.config.errors import ConfigError
from ragen_pl.environments.calls import check_made
from ragen_pl.evaluation.mlflow_log import tracked_run
from ragen_pl.evaluation.validation_sets import validation_settings
from ragen_pl.run.checks import check_new_folder
from ragen_pl.tracking.mlflow_run import check_reachable

log = logging.getLogger(__name__)

_NO_WEIGHTS = (
    "ckpt has no value; give a checkpoint, a run's folder, a Hugging Face folder, an MLflow run id, "
    "best or last; or "
)


def check_evaluation(cfg: DictConfig) -> None:
    """Check weights, validation sets and tracking.

    Raises:
        ConfigError: With the first thing that is wrong.
    """
    if cfg.endpoint is None:
        check_source(cfg, instead="model=… for an untrained model, or endpoint=openai")
    validation_sets = validation_settings(cfg)
    if not validation_sets:
        raise ConfigError("validation_sets is empty; give one, such as validation_sets=held_out")
    for validation_set in validation_sets:
        log.info("checking %s of %s", validation_set.env["target"], validation_set.name)
        try:
            check_made(OmegaConf.create(validation_set.env))
        except ConfigError as error:
            raise ConfigError(f"validation_sets.{validation_set.name}: {error}") from error
    run = tracked_run(cfg)
    if run is not None:
        check_reachable(run["tracking_uri"])
    if cfg.to is not None:
        check_new_folder(cfg.to, overwrite=True)


def has_weights(cfg: DictConfig) -> bool:
    """Return whether there is a model to load."""
    return cfg.source.checkpoint is not None or bool(cfg.source.untrained)


def check_export(cfg: DictConfig) -> None:
    """Check weights and the folder to write.

    Raises:
        ConfigError: With the first thing that is wrong.
    """
    check_source(cfg)
    folder = check_new_folder(cfg.to, overwrite=cfg.overwrite)
    if cfg.source.checkpoint and Path(cfg.source.checkpoint) == folder:
        raise ConfigError(f"to={cfg.to}: the weights are read from there; give another folder")


def check_source(cfg: DictConfig, *, instead: str = "model=… for an untrained model") -> None:
    """Check that there are weights.

    Args:
        cfg: Settings as `resolve_settings` makes them.
        instead: What may be given in place of weights.

    Raises:
        ConfigError: There are none.
    """
    if not has_weights(cfg):
        raise ConfigError(_NO_WEIGHTS + instead)
