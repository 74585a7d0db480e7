"""Tiny agents, and batches that they have really played, with rewards and endings set by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace

import lightning.pytorch as pl
import numpy as np
import torch
from support.episodes.trajectories import roll_out, starts
from support.models.tiny_models import TEXT, VISION

import envs  # noqa: F401
import visual_envs  # noqa: F401
from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.data.batch import Minibatch, Samples, TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.agent import AgentModule
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.masking import Masks
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.trajectory import EpisodeStatus, Trajectory

torch.set_num_threads(1)


def build_bundle(*, seed: int = 0, images: bool = False) -> ModelBundle:
    """Return a tiny model of text, or of text and images."""
    if images:
        return build_small_vlm(seed=seed, text=TEXT, vision=VISION)
    return build_small_lm(seed=seed, text=TEXT)


def build_agent(
    *,
    own_critic: bool = False,
    seed: int = 0,
    images: bool = False,
    change: Callable[[ModelBundle], None] = lambda bundle: None,
    **changes,
) -> AgentModule:
    """An agent attached to a Trainer that does not run. `change` gets each of its models."""
    torch.manual_seed(seed)
    bundle = build_bundle(seed=seed, images=images)
    change(bundle)
    backbone = None
    if own_critic:
        backbone = build_bundle(seed=seed + 1, images=images)
        change(backbone)
    settings = {
        "estimator": BilevelGAE(gamma_turn=0.9),
        "masks": Masks(),
        "loss": UpdateLoss(),
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0),
        "engine": TransformersEngine,
    }
    agent = AgentModule(
        PolicyModule(bundle),
        CriticModule(bundle.hidden_size, backbone=backbone),
        **(settings | changes),
    )
    if agent.critic is not None:  # heads start at 0, and all values would be 0
        torch.nn.init.normal_(agent.critic.head.layers[-1].weight)
    agent.trainer = pl.Trainer(accelerator="cpu", barebones=True, max_epochs=10)
    return agent


def play(
    agent: AgentModule,
    *,
    groups: int = 4,
    members: int = 2,
    window: int | str = 1,
    temperature: float = 1.0,
    num_envs: int = 256,
) -> list[Trajectory]:
    """Let the agent play, then give its turns rewards and spans of their own."""
    seen = "Visual" if agent.policy.bundle.image_token_id is not None else ""
    target = f"ragen/FrozenLake{seen}-v0"
    context = ContextManager(agent.policy.bundle, window=window, system_prompt=None)
    if agent.loss.echo is not None:
        context.record_roles()
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target=target,
            kwargs={"plans": True},
            invalid_ends=False,
            max_turns=3,
            record_plans=agent.loss.hint is not None,
        ),
        context=context,
        hint=agent.loss.hint,
        max_response_tokens=9,
        temperature=temperature,
        num_envs=num_envs,
        **({} if agent.truncation is None else asdict(agent.truncation)),
    )
    agent.eval()
    trajectories = roll_out(proxy, agent.rollout_engine(), starts(groups, members))
    rng = np.random.default_rng(0)
    for trajectory in trajectories:
        trajectory.turns = trajectory.turns[: 1 + trajectory.group % 3]
        for turn in trajectory.turns:
            turn.reward_terms = {"environment": float(rng.normal())}
            turn.spans = rng.integers(0, 4, len(turn.response_ids)).astype(np.int8)
    return trajectories


def build_batch(agent: AgentModule, **changes) -> TrajectoryBatch:
    """Batch of the agent's update."""
    played, text = play(agent, **changes), agent.loss.echo is not None
    hinted = agent.loss.hint is not None
    return agent.prepare(collate(played, agent.policy.bundle, text=text, hinted=hinted))


def build_minibatch(batch: TrajectoryBatch) -> Minibatch:
    """The whole batch as one minibatch, its rows in order."""
    (minibatch,) = MinibatchLoader(batch, epochs=1, minibatches=1)
    return replace(
        minibatch,
        samples=copied(batch.samples),
        reference=batch.reference,
        reference_ids=batch.reference_ids,
        kept_ids=batch.kept_ids,
        kl_weight=batch.kl_weight,
    )


def copied(samples: Samples) -> Samples:
    return Samples(
        **{field.name: getattr(samples, field.name).clone() for field in fields(samples)}
    )


def take_gradient(
    agent: AgentModule, minibatches: Sequence[Minibatch]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of one optimizer step over these minibatches, as the Trainer takes it."""
    agent.zero_grad()
    total = 0.0
    for minibatch in minibatches:
        loss = agent.training_step(minibatch, 0) / len(minibatches)
        loss.backward()
        total += float(loss.detach())
    return total, {
        name: parameter.grad.clone()
        for name, parameter in agent.named_parameters()
        if parameter.grad is not None
    }


def cut(trajectory: Trajectory) -> Trajectory:
    """End a trajectory from outside: its last prompt stands for the state after its last turn."""
    last = trajectory.turns[-1]
    return replace(
        trajectory,
        status=EpisodeStatus.TRUNCATED,
        final_prompt_ids=last.prompt_ids,
        final_images=list(last.prompt_images),
    )
