"""Checks of the components of a run against each other. They are built from the config, no model is.

A constructor refuses its own arguments. `check_run` of a component refuses a run that lacks something it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import lightning.pytorch as pl
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from ragen_pl.algorithms.credit import Estimator
from ragen_pl.algorithms.group_filter import GroupFilter
from ragen_pl.algorithms.normalization import RewardNormalizer
from ragen_pl.config.errors import config_errors
from ragen_pl.engines.protocol import check_asynchronous
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.masking import Masks
from ragen_pl.prompt_formats import PromptFormat
from ragen_pl.rewards.shaping import RewardFunction
from ragen_pl.run.build import build_named
from ragen_pl.run.start_check import engine_class
from ragen_pl.run_facts import ChecksRun, ChecksSettings, RunFacts


@dataclass(frozen=True, kw_only=True)
class Components:
    """Components of a run that need no model."""

    estimator: Estimator
    masks: Masks
    loss: UpdateLoss
    normalizer: RewardNormalizer | None
    group_filter: GroupFilter | None
    rewards: list[RewardFunction]
    adaptive_temperature: Any
    callbacks: list[pl.Callback]


def check_components(cfg: DictConfig, environment: gymnasium.Env[Any, Any]) -> None:
    """Build the components of a run and check them against each other.

    Args:
        cfg: config of `ragen_pl.fit`.
        environment: the config's environment, unwrapped.

    Raises:
        ConfigError: a constructor refuses its arguments, or two components do not fit together.
    """
    components = build_components(cfg)
    with config_errors("algorithm"):
        _check_engine(cfg)
        facts = run_facts(cfg, environment, components)
        for component in (
            components.estimator,
            components.group_filter,
            components.normalizer,
            components.loss,
            components.masks,
            components.adaptive_temperature,
            *components.rewards,
            *components.callbacks,
        ):
            if isinstance(component, ChecksRun):
                component.check_run(facts)


def build_components(cfg: DictConfig) -> Components:
    """Build the components of a run that need no model.

    Raises:
        ConfigError: a constructor refuses its arguments.
    """
    algorithm = cfg.algorithm
    with config_errors("algorithm, rollout or callbacks"):
        instantiate(cfg.get("curriculum"), _convert_="all")
        return Components(
            estimator=instantiate(algorithm.estimator, _convert_="all"),
            masks=instantiate(algorithm.masks, _convert_="all"),
            loss=instantiate(algorithm.loss, _convert_="all"),
            normalizer=instantiate(algorithm.get("normalize"), _convert_="all"),
            group_filter=instantiate(algorithm.get("filter"), _convert_="all"),
            rewards=build_named(algorithm.get("rewards")),
            adaptive_temperature=instantiate(
                cfg.rollout.get("adaptive_temperature"), _convert_="all"
            ),
            callbacks=build_named(cfg.callbacks),
        )


def run_facts(
    cfg: DictConfig, environment: gymnasium.Env[Any, Any], components: Components
) -> RunFacts:
    """Return the facts of the run that components may depend on."""
    prompt_format, penalty = PromptFormat(cfg.env.prompt_format), components.loss.kl
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
        estimator=type(components.estimator).__name__,
        standardizes=components.estimator.standardizes,
        rewards_penalized=penalty is not None and penalty.changes_rewards,
        iterations_ahead=cfg.rollout.iterations_ahead,
        loss=components.loss,
        callbacks=tuple(components.callbacks),
    )


def check_logger(cfg: DictConfig) -> None:
    """Ask the logger's class whether its settings can work; it may need a server.

    Raises:
        ConfigError: they cannot.
    """
    if not cfg.logger:
        return
    with config_errors("logger"):
        logger = get_class(cfg.logger._target_)
        if isinstance(logger, ChecksSettings):
            logger.check_settings(dict(cfg.logger), root=cfg.paths.root)


def _check_engine(cfg: DictConfig) -> None:
    """Check that the engine can sample while the policy trains, if it has to."""
    engine = engine_class(cfg.rollout.engine)
    # another one is checked when it is there
    if cfg.rollout.iterations_ahead and engine is not None:
        check_asynchronous(engine)
