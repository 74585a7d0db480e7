"""Checks of an evaluation before heavy packages are imported."""

from __future__ import annotations

import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ragen_pl.config.errors import ConfigError
from ragen_pl.environments.calls import check_made
from ragen_pl.evaluation.validation_sets import validation_settings
from ragen_pl.run.checks import check_folder, check_new_folder
from ragen_pl.run.tracking import check_reachable, known_run, tracking_uri
from ragen_pl.run.trust import is_own

log = logging.getLogger(__name__)

_HINT = "give a folder that can be written"
_NO_WEIGHTS = (
    "ckpt has no value; give a checkpoint, a run's folder, a Hugging Face folder, an MLflow run id, "
    "best or last; or "
)


def check_evaluation(cfg: DictConfig) -> None:
    """Check weights, validation sets, sampling and tracking.

    Raises:
        ConfigError: with the first thing that is wrong.
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
    pass_ks(cfg)
    is_greedy(cfg)
    run = tracked_run(cfg)
    if run is not None:
        check_reachable(run["tracking_uri"])
    if cfg.to is not None:
        check_folder(Path(cfg.to).expanduser().absolute(), place=f"to={cfg.to}", hint=_HINT)


def has_weights(cfg: DictConfig) -> bool:
    """Return whether there is a model to load."""
    return cfg.source.checkpoint is not None or bool(cfg.source.untrained)


def check_export(cfg: DictConfig) -> None:
    """Check weights and the folder to write.

    Raises:
        ConfigError: with the first thing that is wrong.
    """
    check_source(cfg)
    folder = check_new_folder(cfg.to, overwrite=cfg.overwrite)
    if cfg.source.checkpoint and Path(cfg.source.checkpoint) == folder:
        raise ConfigError(f"to={cfg.to}: the weights are read from there; give another folder")


def is_greedy(cfg: DictConfig) -> bool:
    """Return whether decoding is greedy, by default where each episode is played once.

    Raises:
        ConfigError: greedy decoding with several samples.
    """
    if cfg.greedy and cfg.samples > 1:
        raise ConfigError(
            f"samples={cfg.samples} greedy=true: greedy responses are all alike; set greedy=false or samples=1"
        )
    return cfg.samples == 1 if cfg.greedy is None else bool(cfg.greedy)


def pass_ks(cfg: DictConfig) -> list[int]:
    """Return the k of pass@k, by default the powers of two up to `samples`, none for one sample.

    Raises:
        ConfigError: a k is above `samples`.
    """
    samples: int = cfg.samples
    if cfg.pass_at is None:
        return [] if samples == 1 else [2**n for n in range(samples.bit_length())]
    wrong = [k for k in cfg.pass_at if k > samples]
    if wrong:
        raise ConfigError(
            f"pass_at has {wrong[0]} and samples={samples}; set samples={max(wrong)} or leave it out"
        )
    return sorted(set(cfg.pass_at))


def tracked_run(cfg: DictConfig) -> dict[str, str] | None:
    """Return `run_id` and `tracking_uri` of the training run in MLflow, None without one.

    The server that somebody else's run names is not used.
    """
    if not cfg.mlflow or cfg.source.run is None:
        return None
    folder = Path(cfg.source.run)
    run = known_run(folder)
    own = cfg.trust or is_own(folder / "config.yaml")
    return run if run and (own or run["tracking_uri"] == tracking_uri(cfg.paths.root)) else None


def check_source(cfg: DictConfig, *, instead: str = "model=… for an untrained model") -> None:
    """Check that there are weights.

    Args:
        cfg: settings as `resolve_settings` makes them.
        instead: what may be given in place of weights.

    Raises:
        ConfigError: there are none.
    """
    if cfg.source.checkpoint is None and not cfg.source.untrained:
        raise ConfigError(_NO_WEIGHTS + instead)
