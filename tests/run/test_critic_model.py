"""Critics with a model of their own, and models in bfloat16, from a run's config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.runs.composing import composed

from ragen_pl.assembly.build import assemble, build_agent
from ragen_pl.config import ConfigError
from ragen_pl.config.nodes import plain
from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.modules.optimizers import MasterWeights
from ragen_pl.run.trainer import build_trainer

SMALL_LM = "_target_: ragen_pl.models.build.build_small_lm"
SMALLER = "text: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1}"


def settings(*overrides: str):
    return composed("env=frozenlake", "model=small_lm", "logger=none", *overrides)


def test_smaller_model_of_the_critic() -> None:
    cfg = settings(
        "algorithm.critic=own", f"critic.build={{{SMALL_LM}, {SMALLER}}}", "critic.lr=1e-4"
    )
    components = assemble(cfg)
    assert components.critic is not None and components.critic.backbone is not None
    assert components.critic.backbone.hidden_size == 32 < components.bundle.hidden_size
    agent = build_agent(components)
    agent.trainer = build_trainer(plain(cfg.trainer), enable_progress_bar=False, logger=False)
    groups = agent.configure_optimizers()["optimizer"].param_groups
    assert [(group["name"], group["lr"]) for group in groups] == [
        ("policy", 6e-4),
        ("critic", 1e-4),
    ]


def test_detached_head() -> None:
    critic = assemble(settings("critic.detach=true")).critic
    assert critic is not None and critic.detach_states and critic.shares_trunk


def test_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"critic\.build: its tokenizer is another, .* or null"):
        assemble(
            settings(
                "algorithm.critic=own",
                f"critic.build={{{SMALL_LM}, {SMALLER}, prompt_format: grounding}}",
            )
        )


def test_models_that_read_images_otherwise_differ() -> None:
    policy = build_small_vlm()
    assert policy.input_difference(build_small_vlm(text={"hidden_size": 32})) is None
    other = build_small_vlm(vision={"patch_size": 8})
    assert policy.input_difference(other) == "it processes images in another way"
    assert policy.input_difference(build_small_lm()) == "its token of an image is another"


def test_weights_in_bfloat16_are_trained_on_float32_copies() -> None:
    cfg = settings("model.build.dtype=bfloat16")
    agent = build_agent(assemble(cfg))
    assert {weight.dtype for weight in agent.policy.parameters()} == {torch.bfloat16}
    agent.trainer = build_trainer(plain(cfg.trainer), enable_progress_bar=False, logger=False)
    assert isinstance(agent.configure_optimizers()["optimizer"], MasterWeights)
    cfg.master_weights = False
    agent = build_agent(assemble(cfg))
    agent.trainer = build_trainer(plain(cfg.trainer), enable_progress_bar=False, logger=False)
    assert isinstance(agent.configure_optimizers()["optimizer"], torch.optim.AdamW)


def test_learning_rates_of_pretrained_models() -> None:
    cfg = settings("model=pretrained", "model.build.path=folder")
    assert (cfg.optimizer.lr, cfg.critic.lr) == (1e-6, 1e-4)
    assert (cfg.warm_start.optimizer.lr, cfg.warm_start.critic_lr) == (1e-5, 1e-4)
    cfg = settings("optimizer.lr=2e-3", "warm_start.optimizer.lr=3e-3")
    assert (cfg.critic.lr, cfg.warm_start.critic_lr) == (2e-3, 3e-3)
    assert settings("model=smollm2", "warm_start=none", "optimizer.lr=2e-5").critic.lr == 1e-4
