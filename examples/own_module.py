"""REINFORCE as a LightningModule of your own, with the rollout loop and the DataModule of ragen_pl.

The module implements `rollout_engine` and `prepare`. Everything else is plain Lightning.
Run `python examples/own_module.py`.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import gymnasium
import lightning.pytorch as pl
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ragen_pl.data.batch import Minibatch, TrajectoryBatch
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.demonstrations import DemonstrationDataModule
from ragen_pl.data.settings import IterationSettings, UpdateSettings, WarmStartSettings
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class NameTheColor(gymnasium.Env[str, np.int64]):
    """Answer with the color that is shown. An episode has one turn."""

    action_names = ("Red", "Blue", "Green")
    instructions = "Answer with the color you see."

    def __init__(self) -> None:
        self.action_space, self.observation_space = spaces.Discrete(3), spaces.Text(max_length=9)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Draw a color."""
        super().reset(seed=seed)
        self.color = int(self.np_random.integers(3))
        return self.action_names[self.color], {}

    def step(self, action: int | np.int64) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return reward 1 for the right color."""
        right = int(action) == self.color
        return "over", float(right), True, False, {"success": right}


class PoorDemonstrator:
    """Demonstrator that gives the right answer with probability 1/3 and a random one otherwise."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return an action."""
        environment: Any = env.unwrapped
        return environment.color if rng.random() < 1 / 3 else int(rng.integers(3))


class Reinforce(pl.LightningModule):
    """REINFORCE with the mean return of the iteration as baseline."""

    def __init__(self, policy: PolicyModule) -> None:
        super().__init__()
        self.policy = policy
        self.returns: list[float] = []  # mean return of each iteration

    def rollout_engine(self) -> TransformersEngine:
        """Return an engine that samples from the current policy."""
        engine = TransformersEngine(self.policy)
        engine.load_weights(self.global_step)
        return engine

    def prepare(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """Set the advantage of every sampled token to the return of its episode minus the mean return."""
        returns = batch.episodes.turn_rewards.sum(1)
        self.returns.append(float(returns.mean()))
        batch.samples.advantages = (returns - returns.mean())[
            batch.samples.episode, None
        ] * batch.samples.loss_mask
        return batch

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Return the REINFORCE loss."""
        scores = self.policy(batch.samples, batch.images)
        return -(scores.logprobs * batch.samples.advantages).sum() / batch.sequences

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(*, iterations: int = 20) -> list[float]:
    """Train on demonstrations, then by REINFORCE. Return the mean return of each iteration."""
    pl.seed_everything(0, verbose=False)
    bundle = build_small_lm(text={"hidden_size": 64, "intermediate_size": 128})
    rollout_settings = {
        "environments": EnvironmentManager(target=f"{__name__}.NameTheColor", max_turns=1),
        "context": ContextManager(bundle, window=1, system_prompt=None),
        "max_response_tokens": 12,
    }
    policy = PolicyModule(bundle, optimizer=partial(torch.optim.AdamW, lr=3e-3))
    demonstrations = DemonstrationDataModule(
        AgentProxy(**rollout_settings),
        policy=PoorDemonstrator(),
        settings=WarmStartSettings(episodes=512, batch_size=64, steps=120, gamma=1.0),
        seed=0,
    )
    pl.Trainer(**QUIET, max_steps=120).fit(policy, datamodule=demonstrations)

    module = Reinforce(policy)
    datamodule = RolloutDataModule(
        AgentProxy(**rollout_settings),
        iteration=IterationSettings(groups=96),
        update=UpdateSettings(epochs=1, minibatches=4),
        held_out=False,
    )
    trainer = pl.Trainer(**QUIET, max_epochs=iterations, callbacks=[RolloutUpdate()])
    trainer.fit(module, datamodule=datamodule)
    # A random policy has 0.33; after the demonstrations it is about 0.5.
    print(f"return {module.returns[0]:.2f} -> {module.returns[-1]:.2f}")
    return module.returns


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    main(iterations=parser.parse_args().iterations)
