"""Configurations from Python values."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from signal import Signals

import gymnasium
import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from ragen_pl.config import ConfigError
from ragen_pl.config.composition import compose_overrides, composed
from ragen_pl.config.main import parsed
from ragen_pl.config.overrides import overrides_of

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@given(VALUES)
def test_a_value_is_the_same_on_the_command_line(value: object) -> None:
    [override] = overrides_of({"key": value}, groups=set())
    assert OverridesParser.create().parse_override(override).value() == value


@pytest.mark.parametrize("value", [np.float64(1e-5), np.float32(0.5), np.int64(3), Signals.SIGINT])
def test_numbers_of_other_types_are_numbers(value) -> None:
    [override] = overrides_of({"key": value}, groups=set())
    read = OverridesParser.create().parse_override(override).value()
    assert read == value and type(read) in (int, float)


def test_strings_choose_options_and_dicts_set_keys() -> None:
    cfg = composed(
        "fit",
        {
            "env": "bandit",
            "algorithm": "grpo",
            "rollout": {"groups": 8, "engine": "transformers"},
            "trainer.max_epochs": 3,
            "optimizer": {"betas": [0.9, 0.95]},
            "curriculum": None,
        },
    )
    assert (cfg.env.name, cfg.rollout.groups, cfg.trainer.max_epochs) == ("bandit", 8, 3)
    assert cfg.optimizer.betas == [0.9, 0.95]


def test_a_class_is_an_environment_of_ones_own() -> None:
    cfg = composed("fit", {"env": gymnasium.Env, "env.max_turns": 3})
    assert (cfg.env.target, cfg.env.max_turns) == ("gymnasium.core.Env", 3)


def test_own_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    own = "# @package _global_\ndefaults:\n  - custom\nenv:\n  name: mine\n  target: a.B\n"
    (tmp_path / "env" / "mine.yaml").write_text(own)
    assert composed("fit", {"env": "mine"}, directory=tmp_path).env.target == "a.B"


class Shop(gymnasium.Env):
    """Takes one argument."""

    def __init__(self, *, tickets: int = 2) -> None:
        self.tickets = tickets


class OpenShop(gymnasium.Env):
    """Takes any."""

    def __init__(self, **settings: object) -> None:
        self.settings = settings


@pytest.mark.parametrize(
    ("settings", "kwargs"),
    [
        ({"env": Shop, "env.kwargs.tickets": 4}, {"tickets": 4}),
        ({"env": Shop, "env.kwargs": {"tickets": 4}}, {"tickets": 4}),
        ({"env": f"{__name__}.Shop", "env.kwargs.tickets": 4}, {"tickets": 4}),
        ({"env.target": f"{__name__}.Shop", "env.kwargs.tickets": 4}, {"tickets": 4}),
        ({"env": OpenShop, "env.kwargs.a": 1, "env.kwargs.b.c": "x"}, {"a": 1, "b": {"c": "x"}}),
        ({"env": OpenShop, "+env.kwargs.a": 1}, {"a": 1}),
        ({"env": "reasoning_gym", "env.kwargs.settings.max_words": 4}, {"max_words": 4}),
    ],
)
def test_arguments_that_the_environments_class_takes_need_no_plus(settings, kwargs) -> None:
    found = composed("fit", settings).env.kwargs
    assert found.get("settings", found) == kwargs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": Shop, "env.kwargs.ticket": 4}, "unknown key env.kwargs.ticket.* did you mean .*tickets"),
        ({"env": Shop, "env.kwargs.color": 4}, "unknown key env.kwargs.color: Shop takes no color; it takes tickets"),
        ({"env": Shop, "env.kwargs.tickets": "many"}, "env.kwargs.tickets=many: expected a whole number"),
        ({"env": Shop, "env.kwarg.tickets": 4}, "unknown key env.kwarg.*did you mean env.kwargs"),
    ],
)  # fmt: skip
def test_arguments_that_it_does_not_take_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        composed("fit", settings)


def test_a_class_path_alone_is_an_environment_of_ones_own() -> None:
    for settings in (
        {"env": f"{__name__}.Shop"}, {"env.target": f"{__name__}.Shop"}, {"env": f"{__name__}:Shop"},
        {"env.target": f"{__name__}:Shop"}, {"+env": f"{__name__}.Shop"}, {"env": {"target": Shop}},
        {"env": "custom", "env.target": f"{__name__}.Shop"},
    ):  # fmt: skip
        env = composed("fit", settings).env
        assert env.name == env.target == f"{__name__}.Shop"
    named = {"env": f"{__name__}.Shop", "env.name": "shop"}
    assert composed("fit", named).env.name == "shop"
    # the settings of a shipped environment stay where it is chosen
    env = composed("fit", {"env": "frozenlake", "env.target": "envs.frozen_lake.FrozenLake"}).env
    assert env.name == "frozenlake"


@pytest.mark.parametrize("command", ["watch", "page", "replay", "sync", "compare", "audit"])
def test_a_group_that_a_command_does_not_have_is_named(command) -> None:
    message = f"logger=none: python -m ragen_pl.{command} has no group logger; --help shows"
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose_overrides(command, ["logger=none"])
    with pytest.raises(ConfigError, match="unknown key callbacks; ") as error:
        compose_overrides("watch", ["callbacks.plots=null"])
    assert "did you mean callbacks" not in str(error.value)


@pytest.mark.parametrize("command", ["fit", "evaluate", "play", "watch"])
def test_an_option_that_does_not_exist_is_named(command) -> None:
    with pytest.raises(ConfigError, match=r"^--foo: there is no such option; did you mean --info"):
        parsed(["--foo"], config_name=command)


def opened_shop(tickets: int = 1) -> Shop:
    return Shop(tickets)


def test_a_function_of_a_module_makes_an_environment() -> None:
    env = composed("fit", {"env": opened_shop, "env.kwargs.tickets": 4}).env
    assert (env.target, env.kwargs) == (f"{__name__}.opened_shop", {"tickets": 4})


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            {"env": lambda: Shop()},
            "give a class, or a function that a module defines by its name, and its arguments",
        ),
        ({"env": functools.partial(Shop, 2)}, "give a class, or a function that a module"),
        (
            {"env": gymnasium.make("CartPole-v1")},
            r"give its id, env='gym' and \*\*\{'env.kwargs.id': 'CartPole-v1'\}",
        ),
        (
            {"env": "Shop"},
            "your own class is env=my_module.MyClass, a gymnasium id env=gym env.kwargs.id=",
        ),
        ({"callbacks.mine": Shop()}, r"give an object as \{'_target_': '.*\.Shop', …\}"),
        ({"optimizer": Path}, r"give an object as \{'_target_': 'pathlib.*Path', …\}"),
        ({"env": Shop()}, r"give the class, env=Shop, .*'env.kwargs.NAME': …"),
    ],
)
def test_an_instance_is_refused_with_the_way_to_give_it(settings, remedy) -> None:
    with pytest.raises(ConfigError, match=remedy):
        composed("fit", settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "bandid"}, "env=.*bandid.*: no such option; did you mean bandit?"),
        ({"rollout": {"groops": 3}}, "unknown key rollout.groops; did you mean rollout.groups?"),
        ({"rolout": {"groups": 3}}, "unknown key rolout; did you mean rollout?"),
        ({"rollout/engin": "vllm"}, "unknown key rollout.engin; did you mean rollout.engine?"),
        ({"env.kwargs.sise": 3}, "unknown key env.kwargs.sise; did you mean env.kwargs.size?"),
        (
            {"optimizer.momentum": 0.9},
            "optimizer.momentum.*; a new one needs .optimizer.momentum=…",
        ),
        (
            {"+trainer.profilr": "simple"},
            "unknown key trainer.profilr; did you mean trainer.profiler?",
        ),
        ({"+trainer.logger": True}, "unknown key trainer.logger"),
        ({"+trainer.fast_dev_run": True}, "unknown key trainer.fast_dev_run"),
        ({"+trainer.barebones": True}, "unknown key trainer.barebones"),
        ({"+trainer.enable_checkpointing": False}, "unknown key trainer.enable_checkpointing"),
        ({"rollout.groups": 0}, "rollout.groups=0: expected a whole number, at least 1"),
        ({"seed": object()}, "seed: got a value of type object; give a number, "),
        ({"algorithm": 3}, "algorithm"),
        (
            {"env": "my_shop.py"},
            "^env=my_shop.py: no such option; .*your own class is env=my_module.MyClass",
        ),
        (
            {"model": "Qwen/Qwen3-0.6B"},
            "^model=Qwen/Qwen3-0.6B: no such option; .* is model=pretrained model.build.path=…",
        ),
        ({"epochs": 3}, "unknown key epochs; did you mean update.epochs or trainer.max_epochs"),
        (
            {"env": "frozenlake", "warm_start/demonstrator": "random"},
            "takes none; '~warm_start.demonstrator.noise' '~warm_start.demonstrator.base' remove what",
        ),
        ({"lr": 3}, "unknown key lr; did you mean optimizer.lr"),
    ],
)
def test_wrong_values_are_refused_in_a_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        composed("fit", settings)
    assert "\n" not in str(raised.value)
