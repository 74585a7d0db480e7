"""Checks of the configuration: wrong values, unknown keys and class paths are refused in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Interval
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from support.runs.composing import composed, resolved

from ragen_pl.base.constraints import Count, Fraction, Positive, problem, validated
from ragen_pl.config import ConfigError, check_config, check_packages, config_dir
from ragen_pl.config.check import fields_of_target
from ragen_pl.config.nodes import leaves

EVALUATION = ("endpoint", "validation_sets")  # groups of evaluate.yaml, not of fit.yaml


# groups of fit.yaml whose options are composed together, one of each group
TOGETHER = ("env", "algorithm", "learning_rate", "logger", "model", "trainer", "warm_start")


@pytest.mark.parametrize("environment", ["knowledge_base_compaction", "program"])
@pytest.mark.parametrize("algorithm", ["dapo", "dppo", "starpo_s"])
def test_an_environment_sets_the_aggregation_of_a_penalty_that_an_algorithm_lacks(
    algorithm: str, environment: str
) -> None:
    command = (
        [] if environment == "knowledge_base_compaction" else ["env.command=[python, play.py]"]
    )
    cfg = composed(f"env={environment}", f"algorithm={algorithm}", *command)
    loss = instantiate(cfg.algorithm.loss, _convert_="all")
    assert cfg.algorithm.loss.kl.aggregation == "token-mean" and loss.kl is None


def shipped_configs() -> list[tuple[str, str]]:
    """Each command, and each option of each group."""
    configs = [("fit", ""), ("evaluate", ""), ("export", "")]
    together: dict[str, list[str]] = {group: [] for group in TOGETHER}
    for file in sorted(config_dir().glob("*/*.yaml")):
        group = file.parent.name
        option = f"{group}={file.stem}"
        if option.startswith("model=small_lm"):
            # a model without images needs an environment of text
            configs.append(("fit", f"{option} env=frozenlake"))
        elif option == "env=openenv":
            together[group].append(f"{option} env.kwargs.urls=[http://127.0.0.1:8000]")
        elif option == "env=mixture":
            pass  # its environments are composed first, see test_mixtures.py
        elif group in TOGETHER:
            together[group].append(option)
        elif group == "validation_sets" and file.stem != "held_out":
            environment = {"two_player": "tic_tac_toe"}.get(file.stem, file.stem)
            configs.append(("evaluate", f"{option} env={environment}"))
        else:
            configs.append(("evaluate" if group in EVALUATION else "fit", option))
    rows = zip_longest(*together.values(), fillvalue="")
    return configs + [("fit", " ".join(filter(None, row))) for row in rows]


@pytest.mark.parametrize(("command", "override"), shipped_configs(), ids=" ".join)
def test_shipped_configuration_passes(command: str, override: str) -> None:
    overrides = override.split()
    if command != "fit":
        overrides = resolved(*overrides)
    cfg = composed(*overrides, command=command, checked=False)
    check_config(OmegaConf.create(fill(OmegaConf.to_container(cfg, resolve=False))))


def fill(node: object) -> object:
    """Return a configuration with a text for each setting that has no default."""
    if isinstance(node, dict):
        return {key: fill(value) for key, value in node.items()}
    return "given" if node == "???" else node


def config(key: str, value: object) -> DictConfig:
    """Return a configuration of one setting."""
    cfg = OmegaConf.create()
    OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", "abc", "seed=abc: expected a whole number"),
        ("seed", True, "seed=true: expected a whole number"),
        ("seed", -1, "at least 0"),
        ("trainer.max_epochs", 2.5, "whole number"),
        ("trainer.precision", "bf16-mixd", "did you mean bf16-mixed?"),
        ("optimizer.lr", float("nan"), "optimizer.lr=nan: expected a number, at least 0"),
        ("optimizer.betas", [0.9, 1.0], "optimizer.betas.1=1.0: expected a number, at least 0 and below 1"),
        ("optimizer.betas", 3, "optimizer.betas=3: expected a list"),
        ("optimizer", 3, "optimizer=3: expected a group of settings; set optimizer.lr="),
        ("context.window", 0, "at least 1"),
        ("context.window", None, "window=null: expected"),
        ("context.turn_template", "look", "{observation}"),
        ("debug", "yes", "debug=yes: expected true or false"),
        ("ckpt_path", "gone.ckpt", "ckpt_path=gone.ckpt: expected a path that exists"),
        ("ckpt_path", "lst", "did you mean last?"),
        ("env.name", 4, "expected text"),
        ("trainer.max_epoch", 4, "did you mean trainer.max_epochs?"),
        ("sead", 4, "unknown key sead; did you mean seed?"),
        ("callbacks.mine._target_", "not a path", "class path"),
        ("callbacks.mine.patience", 3, "callbacks.mine={'patience': 3}: found a group without _target_"),
        ("env", {"target": "envs:ragen/Sokoban-v0", "kwargs": {"boxes": 0}}, "env.kwargs.boxes=0: expected"),
        ("env", {"target": "envs:ragen/Sokoban-v0", "kwargs": {"boxs": 1}}, "did you mean boxes?"),
        ("env", {"target": "envs:ragen/FrozenLake-v0", "kwargs": {"hole_share": 0.1}}, "did you mean hole_fraction?"),
        ("rollout.engine", {"_target_": "ragen_pl.engines.vllm.engine.VLLMEngine", "memory_share": 0.3},
         "did you mean memory_fraction?"),
        ("curriculum", {"_target_": "ragen_pl.data.curriculum.Curriculum", "share": 0.5},
         "it takes stages, above, fraction, window; '~curriculum.share' removes what a file sets"),
        ("model.build", {"_target_": "ragen_pl.models.build.build_small_lm", "text": {"hidden_size": 6,
         "num_attention_heads": 4}}, "model.build.text.num_attention_heads=4: expected a divisor of"),
    ],
)  # fmt: skip
def test_wrong_value_is_refused_with_key_value_and_remedy(
    key: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(config(key, value))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


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
        ("trainer.devices", [1, 3]),
        ("callbacks.trajectories", None),
        ("env.kwargs.of_my_own", "anything"),
    ],
)
def test_right_value_passes(key: str, value: object) -> None:
    check_config(config(key, value))


def test_missing_value_and_dangling_reference_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model.build.path has no value; set model.build.path="):
        check_config(OmegaConf.create({"model": {"build": {"path": "???"}}}))
    with pytest.raises(ConfigError, match=r"seed: Interpolation key 'nowhere' not found"):
        check_config(OmegaConf.create({"seed": "${nowhere}"}))


@pytest.mark.parametrize(
    ("settings", "message"),
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
def test_a_class_path_without_a_class_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(OmegaConf.create({"callbacks": {"mine": settings}}))
    assert message in str(error.value)
    assert str(error.value).startswith(("callbacks.mine._target_=", "unknown key"))


class Cautious:
    """Component with a rule on another node."""

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        yield f"seed={cfg.seed}: found {ranks} rank; set another"


def test_a_component_has_a_rule_on_another_node() -> None:
    mine = {"_target_": f"{__name__}.Cautious"}
    with pytest.raises(ConfigError, match=r"^seed=3: found 1 rank; set another$"):
        check_config(OmegaConf.create({"seed": 3, "callbacks": {"mine": mine}}))


def test_classes_of_other_packages_take_any_key() -> None:
    settings = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/success"}
    check_config(OmegaConf.create({"callbacks": {"mine": settings}}))


def test_leaves_names_items_of_lists_and_keeps_empty_ones() -> None:
    cfg = OmegaConf.create({"a": {"b": [1, {"c": 2}], "d": {}}, "e": None})
    assert list(leaves(cfg)) == [("a.b.0", 1), ("a.b.1.c", 2), ("a.d", {}), ("e", None)]


@given(st.floats() | st.integers(), st.floats(-10, 10), st.floats(-10, 10))
def test_number_passes_exactly_inside_its_bounds(value: float, low: float, high: float) -> None:
    annotation = Annotated[float, Interval(ge=low, lt=high)]
    assert (problem(annotation, value) is None) == (low <= value < high)


class Kind(StrEnum):
    """Two words."""

    ONE = "one"
    OTHER = "other"


def test_numbers_of_numpy_and_words_of_enumerations_are_taken() -> None:
    assert validated(Count, np.int64(3)) == 3 and validated(Fraction, np.float32(0.5)) == 0.5
    assert validated(Kind | None, "one") is Kind.ONE and validated(Kind, Kind.OTHER) is Kind.OTHER
    assert problem(Kind, "on") == "expected one of one, other; did you mean one?"
    assert problem(Literal[1, 2], True) == problem(Literal[1, 2], 1.0) == "expected one of 1, 2"
    assert problem(Literal[1, 2], 1) is problem(bool | Count, True) is problem(Positive, 3) is None


def test_the_command_line_imports_pydantic_for_checks_only() -> None:
    code = "import sys, ragen_pl.config; print(sorted({'pydantic', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@given(
    st.none() | st.booleans() | st.text() | st.lists(st.integers()),
    st.sampled_from([bool, int, str, Count, Fraction | None, Literal["a"] | Count, list[int]]),
)
def test_every_value_is_accepted_or_refused_with_an_expectation(
    value: object, annotation: Any
) -> None:
    message = problem(annotation, value)
    assert message is None or message.startswith("expected ")


@pytest.mark.parametrize("is_namespace", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["behind the checkout", "before it"])
def test_an_envs_package_of_the_user_is_theirs(
    tmp_path: Path, is_namespace: bool, first: bool
) -> None:
    """In a checkout, where both folders are on the path: `python -m` has the user's first, a script last."""
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "shop.py").write_text("class Shop:\n    size = 3\n")
    if not is_namespace:
        (tmp_path / "envs" / "__init__.py").touch()
    code = (
        f"import sys; sys.path.{'insert(0, ' if first else 'append('}{str(tmp_path)!r})\n"
        "import ragen_pl, envs.shop, ragen_pl.envs.frozen_lake\n"
        "from ragen_pl.config.check import fields_of_target\n"
        "print(envs.shop.Shop.size, fields_of_target('envs.shop.Shop').name,\n"
        "      fields_of_target('ragen_pl.envs.frozen_lake.FrozenLake').name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.stdout == "3 Shop FrozenLake\n", done.stderr


def test_a_former_class_path_is_read_and_imported_as_the_present_one() -> None:
    import envs.frozen_lake
    import ragen_pl.envs.frozen_lake

    assert envs.frozen_lake is ragen_pl.envs.frozen_lake
    for path in ("envs.frozen_lake.FrozenLake", "ragen_pl.envs.frozen_lake.FrozenLake"):
        assert "hole_fraction" in fields_of_target(path).parameters
    check_packages()
