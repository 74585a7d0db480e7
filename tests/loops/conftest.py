"""Whole training runs of a tiny language model on a small FrozenLake, each a fraction of a second."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from support.models.tiny_models import TEXT as TWO_LAYERS
from support.runs.rollouts_ahead import ahead_of, rollout_ahead, run_ahead  # noqa: F401 - fixtures

import envs  # noqa: F401
from envs.policies import NoisyPolicy
from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.masks import until_action
from ragen_pl.data.curriculum import Curriculum
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.demonstrations import DemonstrationDataModule
from ragen_pl.data.mixture import MixedEnvironment, Mixture
from ragen_pl.data.settings import IterationSettings, UpdateSettings, WarmStartSettings
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.environments.mixture import EnvironmentMixture
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.models.adapters import choose_trained_weights
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.agent import AgentModule
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss
from ragen_pl.modules.masking import Masks
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.settings import OptimizationSettings
from ragen_pl.modules.warm_start import WarmStartModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy

torch.set_num_threads(1)
TEXT = TWO_LAYERS | {"num_hidden_layers": 1}
FROZENLAKE = {"target": "ragen/FrozenLake-v0", "max_turns": 3, "kwargs": {"min_distance": 1}}
KUHN = {"target": "ragen_pl.envs.kuhn_poker.KuhnPoker", "max_turns": 2, "invalid_ends": False}
QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class InMemory(Logger):
    """Logger that keeps its points in memory."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int | None, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.points.append((step, dict(metrics)))


@dataclass(kw_only=True)
class Setup:
    """Settings of a run. `fit` builds its objects anew and runs it."""

    # weights of a policy that keeps the format
    warm: dict[str, torch.Tensor]
    window: int | str = 1
    own_critic: bool = False
    estimator: Any = field(default_factory=lambda: BilevelGAE(gamma_turn=0.9))
    group_filter: Any = None
    # a function that makes a normalizer, which has a state
    normalizer: Any = None
    kl: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    # settings of LoRA adapters
    lora: dict[str, Any] | None = None
    tokens_per_microbatch: int | None = None
    group_size: int = 2
    iterations_ahead: int = 0
    engine: Any = TransformersEngine
    mismatch: Any = "auto"
    learning_rate: float = 3e-3
    learning_rate_warm_up: int = 0
    weight_decay: float = 0.01
    max_skipped_steps: int = 3
    max_mismatch: float | None = 0.01
    scoring: str = "needed"
    rewards: tuple[Any, ...] = ()
    frozenlake: dict[str, Any] = field(default_factory=dict)
    # a function that makes the opponents of games of Kuhn poker, in place of the lake
    opponents: Any = None
    # whether every third group plays a bandit
    mixed: bool = False
    # top_p, top_k, min_p
    truncation: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)

    def bundle(self, *, seed: int = 0):
        bundle = build_small_lm(seed=seed, text=TEXT | {"attention_dropout": self.dropout})
        bundle.model.load_state_dict(self.warm)
        bundle.model.to(self.dtype)
        choose_trained_weights(bundle.model, lora=self.lora)
        return bundle

    def build(self) -> tuple[AgentModule, RolloutDataModule]:
        torch.manual_seed(1)
        bundle = self.bundle()
        opponents = None if self.opponents is None else self.opponents()
        played = KUHN if opponents else FROZENLAKE | {"invalid_ends": False} | self.frozenlake
        context = ContextManager(bundle, window=self.window, system_prompt=None)
        proxy, validation_proxy = (
            AgentProxy(
                environments=EnvironmentManager(**(played | turns)),
                context=context,
                max_response_tokens=16,
                num_envs=num_envs,
                **self.truncation,
            )
            # a validation of two batches of one turn
            for num_envs, turns in ((256, {}), (2, {"max_turns": 1}))
        )
        curriculum = Curriculum(
            stages=[{}, {"min_distance": 2}], above=0.01, fraction=0.5, window=1
        )
        mixture, validation_sets = None, [ValidationSet("held_out", validation_proxy, episodes=4)]
        if self.mixed:
            bandit = EnvironmentManager(target="ragen/Bandit-v0", max_turns=1)
            proxy.environments = EnvironmentMixture({"lake": proxy.environments, "bandit": bandit})
            lake = MixedEnvironment(share=2.0, curriculum=curriculum)
            mixture = Mixture({"lake": lake, "bandit": MixedEnvironment(share=1.0)})
            validation_sets = [
                ValidationSet("lake", validation_proxy, episodes=4, environment=True),
                ValidationSet(
                    "bandit",
                    replace(validation_proxy, environments=bandit),
                    episodes=3,
                    environment=True,
                    keeps_states=False,
                ),
            ]
        needs_critic = self.estimator.needs_values
        own = self.bundle(seed=3) if self.own_critic else None
        agent = AgentModule(
            PolicyModule(bundle),
            CriticModule(bundle.hidden_size, backbone=own) if needs_critic else None,
            estimator=self.estimator,
            masks=Masks(advantage=until_action),
            loss=UpdateLoss(
                kl=ReferenceKL(**({"coefficient": 0.1} | self.kl)), mismatch=self.mismatch
            ),
            normalizer=None if self.normalizer is None else self.normalizer(),
            optimizer=functools.partial(
                torch.optim.AdamW, lr=self.learning_rate, weight_decay=self.weight_decay
            ),
            optimization=OptimizationSettings(
                learning_rate_warm_up=self.learning_rate_warm_up, learning_rate_end=0.1
            ),
            update=UpdateSettings(
                max_skipped_steps=self.max_skipped_steps,
                max_mismatch=self.max_mismatch,
                scoring=self.scoring,
            ),
            engine=self.engine,
            truncation=proxy.truncation,
            environments=None if mixture is None else mixture.shares,
        )
        datamodule = RolloutDataModule(
            proxy,
            validation_sets=validation_sets,
            iteration=IterationSettings(
                groups=6, group_size=self.group_size, iterations_ahead=self.iterations_ahead
            ),
            update=UpdateSettings(
                epochs=2, minibatches=2, tokens_per_microbatch=self.tokens_per_microbatch
            ),
            curriculum=None if self.mixed or opponents else curriculum,
            opponents=opponents,
            held_out=opponents is None,
            mixture=mixture,
            group_filter=self.group_filter,
            rewards=self.rewards,
        )
        return agent, datamodule

    def fit(
        self, *callbacks: pl.Callback, ckpt_path: str | None = None, **changes: Any
    ) -> tuple[AgentModule, list, pl.Trainer]:
        """Run three iterations; return the agent, all logged points and the Trainer."""
        agent, datamodule = self.build()
        memory = InMemory()
        settings = {
            "max_epochs": 3,
            "gradient_clip_val": 1.0,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
        }
        trainer = pl.Trainer(
            **(QUIET | settings | self.trainer | changes),
            logger=memory,
            callbacks=[RolloutUpdate(), *callbacks],
        )
        trainer.fit(agent, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=False)
        return agent, memory.points, trainer


@pytest.fixture(scope="session")
def warm_start():
    """Return a function that makes the module and the demonstrations of a warm start of some steps."""

    def make(*, steps: int) -> tuple[WarmStartModule, DemonstrationDataModule]:
        torch.manual_seed(0)
        bundle = build_small_lm(seed=0, text=TEXT)
        proxy = AgentProxy(
            environments=EnvironmentManager(**FROZENLAKE),
            context=ContextManager(bundle, window=1, system_prompt=None),
            max_response_tokens=16,
        )
        settings = WarmStartSettings(episodes=64, batch_size=32, steps=steps, gamma=0.9)
        demonstrations = DemonstrationDataModule(
            proxy,
            policy=NoisyPolicy(noise=0.3),
            settings=settings,
            seed=0,
        )
        module = WarmStartModule(
            PolicyModule(bundle),
            None,
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
            settings=settings,
        )
        return module, demonstrations

    return make


@pytest.fixture(scope="session")
def warm(warm_start) -> dict[str, torch.Tensor]:
    """Weights of a policy that learned the format from demonstrations."""
    module, demonstrations = warm_start(steps=80)
    pl.Trainer(**QUIET, max_steps=80, max_epochs=-1, logger=False, enable_checkpointing=False).fit(
        module, datamodule=demonstrations
    )
    model = module.policy.bundle.model
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="session")
def setup_of(warm):
    """Return a function that makes a setup."""
    return functools.partial(Setup, warm=warm)
