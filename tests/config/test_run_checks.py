"""Checks of a run before its model is built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from gymnasium import spaces
from omegaconf import DictConfig, OmegaConf
from support.runs.composing import composed

from ragen_pl.config import ConfigError, check_config, composition
from ragen_pl.environments.calls import make_environment
from ragen_pl.environments.check import check_environment
from ragen_pl.run.checks import check_run, check_space
from ragen_pl.run.train import kept_checkpoints

FROZEN_LAKE = "envs:ragen/FrozenLake-v0"


def config(root: Path, **changes: object) -> DictConfig:
    return OmegaConf.create(
        {
            "env": {"name": "lake", "target": FROZEN_LAKE, "kwargs": {"size": 4}},
            "paths": {"root": str(root), "run_dir": None},
            "ckpt_path": None,
            "logger": {"_target_": "ragen_pl.tracking.loggers.RunLogger"},
            **changes,
        }
    )


def env(target: str, **kwargs: object) -> DictConfig:
    return OmegaConf.create({"target": target, "kwargs": kwargs})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (env(FROZEN_LAKE, size=1), "size: found 1, expected a whole number"),
        (env(FROZEN_LAKE, sise=4), "unexpected keyword argument 'sise'"),
        (env("envs:ragen/FrozenLak-v0"), "env.target=envs:ragen/FrozenLak-v0: .*FrozenLake"),
        (env("no_such_package.Env"), "env.target=no_such_package.Env: .*no_such_package"),
        (env("envs.frozen_lake.FrozenPond"), "FrozenPond"),
        (env("FrozenPond"), "env.target=FrozenPond: "),
    ],
)
def test_environment_that_cannot_be_made_is_refused(settings: DictConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(settings)


def test_ids_and_class_paths_make_environments() -> None:
    make_environment(env(FROZEN_LAKE, size=5))
    make_environment(env("envs.frozen_lake.FrozenLake", size=5))


class Here(gymnasium.Env[str, int]):
    """Environment of the program that runs, as in the cell of a notebook."""

    action_names = ("Go",)
    action_space = spaces.Discrete(1)
    observation_space = spaces.Text(9)

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        return "go", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict]:
        return "gone", 1.0, True, False, {"success": True}


def test_an_environment_of_a_notebook_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Here", Here, raising=False)
    cfg = composed("env=custom", "env.target=__main__.Here")
    assert isinstance(check_environment(cfg), Here)
    cfg.env.process = True
    with pytest.raises(ConfigError, match=r"from a notebook .*; put it into a module, or set env"):
        check_environment(cfg)
    cfg.env.target = "__main__.There"
    with pytest.raises(ConfigError, match=r"env.target=__main__.There: "):
        check_environment(cfg)


def test_a_game_in_a_process_is_taken(tmp_path: Path) -> None:
    root = f"paths.root={tmp_path}"
    check_run(composed("env=kuhn_poker", "opponents=pool", "env.process=true", root))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=bandit", "env.memory_mb=100"], "^env.memory_mb=100: .* set env.process=true$"),
        (
            ["env=negotiation", "validation.baselines.fair.name=kind"],
            "^validation.baselines.fair: name: found 'kind', expected one of random, fair, greedy; ",
        ),
    ],
)
def test_settings_that_have_no_effect_or_no_player_are_refused(overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_environment(composed(*overrides))


def test_missing_run_to_resume_is_refused(tmp_path: Path) -> None:
    check_run(config(tmp_path))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="ckpt_path=last: there is no run in"):
        check_run(config(tmp_path, ckpt_path="last"))


def test_unreachable_server_is_refused_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="cannot be reached"):
        check_run(config(tmp_path))
    check_run(config(tmp_path, logger=None))


def test_a_disk_without_room_for_the_checkpoints_is_refused(tmp_path, monkeypatch) -> None:
    old = tmp_path / "checkpoints" / "last.ckpt"
    old.parent.mkdir()
    old.write_bytes(bytes(1000))
    disk = shutil.disk_usage(tmp_path)._replace(free=3000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    # with what the run's own one leaves
    check_space(tmp_path, checkpoint=1000, kept=3)
    with pytest.raises(
        ConfigError, match=r"0\.0 GB are left on its disk, and 4 checkpoints of 0\.0 GB"
    ):
        check_space(tmp_path, checkpoint=1000, kept=4)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"env": "bandit"}, 3),
        ({"env": "bandit", "callbacks.best": None, "callbacks.checkpoint.save_top_k": 0}, 1),
        ({"env": "bandit", "callbacks.collapse.actions": ["warn", "rollback"]}, 4),
        ({"env": "mixture", "env.environments": {"frozenlake": 2, "bandit": 1}}, 5),
    ],
    ids=["last, latest and best", "last", "and a good one", "and the best of each environment"],
)
def test_all_checkpoints_that_a_run_keeps_are_counted(settings, count) -> None:
    assert kept_checkpoints(composition.composed("fit", {"model": "small_lm"} | settings)) == count


def test_environment_check_imports_no_torch() -> None:
    code = (
        "import sys, ragen_pl.run.checks, ragen_pl.environments.calls as p\n"
        "from omegaconf import OmegaConf\n"
        f"p.make_environment(OmegaConf.create({{'target': {FROZEN_LAKE!r}, 'kwargs': {{}}}}))\n"
        "print(sorted({'torch', 'lightning', 'transformers', 'mlflow'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.strip() == "[]"


def fit_config(root: Path, *overrides: str) -> DictConfig:
    cfg = composed("env=frozenlake", "logger=none", *overrides, checked=False)
    cfg.paths.root = str(root)
    return cfg


OWN = "+callbacks.own._target_"
WEIGHT = "algorithm.rewards.world_model.grounding_weight=0.5"
ALARM = "callbacks.collapse.alarms.entropy"
AHEAD = "rollout.iterations_ahead=1"
SERVER = "rollout/engine=vllm_server rollout.engine.urls=[http://127.0.0.1:9]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (f"{WEIGHT}", "set env.prompt_format=grounding or grounding_worldmodeling"),
        (f"{WEIGHT} env.prompt_format=worldmodeling", "grounding_weight=0.5: .* has no such block"),
        (f"{WEIGHT} env.prompt_format=grounding env=bandit", "Bandit has no relations()"),
        (f"{WEIGHT} env.prompt_format=grounding", None),
        ("callbacks.diagnostics=null", "callbacks.diagnostics=null: callbacks.collapse reads it"),
        (f"{ALARM}.below=null", "expected one of below and above"),
        (f"{ALARM}.diagnostic=entropy_rato", "did you mean entropy_ratio?"),
        (f"{ALARM}=null", None),
        ("callbacks.collapse=null", None),
        ("callbacks.best.monitor=banana", "monitor=banana: expected a name that the run measures"),
        ("callbacks.best.monitor=val/sucess", "did you mean val/success?"),
        ("callbacks.best.monitor=val/return", None),
        *[
            (
                f"callbacks.checkpoint.filename={name}",
                f"filename={name}: is outside the run's folder",
            )
            for name in ("/root", "../other", "a/../../b")
        ],
        ("callbacks.checkpoint.filename=a/b", None),
        (
            f"{OWN}=lightning.pytorch.callbacks.StochasticWeightAveraging +callbacks.own.swa_lrs=0.1",
            "callbacks.own: StochasticWeightAveraging changes learning rates or minibatches",
        ),
        (
            f"{OWN}=lightning.pytorch.callbacks.GradientAccumulationScheduler "
            "+callbacks.own.scheduling={0:2}",
            "callbacks.own: GradientAccumulationScheduler changes learning rates or minibatches",
        ),
        (f"{OWN}=lightning.pytorch.callbacks.EMAWeightAveraging", None),
        (
            "curriculum.stages=[{},{min_detour:many}]",
            r"curriculum.stages.1.min_detour=many: min_detour: found 'many', expected a whole number",
        ),
        (
            "curriculum.stages=[{},{min_detour:2,min_detuor:2}]",
            r"curriculum.stages.1.min_detuor=2: .* expected only",
        ),
        (
            "curriculum.stages=[{min_distance:5,max_distance:3},{}]",
            r"curriculum.stages.0={'min_distance': 5, 'max_distance': 3}: max_distance",
        ),
        ("curriculum.stages=[{}]", r"stages: found \[{}\], expected two or more"),
        (
            "curriculum.stages=[{},{size:5}]",
            r"curriculum.stages.1.size=5: size: found 5, expected a whole number from 2 to 4",
        ),
        (
            "warm_start.stages=[{},{min_detuor:2}]",
            r"warm_start.stages.1.min_detuor=2: .* expected only",
        ),
        ("warm_start.stages=[{},{min_detour:2}]", None),
        ("experiment=frozenlake_sizes", None),
        ("env=sokoban experiment=sokoban_sizes", None),
        (f"{AHEAD} {SERVER}", None),
        (
            f"{AHEAD} {SERVER} rollout.top_p=0.9 rollout.min_p=0.1",
            f"{AHEAD} with rollout.top_p=0.9 rollout.min_p=0.1: .* does not tell which ids it kept, .*; set rollout",
        ),
        (
            AHEAD,
            f"{AHEAD}: TransformersEngine can't sample while the .*; set rollout/engine=vllm_s",
        ),
        (f"{AHEAD} {SERVER} algorithm.loss.mismatch=null", "mismatch=null: .*; set auto, or roll"),
        (
            f"{AHEAD} {SERVER} context.window=all context.leave_out.turns=0.5",
            f"{AHEAD}: the scores of context.leave_out .*; set context.leave_out.patches=0",
        ),
        (
            "env.prompt_format=native context.window=all context.leave_out.turns=0.5",
            "env.prompt_format=native: no part of its prompts is left out; set context.leave_out",
        ),
        ("rollout.iterations_ahead=2", "rollout.iterations_ahead=2: expected one of 0, 1"),
    ],
)
def test_components_are_checked_against_the_run(
    tmp_path, overrides: str, message: str | None
) -> None:
    cfg = fit_config(tmp_path, *overrides.split())
    if message is None:
        check_config(cfg)
        check_run(cfg)
    else:
        with pytest.raises(ConfigError, match=message):
            check_config(cfg)
            check_run(cfg)
