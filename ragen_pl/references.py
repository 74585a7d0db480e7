"""What an agent's figures stand beside: scripted players, and the agent with its pictures blanked."""

from __future__ import annotations

from dataclasses import replace

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from ragen_pl.assemble import Parts, build_environments, scripted
from ragen_pl.metrics.rollout import rollout_figures
from ragen_pl.modules.agent import AgentModule


def reference_figures(
    parts: Parts, agent: AgentModule, *, device: torch.device
) -> dict[str, dict[str, float]]:
    """Return the panel's figures of each player that the config names, by its name in words.

    Args:
        parts: of the run.
        agent: plays with its pictures blanked.
        device: that it plays on, for Lightning moves it to the CPU at its end.
    """
    panel = parts.cfg.panel
    players = {name: player for name, player in (panel.players or {}).items() if player}
    figures = {
        f"{name} player": player_figures(parts, str(name), player)
        for name, player in players.items()
    }
    if panel.blank:
        figures["blanked"] = blank_figures(parts, agent.to(device))
        agent.cpu()
    return figures


def player_figures(parts: Parts, name: str, player: DictConfig) -> dict[str, float]:
    """Return what one of the config's scripted players makes of the panel."""
    proxy = scripted(parts, instantiate(player))
    return rollout_figures(proxy.play(parts.panels[0].starts, seed_key=("player", name)))


def blank_figures(parts: Parts, agent: AgentModule) -> dict[str, float]:
    """Return what the agent makes of the panel when its pictures are blanked."""
    proxy = replace(parts.proxy, environments=build_environments(parts.cfg, blank_images=True))
    agent.eval()
    engine = agent.rollout_engine()
    engine.sync_weights(-1)
    return rollout_figures(
        proxy.rollout(engine, parts.panels[0].starts, seed_key=("panel",), greedy=True)
    )
