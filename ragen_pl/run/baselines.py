"""What an agent's metrics stand beside: scripted policies, and the agent with its images blanked."""

from __future__ import annotations

from dataclasses import replace

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from ragen_pl.metrics.rollout import rollout_metrics
from ragen_pl.modules.agent import AgentModule
from ragen_pl.run.build import RunComponents, build_environments, scripted


def baseline_metrics(
    parts: RunComponents, agent: AgentModule, *, device: torch.device
) -> dict[str, dict[str, float]]:
    """Return the validation set's metrics of each player that the config names, by its name in words.

    Args:
        parts: of the run.
        agent: plays with its images blanked.
        device: that it plays on, for Lightning moves it to the CPU at its end.
    """
    validation_set = parts.cfg.validation
    baselines = {
        name: baseline for name, baseline in (validation_set.baselines or {}).items() if baseline
    }
    figures = {
        f"{name} player": scripted_metrics(parts, str(name), baseline)
        for name, baseline in baselines.items()
    }
    if validation_set.blank:
        figures["blanked"] = blank_image_metrics(parts, agent.to(device))
        agent.cpu()
    return figures


def scripted_metrics(parts: RunComponents, name: str, baseline: DictConfig) -> dict[str, float]:
    """Return what one of the config's scripted policies makes of the panel."""
    proxy = scripted(parts, instantiate(baseline))
    return rollout_metrics(proxy.play(parts.validation_sets[0].starts, seed_key=("player", name)))


def blank_image_metrics(parts: RunComponents, agent: AgentModule) -> dict[str, float]:
    """Return what the agent makes of the validation set when its images are blanked."""
    proxy = replace(parts.proxy, environments=build_environments(parts.cfg, blank_images=True))
    agent.eval()
    engine = agent.rollout_engine()
    engine.load_weights(agent.global_step)
    return rollout_metrics(
        proxy.rollout(engine, parts.validation_sets[0].starts, seed_key=("panel",), greedy=True)
    )
