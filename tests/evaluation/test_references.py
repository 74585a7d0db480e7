"""What a setting of an environment refers to is followed by every command that takes over a run's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from support.runs.composing import composed, evaluation_config

from ragen_pl.config import ConfigError, config_dir
from ragen_pl.config.references import references_in, references_of_environment
from ragen_pl.evaluation.validation_sets import validation_settings

NAMES = sorted(file.stem for file in (config_dir() / "env").glob("*.yaml"))
COMMANDS = ("evaluate", "play", "serve", "export")
# an environment of the user's own, whose arguments follow the turn limit and each other
OWN = """# @package _global_
defaults:
  - frozenlake

env:
  name: own
  kwargs:
    size: ${env.max_turns}
    min_distance: ${.size}
  max_turns: 5
"""
# values that differ from those of all files
OTHER = {
    "command": ["python", "other.py"],
    "function": "other_module.play",
    "tasks": "other.jsonl",
    "validation_tasks": "held_out.jsonl",
    "verifier": ["python", "check.py"],
    "max_turns": 9,
}


def references(cfg: DictConfig) -> dict[str, str]:
    """Return which key of `env` each of its other settings refers to."""
    found = references_in(cfg, "env")
    names = {place: text.removeprefix("${env.").removesuffix("}") for place, text in found.items()}
    return {".".join(map(str, place)): names[place] for place in found if names[place] in OTHER}


def saved_run(folder: Path, cfg: DictConfig) -> Path:
    """Write the files of a run without weights."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    return folder


def exported_folder(folder: Path, cfg: DictConfig) -> Path:
    """Write an exported model's settings without weights."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    env = OmegaConf.to_container(cfg.env, resolve=True)
    settings: dict[str, Any] = {"settings": {"env": env, "model": {"build": {}}}}
    (folder / "ragen_pl.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))
    return folder


def given(names: set[str], prefix: str = "env") -> list[str]:
    return [f"{prefix}.{name}={str(OTHER[name]).replace(chr(39), '')}" for name in sorted(names)]


def value(cfg: DictConfig, key: str) -> Any:
    found = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found


def with_references() -> list[str]:
    texts = {name: (config_dir() / "env" / f"{name}.yaml").read_text() for name in NAMES}
    return [name for name in NAMES if "${" in texts[name]]


@pytest.mark.parametrize("name", [*with_references(), "own"])
def test_overrides_arrive_at_every_setting_that_refers_to_them(name: str, tmp_path: Path) -> None:
    (tmp_path / "conf" / "env").mkdir(parents=True)
    (tmp_path / "conf" / "env" / "own.yaml").write_text(OWN)
    search = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    cfg = composed(search, f"env={name}", checked=False)
    refers = references(cfg)
    assert refers
    run, folder = saved_run(tmp_path / "run", cfg), exported_folder(tmp_path / "model", cfg)
    sources = [("evaluate", f"env={name}"), ("evaluate", f"ckpt={folder}")]
    commands = COMMANDS if name == "program" else ("evaluate",)
    for command, source in [*sources, *((command, f"ckpt={run}") for command in commands)]:
        # a foreign folder must not name programs, functions and packages
        arguments = [search, source, *given(set(refers.values())), "trust=true"]
        settings = evaluation_config(*arguments, command=command)
        for key, named in refers.items():
            assert value(settings, key) == OTHER[named], (command, source, key)


def test_the_files_with_references_are_known() -> None:
    assert with_references() == ["negotiation", "program"]
    assert set(references(composed("env=program", checked=False)).values()) == set(OTHER)


def test_references_of_a_base_are_found(tmp_path: Path) -> None:
    """Also where neither the file nor the one that it names has any."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "middle.yaml").write_text("defaults: [program]\n")
    (tmp_path / "env" / "mine.yaml").write_text("defaults: [middle]\nenv: {target: mine.Env}\n")
    program = composed("env=program", checked=False).env.target
    found = references_of_environment("mine.Env", [tmp_path])
    assert found and found == references_of_environment(program, [])


def test_what_a_run_set_itself_does_not_follow(tmp_path: Path) -> None:
    """`env.kwargs.max_calls` was given another value than `env.max_turns` has."""
    cfg = composed("env=program", "env.command=[a]", "env.kwargs.max_calls=3", checked=False)
    run = saved_run(tmp_path / "run", cfg)
    settings = evaluation_config(f"ckpt={run}", "env.max_turns=9", "trust=true")
    assert (settings.env.max_turns, settings.env.kwargs.max_calls) == (9, 3)
    assert settings.env.kwargs.command == ["a"]


def test_validation_sets_change_what_other_settings_refer_to() -> None:
    changes = given(set(OTHER), "validation_sets.short")
    cfg = evaluation_config("env=program", "env.command=[a]", *changes)
    held_out, short = validation_settings(cfg)
    assert held_out.env["kwargs"]["command"] == ["a"]
    assert held_out.env["kwargs"]["max_calls"] == 50
    expected = {"max_calls": OTHER["max_turns"]} | {n: OTHER[n] for n in OTHER if n != "max_turns"}
    assert expected.items() <= short.env["kwargs"].items()


def test_sizes_of_a_named_model_follow_the_command_line() -> None:
    """They are references too: `path: Qwen/Qwen3-${model.size}`."""
    cfg = evaluation_config("env=bandit", "model=qwen3", "model.size=4B")
    assert cfg.model.build.path == "Qwen/Qwen3-4B"


def test_a_file_of_tasks_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    from ragen_pl.evaluation.checks import check_evaluation

    program = composed("env=program", "env.command=[python, -V]", checked=False)
    run = saved_run(tmp_path / "run", program)
    for source in (f"ckpt={run}", "model=small_lm"):
        more = [] if source.startswith("ckpt") else ["env=program", "env.command=[python, -V]"]
        cfg = evaluation_config(source, *more, "env.tasks=missing.jsonl", "trust=true")
        with pytest.raises(ConfigError, match=r"env\.tasks=missing\.jsonl: no such file") as caught:
            check_evaluation(cfg)
        assert "install" not in str(caught.value)
