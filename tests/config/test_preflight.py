"""What is wrong with a run and can be known early is told early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from ragen_pl.config import ConfigError
from ragen_pl.run.checks import check_environment, preflight

LAKE = "envs:ragen/FrozenLake-v0"


def config(root: Path, **changes: object) -> DictConfig:
    return OmegaConf.create(
        {
            "env": {"name": "lake", "target": LAKE, "kwargs": {"size": 4}},
            "paths": {"root": str(root), "run_dir": None},
            "ckpt_path": None,
            "logger": {"_target_": "ragen_pl.run.loggers.RunLogger"},
            **changes,
        }
    )


def env(target: str, **kwargs: object) -> DictConfig:
    return OmegaConf.create({"target": target, "kwargs": kwargs})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (env(LAKE, size=1), "size: found 1, expected a whole number"),
        (env(LAKE, sise=4), "unexpected keyword argument 'sise'"),
        (env("envs:ragen/FrozenLak-v0"), "env.target=envs:ragen/FrozenLak-v0: .*FrozenLake"),
        (env("no_such_package.Env"), "env.target=no_such_package.Env: .*no_such_package"),
        (env("envs.frozen_lake.FrozenPond"), "FrozenPond"),
        (env("FrozenPond"), "there is no environment 'FrozenPond'"),
    ],
)
def test_an_environment_that_cannot_be_made_is_told(settings: DictConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_environment(settings)


def test_ids_and_class_paths_make_environments() -> None:
    check_environment(env(LAKE, size=5))
    check_environment(env("envs.frozen_lake.FrozenLake", size=5))


def test_nothing_to_resume_from_is_told(tmp_path: Path) -> None:
    preflight(config(tmp_path))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="ckpt_path=last: there is no run in"):
        preflight(config(tmp_path, ckpt_path="last"))


def test_an_unreachable_server_is_told_where_it_is_to_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="cannot be reached"):
        preflight(config(tmp_path))
    preflight(config(tmp_path, logger=None))


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, ragen_pl.run.checks as p\n"
        "from omegaconf import OmegaConf\n"
        f"p.check_environment(OmegaConf.create({{'target': {LAKE!r}, 'kwargs': {{}}}}))\n"
        "print(sorted({'torch', 'lightning', 'transformers', 'mlflow'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("target", "prompt_format", "told"),
    [
        (LAKE, "free_think", "set env.prompt_format=grounding or grounding_worldmodeling"),
        (
            LAKE,
            "worldmodeling",
            "algorithm.rewards.world_model.grounding_weight=0.5: .* has no such block",
        ),
        ("envs:ragen/Bandit-v0", "grounding", "Bandit has no relations()"),
        (LAKE, "grounding", None),
    ],
)
def test_a_reward_for_statements_needs_statements_and_a_truth(
    target, prompt_format, told, tmp_path
):
    environment = {"name": "w", "target": target, "kwargs": {}, "prompt_format": prompt_format}
    settings = config(tmp_path, env=environment, logger=None)
    settings.algorithm = {"rewards": {"world_model": {"grounding_weight": 0.5}}}
    if told is None:
        preflight(settings)
    else:
        with pytest.raises(ConfigError, match=told):
            preflight(settings)


@pytest.mark.parametrize(
    ("callbacks", "told"),
    [
        ({"collapse": {"alarms": {}}}, "callbacks.diagnostics=null: callbacks.collapse reads it"),
        (
            {"collapse": {"alarms": {"a": {"reading": "x"}}}, "diagnostics": {"first": 5}},
            "alarms.a: expected one",
        ),
        ({"collapse": None}, None),
        (
            {"collapse": {"alarms": {"a": {"below": 1}, "b": None}}, "diagnostics": {"first": 5}},
            None,
        ),
    ],
)
def test_a_collapse_monitor_needs_readings_and_limits(callbacks, told, tmp_path):
    settings = config(tmp_path, callbacks=callbacks, logger=None)
    if told is None:
        preflight(settings)
    else:
        with pytest.raises(ConfigError, match=told):
            preflight(settings)
