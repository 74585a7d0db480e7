"""Checks of the components of a run against each other. They are built from the config, no model is.

A constructor refuses its own arguments. `check_run` of a component refuses a run that lacks something it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import gymnasium
from hydra.utils import get_class, instantiate
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from omegaconf import DictConfig, OmegaConf

from ragen_pl.algorithms.credit import Estimator
from ragen_pl.algorithms.normalization import RewardNormalizer
from ragen_pl.assembly.build import (
    build_named,
    environments_of_records,
    episode_settings,
    learns_values,
)
from ragen_pl.assembly.start_check import engine_class
from ragen_pl.base.instances import instances
from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.base.run_facts import ChecksRun, ChecksSettings, RunFacts
from ragen_pl.checkpoints.folder import configured_run
from ragen_pl.config.environments import environment_configs
from ragen_pl.config.errors import config_errors
from ragen_pl.config.relations import ranks_asked_for
from ragen_pl.config.settings import read_settings
from ragen_pl.data.settings import RecordSettings, WarmStartSettings
from ragen_pl.engines.protocol import check_asynchronous, kept_ids_problem
from ragen_pl.environments.members import EnvironmentMembers
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.rollout.proxy import truncation_of

if TYPE_CHECKING:
    from ragen_pl.data.opponents import Opponents


def check_components(cfg: DictConfig, environments: Mapping[str, gymnasium.Env[Any, Any]]) -> None:
    """Build the components of a run that need no model, and check them against each other.

    Args:
        cfg: Config of `ragen_pl.fit`.
        environments: The config's environments by name, unwrapped.

    Raises:
        ConfigError: A constructor refuses its arguments, or two components do not fit together.
    """
    algorithm = cfg.algorithm
    if is_learned_from_records(cfg):
        from ragen_pl.data.records import check_records

        with config_errors("warm_start.records"):
            check_records(
                read_settings(RecordSettings, cfg.warm_start.records),
                environments_of_records(cfg.env),
                states=cfg.validation.episodes,
                template=cfg.context.turn_template,
                stages=read_settings(WarmStartSettings, cfg.warm_start).stages,
                learns_values=learns_values(cfg),
                ranks=ranks_asked_for(cfg),
                seed=cfg.seed,
            )
    with config_errors("algorithm, rollout or callbacks"):
        estimator: Estimator = instantiate(algorithm.estimator, _convert_="all")
        loss: UpdateLoss = instantiate(algorithm.loss, _convert_="all")
        normalizer: RewardNormalizer | None = instantiate(
            algorithm.get("normalize"), _convert_="all"
        )
        others = [
            instantiate(algorithm.get("filter"), _convert_="all"),
            normalizer,
            instantiate(algorithm.masks, _convert_="all"),
            instantiate(cfg.rollout.get("adaptive_temperature"), _convert_="all"),
        ]
        callbacks: list[object] = build_named(cfg.callbacks)
        names = [name for name, target in cfg.callbacks.items() if target]
        for name, callback in zip(names, callbacks, strict=True):
            if not isinstance(callback, Callback):
                raise ValueError(
                    f"callbacks.{name}: {type(callback).__name__} is no callback of Lightning; derive it from "
                    "lightning.pytorch.Callback"
                )
            if isinstance(callback, ModelCheckpoint):
                _check_place(callback, key=f"callbacks.{name}.filename")
            if isinstance(callback, StochasticWeightAveraging | GradientAccumulationScheduler):
                raise ValueError(
                    f"callbacks.{name}: {type(callback).__name__} changes learning rates or minibatches that are the "
                    "run's; set lightning.pytorch.callbacks.EMAWeightAveraging for averages, "
                    "trainer.accumulate_grad_batches for larger steps"
                )
    with config_errors("algorithm"):
        engine = engine_class(cfg.rollout.engine)
        # another one is checked when it is there
        if cfg.rollout.iterations_ahead and engine is not None:
            check_asynchronous(engine)
            truncation = truncation_of(episode_settings(cfg.rollout))
            if truncation is not None and not engine.records_kept_ids:
                raise ValueError(kept_ids_problem(engine.__name__, truncation))
        opponents: Opponents | None = instantiate(cfg.get("opponents"), _convert_="all")
        if opponents is not None:
            left_out = OmegaConf.select(cfg, "context.leave_out") or {}
            unsupported = {
                "env=mixture": len(environments) > 1,
                "rollout.iterations_ahead": cfg.rollout.iterations_ahead,
                "context.leave_out": any(left_out.values()),
                "algorithm.filter.resample": OmegaConf.select(cfg, "algorithm.filter.resample"),
                "an engine that has a model of its own": engine is not None and not engine.in_place,
            }
            (environment,) = [*environments.values()][:1]
            opponents.check(
                seats=EnvironmentMembers(environment).seats,
                groups=cfg.rollout.groups,
                others=unsupported,
            )
        for name, alone in environment_configs(cfg).items():
            instantiate(alone.get("curriculum"), _convert_="all")
            rewards = build_named(alone.algorithm.get("rewards"))
            facts = _run_facts(alone, environments[name], estimator, loss, normalizer, callbacks)
            facts = replace(facts, environments=len(environments))
            components = (estimator, loss, *others, *rewards, *callbacks)
            for component in instances(components, ChecksRun):
                component.check_run(facts)


def is_learned_from_records(cfg: DictConfig) -> bool:
    """Return whether the run's warm start reads records."""
    settings = cfg.warm_start
    given = settings.enabled and settings.get("records") is not None and settings.weights is None
    return given and not configured_run(cfg).has_initial_weights


def _check_place(callback: ModelCheckpoint, *, key: str) -> None:
    """Check that a callback writes its checkpoints into the run's folder.

    Raises:
        ValueError: It writes them elsewhere.
    """
    file = PurePath(callback.filename or "")
    if file.is_absolute() or ".." in file.parts:
        raise ValueError(
            f"{key}={file}: is outside the run's folder of checkpoints; give a name, such as {{epoch:04d}}, and move "
            "the folder by paths.run_dir"
        )


def _run_facts(
    cfg: DictConfig,
    environment: gymnasium.Env[Any, Any],
    estimator: Estimator,
    loss: UpdateLoss,
    normalizer: RewardNormalizer | None,
    callbacks: Sequence[object],
) -> RunFacts:
    prompt_format = PromptFormat(cfg.env.prompt_format)
    return RunFacts(
        group_size=cfg.rollout.group_size,
        temperature=cfg.rollout.temperature,
        window=cfg.context.window,
        left_out_turns=OmegaConf.select(cfg, "context.leave_out.turns") or 0.0,
        prompt_format=str(prompt_format),
        blocks=frozenset(prompt_format.tags),
        environment=type(environment).__name__,
        environment_members=frozenset(dir(environment)),
        turn_limit_bootstraps=cfg.env.turn_limit_bootstraps,
        critic=cfg.algorithm.critic,
        estimator=type(estimator).__name__,
        standardizes=estimator.standardizes,
        baseline=estimator.baseline,
        turn_discount=estimator.turn_discount,
        whitens=loss.whiten,
        rewards_penalized=loss.kl is not None and loss.kl.changes_rewards,
        rewards_normalized=normalizer is not None and normalizer.changes_returns,
        iterations_ahead=cfg.rollout.iterations_ahead,
        loss=loss,
        callbacks=tuple(callbacks),
        compacts=cfg.context.get("compaction") is not None,
        adapts_temperature=cfg.rollout.get("adaptive_temperature") is not None,
        truncates=truncation_of(episode_settings(cfg.rollout)) is not None,
        hinted=loss.hint is not None,
    )


def check_logger(cfg: DictConfig) -> None:
    """Ask the logger's class whether its settings can work; it may need a server.

    Raises:
        ConfigError: They cannot.
    """
    if not cfg.logger:
        return
    with config_errors("logger"):
        logger = get_class(cfg.logger._target_)
        if isinstance(logger, ChecksSettings):
            logger.check_settings(dict(cfg.logger), root=cfg.paths.root)
