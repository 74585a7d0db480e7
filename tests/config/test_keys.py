"""The page of keys, and the settings classes that describe nodes of the configuration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from support.runs.composing import composed

from ragen_pl.config import config_dir
from ragen_pl.config.keys import keys_of
from ragen_pl.data.settings import IterationSettings, UpdateSettings, WarmStartSettings
from ragen_pl.deployment.settings import ServeSettings
from ragen_pl.environments.serving import ServerSettings
from ragen_pl.evaluation.sampling import SamplingSettings
from ragen_pl.keys import main, page
from ragen_pl.modules.settings import CriticSettings, OptimizationSettings
from ragen_pl.rollout.settings import EpisodeSettings, FailureSettings
from ragen_pl.run.settings import LimitSettings, MemorySettings, PathSettings, ValidationSettings

ROOT = Path(__file__).parents[2]
NODES = [
    (EpisodeSettings, "rollout"),
    (FailureSettings, "rollout.failures"),
    (IterationSettings, "rollout"),
    (UpdateSettings, "update"),
    (WarmStartSettings, "warm_start"),
    (OptimizationSettings, ""),
    (CriticSettings, "critic"),
    (MemorySettings, "memory"),
    (PathSettings, "paths"),
    (LimitSettings, "trainer"),
    (ValidationSettings, "validation"),
]
COMMANDS = [
    (SamplingSettings, "evaluate"),
    (ServeSettings, "serve"),
    (ServerSettings, "serve_environment"),
]


@pytest.fixture(scope="module")
def settings() -> DictConfig:
    # the environment changes one key of rollout and warm_start
    return composed("env=frozenlake_visual", "warm_start.steps=400")


def test_the_page_of_keys_is_up_to_date() -> None:
    """Else write it again: python -m ragen_pl.keys > docs/keys.md."""
    assert (ROOT / "docs" / "keys.md").read_text(encoding="utf-8") == page()


def test_every_key_is_listed_with_its_meaning_and_values(settings: DictConfig) -> None:
    keys = {key.name: key for key in keys_of(settings)}
    assert len(keys) > 250
    assert [name for name, key in keys.items() if not key.meaning or not key.accepted] == []
    response = keys["rollout.max_response_tokens"]
    assert (response.meaning, response.value) == ("Longest response.", "24")
    assert response.accepted == "a whole number, at least 1"
    assert keys["critic.lr"].value == "${optimizer.lr}"


@pytest.mark.parametrize(("cls", "command"), COMMANDS, ids=[name for _, name in COMMANDS])
def test_a_command_and_its_settings_class_have_the_same_keys_and_defaults(
    cls: type[Any], command: str
) -> None:
    file = OmegaConf.load(config_dir() / f"{command}.yaml")
    defaults = OmegaConf.create({field.name: field.default for field in fields(cls)})
    assert defaults == {name: (file.get("server") or file)[name] for name in defaults}


@pytest.mark.parametrize(("cls", "node"), NODES, ids=[cls.__name__ for cls, _ in NODES])
def test_yaml_and_settings_class_have_the_same_keys_and_defaults(
    settings: DictConfig, cls: type[Any], node: str
) -> None:
    raw: Any = OmegaConf.to_container(
        OmegaConf.select(settings, node) if node else settings, resolve=False
    )
    defaults = {field.name: field.default for field in fields(cls)}
    shown = {name: raw[name] for name in defaults}  # a key that YAML lacks cannot be set
    # a key that refers to another one has that one's value
    fixed = {name for name, value in shown.items() if "${" not in str(value)}
    assert {name: shown[name] for name in fixed} == {name: defaults[name] for name in fixed}


def test_the_command_lists_another_configuration_without_torch() -> None:
    code = (
        "import sys; from ragen_pl.keys import main; main(['env=bandit', 'algorithm=grpo']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "| `env.kwargs.risky_probability` |" in done.stdout


def test_the_command_refuses_an_unknown_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["rollout.groops=3"])
    error = "ragen_pl: unknown key rollout.groops; did you mean rollout.groups?\n"
    assert capsys.readouterr().err == error
