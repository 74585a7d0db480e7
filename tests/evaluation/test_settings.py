"""Weights, settings and validation sets of a command line, and the errors of wrong ones."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf
from support.runs.composing import composed, evaluation_config, resolved

from ragen_pl.assembly.build import episode_settings
from ragen_pl.config import ConfigError
from ragen_pl.config.composition import compose_overrides
from ragen_pl.config.own_files import write_settings
from ragen_pl.config.settings import keys_of
from ragen_pl.config.settings import read_settings as read_node
from ragen_pl.evaluation.checks import check_evaluation, check_export
from ragen_pl.evaluation.sampling import SamplingSettings
from ragen_pl.evaluation.settings import resolve_settings
from ragen_pl.evaluation.validation_sets import validation_settings
from ragen_pl.replaying.step import read_settings
from ragen_pl.rollout.settings import EpisodeSettings
from ragen_pl.rollout.temperature import AdaptiveTemperature
from ragen_pl.tracking.checkpoints import find_checkpoint

RUN_ID = "12345678901234567890123456789012"  # of digits only: a number to Hydra


@functools.cache
def _trained() -> str:
    cfg = composed("env=frozenlake", "validation.episodes=20", "context.window=3")
    return OmegaConf.to_yaml(cfg, resolve=True)


def trained_settings() -> DictConfig:
    return OmegaConf.create(_trained())


def make_run(root: Path, name: str, time: str, *, best: bool = False, **env: object) -> Path:
    """Write the files of a run of `env=frozenlake` without weights."""
    cfg = trained_settings()
    OmegaConf.update(cfg, "env.name", name)
    for key, value in env.items():
        OmegaConf.update(cfg, f"env.kwargs.{key}", value)
    run = root / name / time
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    (run / "checkpoints" / "last.ckpt").touch()
    if best:
        (run / "checkpoints" / "best.ckpt").touch()
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs without weights, which the tests copy."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder, "frozenlake", "2026-01-01_10-00-00", best=True, size=5)
    make_run(folder, "frozenlake", "2026-01-02_10-00-00", size=6)
    late = make_run(folder, "mine", "2026-01-03_10-00-00")
    (late / "mlflow_run.json").write_text(
        json.dumps({"run_id": RUN_ID, "tracking_uri": "sqlite://"})
    )
    return folder


@pytest.fixture
def root(tmp_path: Path, runs: Path) -> Path:
    return Path(shutil.copytree(runs, tmp_path, dirs_exist_ok=True))


def test_ckpt_finds_its_run(root: Path) -> None:
    old, new = sorted((root / "frozenlake").iterdir())
    own = root / "mine" / "2026-01-03_10-00-00"
    for ckpt, name, run, file in (
        ("last", "frozenlake", new, "last.ckpt"),
        ("best", "frozenlake", old, "best.ckpt"),
        ("last", None, own, "last.ckpt"),
        (str(new), None, new, "last.ckpt"),
        (str(old / "checkpoints" / "best.ckpt"), None, old, "best.ckpt"),
        (RUN_ID, None, own, "last.ckpt"),
    ):
        checkpoint = find_checkpoint(ckpt, root=str(root), name=name)
        assert (checkpoint.run, checkpoint.path) == (run, run / "checkpoints" / file)
    assert find_checkpoint("last", root="nowhere", run_dir=str(old)).run == old


def test_best_is_the_last_checkpoint_where_no_validation_ended(root: Path, caplog) -> None:
    run = root / "frozenlake" / "2026-01-02_10-00-00"
    assert find_checkpoint("best", root=str(root), run_dir=str(run)).path.name == "last.ckpt"
    assert (
        f"{run} has no best.ckpt: no validation of it ended; its last.ckpt is used" in caplog.text
    )
    own = root / "mine" / "2026-01-03_10-00-00"
    found = find_checkpoint("best", root=str(root), name="mine")
    assert found.path == own / "checkpoints" / "last.ckpt"
    found.path.unlink()
    with pytest.raises(ConfigError, match=r"ckpt=best: no run in .*/mine has a best\.ckpt"):
        find_checkpoint("best", root=str(root), name="mine")
    with pytest.raises(ConfigError, match="has no best checkpoint; train it further"):
        find_checkpoint("best", root=str(root), run_dir=str(own))


@pytest.mark.parametrize("ckpt", ["last", "best"])
def test_a_damaged_checkpoint_is_passed_over(root: Path, ckpt: str, caplog) -> None:
    run = root / "frozenlake" / "2026-01-01_10-00-00"
    whole = run / "checkpoints" / "iteration_0010.ckpt"
    torch.save({"state_dict": {}}, whole)
    found = find_checkpoint(ckpt, root=str(root), run_dir=str(run))
    assert found.path == whole
    assert (
        f"{ckpt}.ckpt is damaged or no checkpoint; iteration_0010.ckpt, the newest" in caplog.text
    )


def test_exported_folder_has_its_run_and_works_without_it(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    run = root / "mine" / "2026-01-03_10-00-00"
    env = OmegaConf.to_container(OmegaConf.load(run / "config.yaml").env)
    exported = {
        "run_dir": str(run),
        "settings": {"env": env, "model": {"build": {"dtype": "bfloat16"}}},
    }
    text = OmegaConf.to_yaml(OmegaConf.create(exported))
    # somebody else's names no folder outside of it
    (folder / "ragen_pl.yaml").write_text(text)
    assert evaluation_config(f"ckpt={folder}").source.run is None
    write_settings(folder / "ragen_pl.yaml", text)
    cfg = evaluation_config(f"ckpt={folder}")
    assert cfg.source.run == str(run) and cfg.env.name == "mine"
    assert cfg.model.build == {
        "_target_": "ragen_pl.models.build.load_pretrained", "path": str(folder),
        "dtype": "bfloat16", "attn_implementation": "auto", "max_tokens": 2048, "trust_remote_code": False,
    }  # fmt: skip
    (run / "config.yaml").unlink()
    assert evaluation_config(f"ckpt={folder}").source.run is None
    (folder / "ragen_pl.yaml").unlink()
    assert evaluation_config(f"ckpt={folder}", "env=sokoban").env.name == "sokoban"
    with pytest.raises(ConfigError, match=r"env has no value, and the weights name no environment"):
        evaluation_config(f"ckpt={folder}")


def test_command_line_changes_the_settings_of_the_run(root: Path) -> None:
    last = ["ckpt=last", f"paths.root={root}"]
    cfg = evaluation_config(
        *last, "env=frozenlake", "validation.episodes=7", "rollout.max_response_tokens=9"
    )
    assert (cfg.env.kwargs.size, cfg.env.kwargs.slip_probability) == (4, 0.0)  # env= replaces it
    assert (cfg.context.window, cfg.validation.episodes, cfg.rollout.max_response_tokens) == (
        3,
        7,
        9,
    )
    new = root / "frozenlake" / "2026-01-02_10-00-00"
    path = f"ckpt={new}/checkpoints/last.ckpt"
    kept = evaluation_config(path, "env.kwargs.hole_fraction=0.3")
    assert (kept.env.kwargs.size, kept.env.kwargs.hole_fraction) == (6, 0.3)
    slippery = evaluation_config(path, "env=frozenlake_slippery", "env.kwargs.size=5")
    assert slippery.env.kwargs.slip_probability == 0.6667 and slippery.env.kwargs.size == 5
    assert slippery.model == kept.model and slippery.validation.episodes == 20
    assert evaluation_config(f"ckpt={RUN_ID}", f"paths.root={root}").ckpt == RUN_ID


def test_an_environment_of_a_mixture_needs_no_file_of_its_name(tmp_path: Path) -> None:
    small = "{file: frozenlake, kwargs: {size: 3}, validation: {episodes: 7}}"
    given = ["env=mixture", f"env.environments={{small: {small}, bandit: 1}}"]
    cfg = compose_overrides("fit", given)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    with pytest.raises(ConfigError, match="choose one, such as env=small"):
        evaluation_config(f"ckpt={tmp_path}")
    for ckpt in (f"ckpt={tmp_path}", "ckpt=last"):
        found = evaluation_config(ckpt, f"paths.run_dir={tmp_path}", "env=small")
        assert (found.env.name, found.env.kwargs.size, found.source.held_out) == ("small", 3, 7)
        assert "cycle" in found.validation.baselines


def test_an_option_of_scripted_policies_adds_those_of_no_other_environment(root: Path) -> None:
    """The run's own policies stay, as the file of an environment keeps them in training."""
    lake = root / "mine" / "2026-01-03_10-00-00"
    plain = root / "frozenlake" / "2026-01-02_10-00-00"
    cfg = OmegaConf.load(plain / "config.yaml")
    cfg.validation.baselines = {}
    (plain / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    for option, names in (
        ("none", set()),
        ("random", {"random", "garbage"}),
        ("optimal", {"random", "garbage", "optimal"}),
    ):
        for run, own in ((lake, {"cycle"}), (plain, set())):
            arguments = (f"ckpt={run}", f"validation/baselines={option}")
            assert set(evaluation_config(*arguments).validation.baselines) == names | own
    chosen = evaluation_config(f"ckpt={plain}", "env=frozenlake", "validation/baselines=none")
    assert set(chosen.validation.baselines) == {"cycle"}


def test_responses_are_sampled_as_in_training(root: Path) -> None:
    run = root / "frozenlake" / "2026-01-02_10-00-00"
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    cfg = OmegaConf.load(run / "config.yaml")
    cfg.rollout.update(sampling)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    cfg = evaluation_config(f"ckpt={run}", "rollout.top_p=1.0")
    assert sampling | {"top_p": 1.0} == {name: cfg.rollout[name] for name in sampling}


def test_no_key_of_episodes_is_dropped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is added to the settings of episodes reaches the proxy of an evaluation."""

    @dataclass(kw_only=True)
    class More(EpisodeSettings):
        added: int = 1

    monkeypatch.setattr("ragen_pl.evaluation.settings.EpisodeSettings", More)
    monkeypatch.setattr("ragen_pl.assembly.build.EpisodeSettings", More)
    given = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_response_tokens": 31, "num_envs": 7,
        "adaptive_temperature": {"_target_": "ragen_pl.rollout.temperature.AdaptiveTemperature", "low": 0.5},
        "added": 2,
    }  # fmt: skip
    assert given.keys() == set(keys_of(More))
    run = root / "frozenlake" / "2026-01-02_10-00-00"
    cfg = OmegaConf.load(run / "config.yaml")
    cfg.rollout.update(given)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    evaluated = composed(*resolved(f"ckpt={run}", "trust=true"), command="evaluate", checked=False)
    assert given == {name: evaluated.rollout[name] for name in given}
    settings = vars(episode_settings(evaluated.rollout))
    adaptive = AdaptiveTemperature(low=0.5)
    assert settings == given | {"adaptive_temperature": adaptive}


def test_code_of_a_models_repository_is_run_for_the_command_line_only(root: Path) -> None:
    """A run's folder may be another's."""
    run = root / "frozenlake" / "2026-01-02_10-00-00"
    cfg = OmegaConf.load(run / "config.yaml")
    cfg.model = {"build": {"_target_": "ragen_pl.models.build.load_pretrained", "path": "."}}
    cfg.model.build.trust_remote_code = True
    (run / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    arguments = (f"paths.root={root}", "env=frozenlake", "ckpt=last")
    with pytest.raises(
        ConfigError, match=r"config\.yaml: model\.build\.trust_remote_code=true runs"
    ):
        evaluation_config(*arguments)
    with pytest.raises(ConfigError, match=r"trust_remote_code=true runs .*; .*, set trust=true$"):
        read_settings(run / "config.yaml", trusted=False)
    # the path is the run's word too
    named = ("model.build.path=.", "model.build.trust_remote_code=true")
    for chosen in (named, ("trust=true",)):
        assert evaluation_config(*arguments, *chosen).model.build.trust_remote_code is True
    with pytest.raises(ConfigError, match=r"model\.build\.path=\.: by it .*load_pretrained may"):
        evaluation_config(*arguments, named[1])


def test_a_pretrained_models_positions_are_those_of_the_context(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    longer = "context.max_tokens=5000"
    for source in ("model=qwen2_5", f"ckpt={folder}"):
        cfg = evaluation_config(f"paths.root={root}", "env=frozenlake", source, longer)
        assert cfg.model.build.max_tokens == 5000
    # a policy keeps those that it was trained with
    assert (
        "max_tokens" not in evaluation_config(f"paths.root={root}", "ckpt=last", longer).model.build
    )


def test_validation_sets_change_the_environment_and_count_held_out_states(root: Path) -> None:
    run = root / "frozenlake" / "2026-01-02_10-00-00"
    cfg = evaluation_config(
        f"ckpt={run}",
        "validation_sets=frozenlake",
        "validation_sets.larger.kwargs.size=7",
        "validation_sets.far=null",
        "validation_sets.short.max_turns=3",
        "validation.episodes=30",
    )
    validation_sets = {settings.name: settings for settings in validation_settings(cfg)}
    assert "far" not in validation_sets
    assert validation_sets["larger"].env["kwargs"] == {
        **validation_sets["held_out"].env["kwargs"],
        "size": 7,
    }
    assert (
        validation_sets["short"].env["max_turns"],
        validation_sets["larger"].env["max_turns"],
    ) == (3, 14)
    aside = {name: settings.set_aside(cfg.source) for name, settings in validation_sets.items()}
    assert aside == dict.fromkeys(aside, 0) | {
        # The maps of the run are as large as those of `largest`.
        "held_out": 20, "short": 20, "largest": 20,
    }  # fmt: skip
    check_evaluation(cfg)


def test_a_held_out_fraction_holds_for_any_number_of_states_and_itself_alone(root: Path) -> None:
    run = root / "frozenlake" / "2026-01-02_10-00-00"

    def set_aside(*changes: str) -> int:
        cfg = evaluation_config(f"ckpt={run}", "validation.episodes=30", *changes)
        (settings,) = validation_settings(cfg)
        return settings.set_aside(cfg.source)

    assert set_aside() == 20
    # other states are played
    assert set_aside("env.held_out_fraction=0.2") == 0
    cfg = OmegaConf.load(run / "config.yaml")
    cfg.env.held_out_fraction = 0.2
    (run / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    assert set_aside() == 30
    assert set_aside("env.held_out_fraction=null") == 0


def test_sampling_depends_on_the_number_of_samples(root: Path) -> None:
    trained = resolved(f"ckpt={root}/frozenlake/2026-01-02_10-00-00")

    def sampling(*arguments: str) -> SamplingSettings:
        return read_node(SamplingSettings, composed(*trained, *arguments, command="evaluate"))

    assert (sampling().is_greedy, sampling().pass_ks) == (True, [])
    eight = sampling("samples=8")
    assert (eight.is_greedy, eight.pass_ks) == (False, [1, 2, 4, 8])
    assert sampling("samples=6", "pass_at=[4,1]").pass_ks == [1, 4]
    assert sampling("samples=6").pass_ks == [1, 2, 4]
    assert not sampling("greedy=false").is_greedy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "ckpt has no value; give a checkpoint"),
        (["ckpt=gone.ckpt"], "ckpt=gone.ckpt: there is no such file or folder; give a checkpoint"),
        (["ckpt=best", "env=sokoban"], "ckpt=best: no run in .*/sokoban has a best.ckpt"),
        (["ckpt=last", "paths.run_dir={root}"], "paths.run_dir=.*: expected a run's folder"),
        (["ckpt={root}/frozenlake"], "holds no model .config.json. and no run"),
        (["ckpt={root}/alone.ckpt"], "no run's config.yaml next to it; set paths.run_dir"),
        (["ckpt=" + "ab" * 16], "there is no MLflow store sqlite:.*set paths.root"),
        (["ckpt=last,best"], "ckpt=last,best: several values; evaluate one at a time"),
        (["ckpt={run}", "env=frozenlak"], "env=frozenlak: no such option; did you mean frozenlake"),
        (["ckpt={run}", "env.kwargs.size=1"], "env.kwargs.size=1: expected a whole number"),
        (["ckpt={run}", "env.kwargs.sise=5"], "unknown key env.kwargs.sise; did you mean"),
        (
            ["ckpt={run}", "+env.kwargs.sise=5"],
            "unknown key env.kwargs.sise: FrozenLake takes no sise; did you mean size?",
        ),
        (["ckpt={run}", "validation_sets=frozenlak"], "validation_sets=frozenlak: no such option"),
        (
            ["ckpt={run}", "validation_sets.big.kwargs.size=99"],
            "validation_sets.big.kwargs.size=99: expected a whole number, at least 2 and at most 16",
        ),
        (
            ["ckpt={run}", "validation_sets.big.kwargs.size=x"],
            "validation_sets.big.kwargs.size=x: expected a whole",
        ),
        (["ckpt={run}", "validation_sets.held_out=null"], "validation_sets is empty"),
        (["ckpt={run}", "samples=0"], "samples=0: expected a whole number, at least 1"),
        (["ckpt={run}", "samples=4", "greedy=true"], "greedy responses are all alike"),
        (["ckpt={run}", "samples=4", "pass_at=[1,8]"], "pass_at has 8 and samples=4"),
        (["ckpt={run}", "pass_at=3"], "pass_at=3: expected"),
        (["ckpt={run}", "device=tpu"], "device=tpu: expected one of"),
        (["ckpt={run}", "to=/proc/nowhere"], "to=/proc/nowhere: .*give a folder"),
    ],
)
def test_wrong_arguments_are_rejected_in_one_line(
    root: Path, arguments: list[str], message: str
) -> None:
    run = root / "frozenlake" / "2026-01-02_10-00-00"
    (root / "alone.ckpt").touch()
    filled = [argument.format(run=run, root=root) for argument in arguments]
    if not any(argument.startswith("paths.root") for argument in filled):
        filled.append(f"paths.root={root}")
    with pytest.raises(Exception, match=message) as caught:
        check_evaluation(checked(*filled))
    assert isinstance(caught.value, ConfigError)
    assert "\n" not in str(caught.value)


def checked(*arguments: str) -> DictConfig:
    """Compose as the command line does, with Hydra's errors as one line."""
    from ragen_pl.config.main import precheck

    args = get_args_parser().parse_args(list(arguments))
    args.overrides = resolve_settings(args)
    precheck(args, config_name="evaluate")
    return composed(*args.overrides, command="evaluate", checked=False)


def test_export_needs_an_empty_folder(root: Path, tmp_path: Path) -> None:
    run = f"ckpt={root}/frozenlake/2026-01-02_10-00-00"
    with pytest.raises(ConfigError, match="to has no value; set to=FOLDER"):
        check_export(evaluation_config(run, command="export"))
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").touch()
    with pytest.raises(ConfigError, match="the folder is not empty"):
        check_export(evaluation_config(run, f"to={full}", command="export"))
    check_export(evaluation_config(run, f"to={full}", "overwrite=true", command="export"))


def test_command_rejects_wrong_arguments_before_importing_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ragen_pl.evaluate", "ckpt=nothing"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2 and len(lines) == 1
    assert lines[0].startswith("ragen_pl: ckpt=nothing: there is no such file")
    assert not [line for line in done.stderr.splitlines() if line.endswith(" torch")]
