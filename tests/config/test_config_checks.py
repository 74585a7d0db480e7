"""Every setting has a rule, and a value that makes no sense is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ragen_pl.config import ConfigError, check_config, check_packages, config_dir
from ragen_pl.config.check import leaves, problem_with
from ragen_pl.config.rules import Kind, Rule
from ragen_pl.config.schema import is_free_text, rule_for
from ragen_pl.evaluation.settings import settle

NONSENSE = "no such thing"


EVALUATION = ("validation_sets",)  # groups of evaluate.yaml, not of fit.yaml


def shipped_configs() -> list[tuple[str, str]]:
    """Each command with each option of each of its groups."""
    options = [("fit", ""), ("evaluate", ""), ("export", "")]
    for file in sorted(config_dir().glob("*/*.yaml")):
        group = file.parent.name
        command = "evaluate" if group in EVALUATION else "fit"
        option = f"{group}={file.stem}"
        # a model without images goes with an environment told in words
        more = " env=frozenlake" if option == "model=small_lm" else ""
        options.append((command, f"{option}{more}"))
    return options


@pytest.mark.parametrize(("command", "override"), shipped_configs(), ids=" ".join)
def test_every_shipped_setting_has_a_rule_or_is_free_text(command: str, override: str) -> None:
    overrides = override.split()
    if command != "fit":
        overrides = settle(get_args_parser().parse_args(overrides))
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose(command, overrides=overrides)
    cfg = OmegaConf.create(fill(OmegaConf.to_container(cfg, resolve=False)))
    settings = dict(leaves(cfg))
    bare = [key for key in settings if rule_for(key) is None and not is_free_text(key)]
    assert not [key for key in bare if settings[key] not in ({}, [])], (
        "add them to config/schema.py"
    )
    check_config(cfg)
    for key in settings:
        if key not in bare and not is_free_text(key) and accepts_text(key) is False:
            assert problem_with(key, NONSENSE), f"{key} takes nonsense"


def fill(node: object) -> object:
    """Give settings that the user must set a value."""
    if isinstance(node, dict):
        return {key: fill(value) for key, value in node.items()}
    return "given" if node == "???" else node


def accepts_text(key: str) -> bool:
    rule = rule_for(key)
    return rule is not None and rule.kind is Kind.TEXT and not (rule.choices or rule.contains)


def config(**settings: object) -> object:
    return OmegaConf.create(settings)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("seed", "abc", "seed=abc: expected a whole number"),
        ("seed", True, "seed=true: expected a whole number"),
        ("seed", -1, "at least 0"),
        ("trainer.max_epochs", 2.5, "whole number"),
        ("trainer.precision", "bf16-mixd", "did you mean bf16-mixed?"),
        ("optimizer.lr", float("nan"), "optimizer.lr=nan: expected a number, at least 0"),
        ("optimizer.betas.1", 1.0, "below 1"),
        ("optimizer.betas", 3, "expected a list; set optimizer.betas.0"),
        ("optimizer", 3, "expected a group of settings"),
        ("context.window", 0, "at least 1 or all"),
        ("context.window", None, "window=null: expected"),
        ("context.turn_template", "look", "{observation}"),
        ("debug", "yes", "debug=yes: expected true or false"),
        ("ckpt_path", "gone.ckpt", "ckpt_path=gone.ckpt: expected a path that exists"),
        ("env.name", 4, "expected text"),
        ("trainer.max_epoch", 4, "did you mean trainer.max_epochs?"),
        ("sead", 4, "unknown key sead; did you mean seed?"),
        ("callbacks.mine._target_", "not a path", "class path"),
    ],
)
def test_nonsense_is_told_with_key_value_and_mend(key: str, value: object, told: str) -> None:
    problem = problem_with(key, value)
    assert problem is not None
    assert told in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 7),
        ("optimizer.lr", 0),
        ("optimizer.momentum", 0.9),
        ("context.window", "all"),
        ("context.system_prompt", None),
        ("ckpt_path", "last"),
        ("ckpt_path", __file__),
        ("trainer.devices", "auto"),
        ("trainer.devices.1", 3),
        ("callbacks.mine.patience", 3),
        ("callbacks.trajectories", None),
        ("env.kwargs.of_my_own", "anything"),
    ],
)
def test_sense_is_let_through(key: str, value: object) -> None:
    assert problem_with(key, value) is None


def test_a_missing_value_and_a_dangling_reference_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model.build.path has no value; set model.build.path="):
        check_config(OmegaConf.create({"model": {"build": {"path": "???"}}}))
    with pytest.raises(ConfigError, match=r"seed: Interpolation key 'nowhere' not found"):
        check_config(OmegaConf.create({"seed": "${nowhere}"}))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"_target_": "ragen_pl.callbacks.progress.RolloutProgres"},
            "did you mean RolloutProgress?",
        ),
        ({"_target_": "ragen_pl.callbacks.progres.RolloutProgress"}, "there is no module"),
        ({"_target_": "ragen_pl.callbacks.progress"}, "expected a class, found a module"),
        ({"_target_": "no_such_package.Name"}, "there is no package 'no_such_package'"),
        (
            {"_target_": "ragen_pl.callbacks.trajectories.LogTrajectories", "cuont": 3},
            "unknown key callbacks.mine.cuont: LogTrajectories takes no cuont; did you mean count?",
        ),
    ],
)
def test_a_class_path_that_leads_nowhere_is_told(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(OmegaConf.create({"callbacks": {"mine": settings}}))
    assert told in str(error.value)
    assert str(error.value).startswith(("callbacks.mine._target_=", "unknown key"))


def test_class_paths_of_other_packages_take_what_they_like() -> None:
    mine = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/success"}
    check_config(OmegaConf.create({"callbacks": {"mine": mine}}))


def test_leaves_names_items_of_lists_and_keeps_empty_ones() -> None:
    cfg = OmegaConf.create({"a": {"b": [1, {"c": 2}], "d": {}}, "e": None})
    assert list(leaves(cfg)) == [("a.b.0", 1), ("a.b.1.c", 2), ("a.d", {}), ("e", None)]


@given(st.floats() | st.integers(), st.floats(-10, 10), st.floats(-10, 10))
def test_a_number_is_let_through_exactly_inside_its_bounds(
    value: float, low: float, high: float
) -> None:
    rule = Rule(kind=Kind.FLOAT, minimum=low, below=high)
    assert (rule.problem(value) is None) == (low <= value < high)


@given(st.none() | st.booleans() | st.text() | st.lists(st.integers()), st.sampled_from(list(Kind)))
def test_any_value_gets_a_verdict(value: object, kind: Kind) -> None:
    problem = Rule(kind=kind).problem(value)
    assert problem is None or problem.startswith("expected ")


def test_a_strangers_envs_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_packages()
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "envs", raising=False)
    with pytest.raises(ConfigError, match=r"another project's.*expected"):
        check_packages()
