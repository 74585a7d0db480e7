"""Frequent words that an environment's class declares are tokens of the small models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from support.runs.composing import composed

from ragen_pl.assembly.build import build_bundle, build_critic, with_words
from ragen_pl.config import ConfigError, config_dir
from ragen_pl.environments.calls import make_environment
from ragen_pl.environments.classes import frequent_words
from ragen_pl.environments.members import EnvironmentMembers
from ragen_pl.run.train import train

# size of the vocabulary and digest of its tokens in the order of their ids, on which saved models depend
VOCABULARIES = {
    "babyai": (552, "216903a9d687433a"),
    "babyai_visual": (552, "216903a9d687433a"),
    "blackjack": (530, "795fa69c675c6c0b"),
    "code": (606, "19639d7a9ac44f92"),
    "invoice_check": (570, "f39745e5b217dba1"),
    "knowledge_base": (696, "3586055d491f16c8"),
    "knowledge_base_compaction": (696, "3586055d491f16c8"),
    "kuhn_poker": (530, "fdcfd0a69c3fcbf7"),
    "metaworld": (535, "96f0cb1dc3c455c2"),
    "miniwob": (559, "c42e5df04724717e"),
    "miniworld": (525, "7ebf89ea4f24500b"),
    "negotiation": (550, "0969fc68ba05e577"),
    "pocket_cube": (538, "766fcf545f7cf5f8"),
    "program": (514, "61e8984d50fdf041"),
    "support_desk": (658, "93852f5f0dd09d4d"),
    "svg": (540, "77a19e2336fa5a1c"),
    "textarena": (520, "ffaf32f30a70c390"),
    "textarena_two_player": (522, "695db14fd7b028aa"),
    "tic_tac_toe": (531, "3c8e6f1feb3b9e8f"),
    "web_shop": (667, "b4aa172c8e86bba4"),
}
PLAIN = (512, "039f90b254bc2f47")
# the words of a mixture are those of its environments
SHIPPED = sorted(
    file.stem for file in (config_dir() / "env").glob("*.yaml") if file.stem != "mixture"
)
NEEDS_A_LIBRARY = {"metaworld", "miniwob", "miniworld", "textarena", "textarena_two_player"}
HERE = f"{__name__}.Opposites"


class Opposites(gymnasium.Env[Any, Any]):
    """Environment of another library, with frequent words."""

    frequent_words = ("scorching", "freezing")


class Mistaken(Opposites):
    frequent_words = "scorching"  # type: ignore[assignment]


class Blank(Opposites):
    frequent_words = ("scorching", "")


class Wordless(gymnasium.Env[Any, Any]):
    pass


def make_opposites() -> gymnasium.Env[Any, Any]:
    return Opposites()


@pytest.mark.parametrize("name", SHIPPED)
def test_the_ids_of_saved_models_stay_the_same(name: str) -> None:
    target = [f"env.target={__name__}.Wordless"] if name == "custom" else []
    url = ["env.kwargs.urls=[http://localhost:1]"] if name == "openenv" else []
    vocabulary = build_bundle(composed(f"env={name}", *target, *url)).tokenizer.get_vocab()
    in_order = sorted(vocabulary.items(), key=lambda item: item[1])
    digest = hashlib.sha256(json.dumps(in_order).encode()).hexdigest()[:16]
    assert (len(vocabulary), digest) == VOCABULARIES.get(name, PLAIN)


@pytest.mark.parametrize("name", sorted(VOCABULARIES.keys() - NEEDS_A_LIBRARY - {"program"}))
def test_each_frequent_word_occurs(name: str) -> None:
    """In an observation, a description or an answer of demonstrations, or in the reply to a wrong answer."""
    cfg = composed(f"env={name}")
    env: Any = make_environment(cfg.env).unwrapped
    policy, rng = instantiate(cfg.warm_start.demonstrator), np.random.default_rng(0)
    missing = set(frequent_words(cfg.env.target))

    def read(text: str | dict[str, Any]) -> None:
        text = text if isinstance(text, str) else text["text"]
        missing.difference_update([word for word in missing if word in text])

    for seed in range(400):
        read(env.reset(seed=seed)[0])
        for _ in range(cfg.env.max_turns * EnvironmentMembers(env).seats):
            read(env.describe())
            action = policy.act(env, rng)
            read(action if isinstance(action, str) else env.action_names[action])
            observation, _, terminated, truncated, _ = env.step(action)
            read(observation)
            if terminated or truncated:
                break
        if not missing:
            break
    env.reset(seed=0)
    read(env.step("nonsense" if isinstance(env.action_space, gymnasium.spaces.Text) else 0)[0])
    assert not missing


def test_a_declared_word_is_one_token() -> None:
    """So it is in a critic of its own, which reads what the policy has read."""
    cfg = composed(
        "env=custom", f"env.target={HERE}", "algorithm.critic=own",
        "critic.build={_target_: ragen_pl.models.build.build_small_lm, text: {num_hidden_layers: 1}}",
    )  # fmt: skip
    bundle = build_bundle(cfg)
    assert len(bundle.tokenizer("scorching freezing")["input_ids"]) == 2
    critic = build_critic(cfg, bundle)
    assert critic is not None and critic.backbone is not None


def test_words_of_the_config_replace_those_of_the_class() -> None:
    cfg = composed("env=custom", f"env.target={HERE}", "+env.words=[scorching]")
    assert with_words(cfg) is cfg
    tokenizer = build_bundle(cfg).tokenizer
    assert len(tokenizer("scorching")["input_ids"]) == 1 < len(tokenizer("freezing")["input_ids"])


def test_a_run_keeps_the_words_of_its_model(tmp_path: Path) -> None:
    """Its model is read with the tokens that it was trained with, in whatever environment."""
    train(
        composed(
            "env=blackjack", "warm_start=none", "logger=none", "rollout.groups=2", "trainer.max_epochs=1",
            "trainer.accelerator=cpu", "trainer.check_val_every_n_epoch=1", "validation.episodes=2",
            "callbacks.progress=null", "callbacks.plots=null", f"paths.run_dir={tmp_path}",
        )
    )  # fmt: skip
    trained = OmegaConf.load(tmp_path / "config.yaml")
    cfg = OmegaConf.merge(composed("env=web_shop"), {"model": trained.model})
    assert isinstance(cfg, DictConfig)
    assert len(build_bundle(cfg).tokenizer) == VOCABULARIES["blackjack"][0]


def test_a_model_with_a_vocabulary_of_its_own_has_no_words() -> None:
    cfg = composed("env=blackjack", "model=pretrained", "model.build.path=nowhere")
    assert with_words(cfg) is cfg


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (HERE, ("scorching", "freezing")),
        (f"{__name__}.Wordless", ()),
        (f"{__name__}.make_opposites", ()),
        ("CartPole-v1", ()),
        ("envs:ragen/Blackjack-v0", frequent_words("envs.blackjack.Blackjack")),
        ("envs:ragen/Blackjack", frequent_words("envs.blackjack.Blackjack")),
    ],
)
def test_words_of_a_class_path_or_an_id(target: str, words: tuple[str, ...]) -> None:
    assert frequent_words(target) == words


@pytest.mark.parametrize("name", ["Mistaken", "Blank"])
def test_words_that_are_no_texts_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"env\.target=.*{name}: found frequent_words=.*on the class"
    ):
        build_bundle(composed("env=custom", f"env.target={__name__}.{name}"))


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"env\.target=envs\.blackjack\.Blackjak: .*no attribute"):
        build_bundle(composed("env=custom", "env.target=envs.blackjack.Blackjak"))
