"""Baselines for the final summary: scripted policies, and the agent with blank images."""

from __future__ import annotations

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from ragen_pl.metrics.rollout import rollout_metrics
from ragen_pl.modules.agent import AgentModule
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.run.build import RunComponents, proxy_with


def baseline_metrics(
    components: RunComponents, agent: AgentModule, *, device: torch.device
) -> dict[str, dict[str, float]]:
    """Return the validation set's metrics of each of the config's baselines, by its name.

    Args:
        components: objects of the run.
        agent: agent to play with blank images.
        device: device to play on. Lightning has moved the agent to the CPU.
    """
    validation = components.cfg.validation
    metrics = {
        f"{name} policy": scripted_metrics(components, str(name), policy)
        for name, policy in (validation.baselines or {}).items()
        if policy
    }
    if validation.blank:
        metrics["blank images"] = blank_image_metrics(components, agent.to(device))
        agent.cpu()
    return metrics


def scripted_metrics(
    components: RunComponents, name: str, baseline: DictConfig
) -> dict[str, float]:
    """Return the validation set's metrics of a scripted policy."""
    # "player" is part of the seed
    trajectories = proxy_with(components).rollout(
        ScriptedResponder(policy=instantiate(baseline)),
        components.validation_sets[0].episode_specs,
        seed_key=("player", name),
    )
    return rollout_metrics(trajectories)


def blank_image_metrics(components: RunComponents, agent: AgentModule) -> dict[str, float]:
    """Return the validation set's metrics of the agent with blank images."""
    proxy = proxy_with(components, blank_images=True)
    agent.eval()
    engine = agent.rollout_engine()
    engine.load_weights(agent.global_step)
    responder = EngineResponder(engine=engine, context=proxy.context, greedy=True)
    # "panel" is part of the seed
    return rollout_metrics(
        proxy.rollout(responder, components.validation_sets[0].episode_specs, seed_key=("panel",))
    )
