"""One iteration of any composed algorithm on a tiny model, rollout to optimizer steps, without a Trainer's loop."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from support.runs.composing import composed

import envs  # noqa: F401
from ragen_pl.assembly.build import assemble, build_agent, build_datamodule
from ragen_pl.assembly.component_checks import check_components
from ragen_pl.config import check_config
from ragen_pl.environments.check import check_environment
from ragen_pl.rewards.shaping import Gather
from ragen_pl.trajectory import Span, Trajectory

torch.set_num_threads(1)
TINY = (
    "env=frozenlake", "model=small_lm", "curriculum=null", "validation.held_out=false", "validation.episodes=4",
    "seed=3", "env.invalid_ends=false", "env.max_turns=3", "rollout.groups=4", "rollout.group_size=4",
    "rollout.max_response_tokens=8", "update.minibatches=2", "update.epochs=2", "optimizer.lr=1e-2",
    "++model.build.text.hidden_size=16", "++model.build.text.intermediate_size=16",
    "++model.build.text.num_attention_heads=2", "++model.build.text.num_hidden_layers=1",
)  # fmt: skip


class SyntheticRewards:
    """Set rewards, success, potentials, spans and log-probs that depend on the response only.

    An environment's own rewards are equal for the random responses of an untrained policy.
    """

    def __call__(self, trajectories: Sequence[Trajectory], *, gather: Gather) -> None:
        for trajectory in trajectories:
            for number, turn in enumerate(trajectory.turns):
                rng = np.random.default_rng([int(turn.response_ids.sum()), number])
                turn.reward_terms = {"environment": float(rng.integers(-1, 3)), "format": -0.05}
                if trajectory.group == 1:  # one group whose members agree
                    turn.reward_terms = {"environment": float(number == 0)}
                turn.spans = np.sort(rng.integers(0, 4, len(turn.response_ids))).astype(np.int8)
                turn.spans[-1] = Span.END
                turn.action_is_valid, turn.action_is_effective = True, bool(rng.integers(2))
                turn.hit_length_limit = bool(rng.integers(2))
                turn.response_logprobs = turn.response_logprobs + 0.3 * rng.normal(
                    size=len(turn.response_ids)
                ).astype(np.float32)
                if turn.potential is not None:  # no response of an untrained policy moves
                    turn.potential = -float(rng.integers(0, 6))
            trajectory.success = trajectory.reward > 0


@dataclass
class Iteration:
    """Results of an iteration."""

    weights: torch.Tensor
    metrics: dict[str, float]


@functools.cache
def preset(*chosen: str) -> DictConfig:
    return composed(*TINY, *chosen, checked=False)


def compose_config(*overrides: str) -> DictConfig:
    """Compose each preset once, which takes most of the time, and give a copy of it the other overrides."""
    cfg = copy.deepcopy(preset(*(one for one in overrides if one.startswith("algorithm="))))
    others = [one for one in overrides if not one.startswith("algorithm=")]
    for one in OverridesParser.create().parse_overrides(others):
        OmegaConf.update(cfg, one.key_or_group, one.value(), merge=True, force_add=one.is_add())
    check_config(cfg)
    check_components(cfg, {cfg.env.name: check_environment(cfg)})
    return cfg


def iterate(*overrides: str, iterations: int = 1) -> Iteration:
    """Run whole iterations of what these overrides compose."""
    cfg = compose_config(*overrides)
    parts = assemble(cfg)
    agent, data = build_agent(parts), build_datamodule(parts)
    data.rewards.insert(0, SyntheticRewards())
    if agent.critic is not None:  # heads start at 0, and all values would be 0
        generator = torch.Generator().manual_seed(0)
        torch.nn.init.normal_(agent.critic.head.layers[-1].weight, generator=generator)
    agent.trainer = pl.Trainer(accelerator="cpu", barebones=True, max_epochs=10)
    optimizer = agent.configure_optimizers()["optimizer"]
    for iteration in range(iterations):
        agent.eval()
        data.collect(iteration, agent)
        for minibatch in data.train_dataloader():
            optimizer.zero_grad()
            agent.training_step(minibatch, 0).backward()
            optimizer.step()
    batch = data.buffer
    samples = batch.samples
    totals = agent.statistics.metrics(steps=4)
    trained = samples.loss_mask
    metrics = data.metrics | {
        "episodes_trained": float(len(batch.episodes.turns)),
        "trained": float(trained.sum()),
        "weight": float(samples.loss_weight.sum()),
        "credited": float(samples.advantage_mask.sum()),
        "held": float(samples.kl_mask.sum()),
        "advantage": float(samples.advantages[trained].abs().mean()),
        "spread": float(samples.advantages[trained].std()),
        "target": float(samples.returns.sum()),
        "reward": float(batch.episodes.turn_rewards.square().sum()),
        "old_logprob": float(samples.old_logprobs.sum()),
        "clipped": totals["clip_fraction"] + totals["dual_clipped"],
        "policy_loss": totals["policy_loss"], "value_loss": totals["value_loss"],
        "kl_loss": totals["kl_loss"], "loss": totals["loss"],
    }  # fmt: skip
    flat = torch.cat([parameter.detach().flatten() for parameter in agent.policy.parameters()])
    return Iteration(flat, metrics)


@pytest.fixture(scope="session")
def run():
    """Return a function that runs iterations and caches their results."""
    known: dict[tuple, Iteration] = {}

    def once(*overrides: str, iterations: int = 1) -> Iteration:
        key = (*overrides, iterations)
        if key not in known:
            known[key] = iterate(*overrides, iterations=iterations)
        return known[key]

    return once


@pytest.fixture(scope="session")
def config_of():
    """Return the maker of checked configurations."""
    return compose_config
