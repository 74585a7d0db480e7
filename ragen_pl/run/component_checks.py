"""Checks of the components of a run against each other. They are built from the config, no model is.

A constructor refuses its own arguments. What a component needs from the rest of the run it says by attributes
(`needs_values`, `needs_groups`, …) or by `check_run`.
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
from ragen_pl.config.errors import ConfigError, config_errors
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
        _check_critic(cfg, components.estimator)
        _check_states(components.estimator, environment)
        _check_groups(cfg, components)
        _check_normalizer(components)
        _check_ahead(cfg, components.loss)
        facts = run_facts(cfg, environment, components)
        for component in (
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


def _check_critic(cfg: DictConfig, estimator: Estimator) -> None:
    name, critic = type(estimator).__name__, cfg.algorithm.critic
    if estimator.needs_values and critic == "none":
        raise ConfigError(
            f"algorithm.critic=none: {name} needs values; set algorithm.critic=shared (or own)"
        )
    if not estimator.needs_values and critic != "none":
        raise ConfigError(
            f"algorithm.critic={critic}: {name} reads no values; set algorithm.critic=none"
        )
    if not estimator.needs_values and cfg.env.turn_limit_bootstraps:
        raise ConfigError(
            f"env.turn_limit_bootstraps=true: {name} has no values to bootstrap from; set false, or an "
            "algorithm with a critic"
        )


def _check_states(estimator: Estimator, environment: gymnasium.Env[Any, Any]) -> None:
    if estimator.needs_states and "state_key" not in dir(environment):
        raise ConfigError(
            f"algorithm.estimator={type(estimator).__name__}: {type(environment).__name__} has no state_key() "
            "to compare turns from the same state by; give it one, or set algorithm=grpo"
        )


def _check_groups(cfg: DictConfig, components: Components) -> None:
    if cfg.rollout.group_size > 1:
        return
    for key, component in (
        ("algorithm.estimator", components.estimator),
        ("algorithm.filter", components.group_filter),
        ("algorithm.normalize", components.normalizer),
    ):
        if component is not None and component.needs_groups:
            raise ConfigError(
                f"rollout.group_size=1: {type(component).__name__} compares the episodes of a group; "
                f"set at least 2, or change {key}"
            )


def _check_ahead(cfg: DictConfig, loss: UpdateLoss) -> None:
    """Check that the engine can sample while the policy trains, and that the loss corrects for older weights."""
    if not cfg.rollout.iterations_ahead:
        return
    engine = engine_class(cfg.rollout.engine)
    # another one is checked when it is there
    if engine is not None:
        check_asynchronous(engine)
    loss.require_correction()


def _check_normalizer(components: Components) -> None:
    """Check that the estimator does not undo the normalization.

    Standardization undoes a shift and a scale that all returns of its mean share.
    """
    normalizer, estimator = components.normalizer, components.estimator
    kl = components.loss.kl
    if normalizer is None or normalizer.clips or (kl is not None and kl.changes_rewards):
        return
    scope, standardized = normalizer.by.scope, estimator.standardizes
    if None in (scope, standardized) or (scope, standardized) == ("group", "batch"):
        return
    raise ConfigError(
        f"algorithm.normalize.by={type(normalizer.by).__name__}: {type(estimator).__name__} standardizes returns "
        "itself, which undoes it; set Raw, or another estimator"
    )
