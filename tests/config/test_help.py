"""`--help`: groups and keys that exist, short enough for a terminal."""

from __future__ import annotations

import re

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from support.runs.composing import composed, resolved

from ragen_pl.config import ConfigError, config_dir
from ragen_pl.config.nodes import leaves
from ragen_pl.evaluation.settings import resolve_evaluation
from ragen_pl.slurm import submit

COMMANDS = ("fit", "evaluate", "play", "export", "serve")


@pytest.mark.parametrize("command", COMMANDS)
def test_keys_of_the_help_exist(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConfigStore.instance(), "repo", dict(ConfigStore.instance().repo))
    resolved()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose(command, return_hydra_config=True)
        text = cfg.hydra.help.template
    pretrained = composed("model=pretrained", checked=False)
    assert f"python -m ragen_pl.{command} " in text and "$APP_CONFIG_GROUPS" in text
    assert "$CONFIG" not in text and len(text.splitlines()) < 35
    keys = re.findall(r"^([a-z_.]+)  +\S", text, re.MULTILINE)
    assert len(keys) >= 4
    for key in keys:
        parent, _, name = key.rpartition(".")
        nodes = [OmegaConf.select(one, parent) if parent else one for one in (cfg, pretrained)]
        # a key without a value is one too
        assert any(name in list(node) for node in nodes if node is not None), key


@pytest.mark.parametrize(
    "command", ["audit", "compare", "watch", "page", "sync", "replay", "import_gguf"]
)
def test_a_command_without_groups_shows_its_own_keys_only(command: str) -> None:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose(command, return_hydra_config=True)
        text = cfg.hydra.help.template
    assert f"python -m ragen_pl.{command} " in text
    assert "GROUP" not in text and "$" not in text and len(text.splitlines()) < 20
    keys = set(re.findall(r"^([a-z_.]+)  +\S", text, re.MULTILINE))
    shown = {key for key, _ in leaves(OmegaConf.to_container(cfg)) if not key.startswith("hydra.")}
    assert {"debug"} < keys <= shown
    assert {key.rpartition(".")[0] or key for key in shown - keys} <= {"paths", "trust", "title"}


def test_who_serves_an_environment_is_shown_no_groups_of_training() -> None:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("serve_environment", return_hydra_config=True)
        text = cfg.hydra.help.template
    assert "python -m ragen_pl.serve_environment env=NAME" in text and "$" not in text
    keys = set(re.findall(r"^([a-z_.]+)  +\S", text, re.MULTILINE))
    assert keys and all(OmegaConf.select(cfg, key) is not None for key in keys)


def test_the_help_of_submit_needs_no_slurm(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["submit", "--help"])
    monkeypatch.setenv("PATH", "")
    submit.main()
    text = capsys.readouterr().out
    assert "slurm.partition" in text and "slurm.time" in text and "dry_run" in text
    assert all(
        len(line.split("  ", 1)[-1].strip()) > 10 for line in text.splitlines() if "slurm." in line
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["logger=none"], ["mlflow=false"]),
        (["+logger=none"], ["mlflow=false"]),
        (["logger=mlflow"], []),
        ([], []),
    ],
)
def test_an_evaluation_takes_the_logger_of_a_run(given: list[str], expected: list[str]) -> None:
    args = get_args_parser().parse_args([*given, "env=frozenlake"])
    assert resolve_evaluation(args) == expected
    composed(*resolve_evaluation(args), command="evaluate")


def test_another_logger_of_an_evaluation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^logger=csv: .*set logger=none"):
        resolve_evaluation(get_args_parser().parse_args(["logger=csv", "env=frozenlake"]))
