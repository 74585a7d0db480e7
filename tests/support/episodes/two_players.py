"""Policies with written responses and their opponents, and short quiet runs of a tiny agent without a critic."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import torch

from ragen_pl.algorithms.advantages.group import LeaveOneOut
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.modules.agent import AgentModule
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.masking import Masks
from ragen_pl.modules.policy import PolicyModule

from .rollout_fixtures import TextEngine


def answer(action):
    return f"<think>x</think><answer>{action}</answer>"


class Written:
    """Module whose policy writes one action, and whose opponents another one."""

    global_step = 0

    def __init__(self, context, *, own, other):
        self.engine = TextEngine(context, lambda session, turn: answer(own))
        self.opponent = TextEngine(context, lambda session, turn: answer(other))
        self.loaded = []

    def rollout_engine(self):
        return self.engine

    def trained_weights(self):
        return {"w": torch.tensor([float(len(self.loaded))])}

    def opponent_engine(self, weights):
        self.loaded.append(weights["w"].item())
        return self.opponent

    def prepare(self, batch):
        return batch


def agent_of(bundle, *, engine=TransformersEngine, lr=1e-2):
    return AgentModule(
        PolicyModule(bundle),
        None,
        estimator=LeaveOneOut(),
        masks=Masks(),
        loss=UpdateLoss(),
        optimizer=functools.partial(torch.optim.AdamW, lr=lr),
        engine=engine,
    )


def fitted(agent, data, *callbacks, iterations):
    """Train an agent without validation and files; return its Trainer."""
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=iterations,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[RolloutUpdate(), *callbacks],
    )
    trainer.fit(agent, datamodule=data)
    return trainer
