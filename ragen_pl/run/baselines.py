"""Baselines for the final summary: scripted policies, and the agent with blank images."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from hydra.utils import instantiate
from omegaconf import DictConfig

from ragen_pl.base.phases import phase
from ragen_pl.config.errors import in_one_line
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import RolloutEngine
from ragen_pl.metrics.rollout import rollout_metrics
from ragen_pl.modules.agent import AgentModule
from ragen_pl.rollout.failures import errors_of, most_common
from ragen_pl.trajectory import Trajectory

log = logging.getLogger(__name__)


def baseline_metrics(
    baselines: Mapping[str, DictConfig | None] | None, validation_set: ValidationSet
) -> dict[str, dict[str, float]]:
    """Return a validation set's metrics of scripted policies by their names, the node `validation.baselines`.

    A policy that fails has a warning instead: a run does not lose its results by it.
    """
    metrics: dict[str, dict[str, float]] = {}
    for name, policy in (baselines or {}).items():
        if not policy:
            continue
        try:
            metrics[f"{name} policy"] = scripted_metrics(validation_set, name, policy)
        except Exception as error:  # any of a policy that may be the user's
            _warn(f"validation.baselines.{name}", error)
    return metrics


def warn_of_garbage(agent_return: float, baselines: Mapping[str, Mapping[str, float]]) -> None:
    """Warn where the trained agent earns no more than a policy whose responses have no valid action.

    The penalty of such a response is too small where random play earns even less. Elsewhere the agent has not learned
    the actions.

    Args:
        agent_return: Mean return of the agent on the validation set.
        baselines: Metrics of other policies there, by name.
    """
    garbage = baselines.get("garbage policy", {}).get("return")
    if garbage is None or agent_return > garbage:
        return
    if baselines.get("random policy", {}).get("return", math.inf) < garbage:
        remedy = "random play earns less: raise env.format_penalty, or set env.invalid_ends=false"
    else:
        remedy = (
            "show the rules (context.system_prompt=instructions), or raise warm_start.steps and warm_start.episodes, "
            "or trainer.max_epochs"
        )
    log.warning(
        "val/return=%.3g: no more than the %.3g of responses without a valid action; %s",
        agent_return,
        garbage,
        remedy,
    )


def _warn(key: str, error: Exception) -> None:
    log.warning("%s: not in the summary (%s)", key, in_one_line(error))


def scripted_metrics(
    validation_set: ValidationSet, name: str, baseline: DictConfig
) -> dict[str, float]:
    """Return the validation set's metrics of a scripted policy."""
    policy = instantiate(baseline)
    with phase(f"baseline {name}", len(validation_set.episode_specs)) as progress:
        trajectories = validation_set.play_scripted(policy, name=name, progress=progress)
    return _played_metrics(trajectories)


def blank_image_metrics(
    blank_set: ValidationSet, agent: AgentModule, engine: RolloutEngine
) -> dict[str, dict[str, float]]:
    """Return the metrics of the agent with blank images, nothing but a warning if they fail.

    Args:
        blank_set: Validation set in environments with blank images.
        agent: The agent.
        engine: Its rollout engine, with the weights to play with.
    """
    agent.eval()
    try:
        with phase("blank images", len(blank_set.episode_specs)) as progress:
            trajectories = blank_set.play(engine, version=agent.global_step, progress=progress)
        return {"blank images": _played_metrics(trajectories)}
    except RolloutError as error:
        _warn("validation.blank", error)
        return {}


def _played_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of episodes of which some have not failed.

    Raises:
        RolloutError: Every episode failed.
    """
    metrics = rollout_metrics(trajectories)
    if not metrics["episodes"]:
        errors = errors_of(trajectories)
        raise RolloutError(f"every episode failed; most with {most_common(errors)}")
    return metrics
