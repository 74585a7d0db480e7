"""A run that starts again with other settings says which, and keeps the config of each start."""

from __future__ import annotations

import logging

import pytest
import torch
from omegaconf import OmegaConf
from support.runs.composing import composed, evaluation_config

from ragen_pl.base.settings_files import newest_settings
from ragen_pl.checkpoints.folder import Run
from ragen_pl.config import ConfigError
from ragen_pl.config.own_files import is_own
from ragen_pl.config.start_settings import keep_settings
from ragen_pl.engines.errors import RolloutError
from ragen_pl.run.train import open_run
from ragen_pl.tracking.checkpoints import Checkpoint

BASE = ("env=frozenlake", "logger=none")


def start(folder, *overrides, resumed=True):
    return keep_settings(composed(*BASE, *overrides), folder, resumed=resumed)


def test_each_start_with_other_settings_has_a_config_and_a_line(tmp_path):
    first, nothing = start(tmp_path, resumed=False)
    assert (first.name, nothing) == ("config.yaml", None)
    text = first.read_text()
    # a resume itself is no difference
    assert start(tmp_path, "ckpt_path=last", f"paths.run_dir={tmp_path}") == (first, None)
    second, line = start(
        tmp_path, "ckpt_path=last", "seed=7", "rollout.temperature=0.7", "env.max_turns=3"
    )
    assert second.name == "config_2.yaml" and is_own(second) and OmegaConf.load(second).seed == 7
    assert line is not None and "\n" not in line and "config_2.yaml" in line
    for change in ("seed 0 -> 7", "rollout.temperature 1.0 -> 0.7", "env.max_turns "):
        assert change in line
    assert start(tmp_path, "seed=7", "rollout.temperature=0.7", "env.max_turns=3") == (second, None)
    third, line = start(tmp_path, "env=bandit")
    assert third.name == "config_3.yaml" and "env.name frozenlake -> bandit" in (line or "")
    assert first.read_text() == text
    assert newest_settings(tmp_path) == third


def test_commands_take_the_settings_of_the_start_that_wrote_the_weights(tmp_path):
    for number, env in enumerate(("bandit", "frozenlake", "arithmetic")):
        start(tmp_path, f"env={env}", resumed=number > 0)
    file = tmp_path / "checkpoints" / "a.ckpt"
    file.parent.mkdir()
    used = Checkpoint(file, tmp_path)
    layer = {"state_dict": {"weight": torch.ones(2)}, "loops": {"settings": "config_3.yaml"}}
    names = (
        ({}, "arithmetic"),
        ({"settings": "config.yaml"}, "bandit"),
        ({"settings": "config_2.yaml"}, "frozenlake"),
    )
    for named, env in names:
        torch.save(layer | named, file)
        assert used.settings()["env"]["name"] == env
        settings = evaluation_config(f"ckpt={file}")
        assert settings.env.name == env and settings.source.run == str(tmp_path)
    # a name is no path
    torch.save(layer | {"settings": "../config.yaml"}, file)
    assert used.settings_file.name == "config_3.yaml"
    (tmp_path / "config_2.yaml").unlink()
    torch.save(layer | {"settings": "config_2.yaml"}, file)
    with pytest.raises(ConfigError, match=r"config_2\.yaml, which are not there; copy the file"):
        evaluation_config(f"ckpt={file}")


def test_the_tenth_start_comes_after_the_ninth(tmp_path):
    for number in range(11):
        start(tmp_path, f"seed={number}", resumed=number > 0)
    assert newest_settings(tmp_path).name == "config_11.yaml"


def test_values_of_text_are_named_only(tmp_path):
    start(tmp_path, "context.system_prompt=before", resumed=False)
    _, line = start(tmp_path, "context.system_prompt=after")
    assert "context.system_prompt" in (line or "") and "after" not in (line or "")


BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    "text", ["- a list\n", "a: [", "\udcff", "a0: &a0 x\n" + BOMB, "a: " + "[" * 5000]
)
def test_a_config_that_can_not_be_read_is_no_traceback(text, tmp_path):
    file, _ = start(tmp_path, resumed=False)
    file.write_bytes(text.encode(errors="surrogateescape"))
    line = start(tmp_path, "seed=7")[1] or ""
    assert str(file) in line and "are not compared with" in line and "\n" not in line


def test_a_start_says_what_differs_and_names_its_config(tmp_path, caplog):
    run = Run(tmp_path)
    with open_run(composed(*BASE), run):
        pass
    damaged = tmp_path / "starts.jsonl"
    damaged.write_bytes(damaged.read_bytes() + b'\xff\xfe"\n5\n')
    with (
        caplog.at_level(logging.WARNING),
        open_run(composed(*BASE, "seed=7"), Run(tmp_path, resumed=True)),
    ):
        pass
    lines = [message for message in caplog.messages if "seed 0 -> 7" in message]
    assert len(lines) == 1
    assert sum("starts.jsonl: a line can't be read" in text for text in caplog.messages) == 2
    assert b'"settings": "config_2.yaml"' in damaged.read_bytes()


def test_a_refused_start_leaves_no_settings(tmp_path):
    """Weights of these settings keep them, and so does a start that has played."""

    def refused(error, *, saves=False):
        with (
            pytest.raises(ConfigError),
            open_run(composed(*BASE, "seed=7"), Run(tmp_path, resumed=True)),
        ):
            assert newest_settings(tmp_path).name == "config_2.yaml"
            if saves:
                torch.save({"settings": "config_2.yaml"}, tmp_path / "checkpoints" / "last.ckpt")
            raise error
        return newest_settings(tmp_path).name

    with open_run(composed(*BASE), Run(tmp_path)):
        pass
    failed = ConfigError("no server answers")
    failed.__cause__ = RolloutError("no server answers")
    assert refused(ConfigError("ckpt_path=x: holds another model")) == "config.yaml"
    assert refused(failed) == "config_2.yaml"
    (tmp_path / "config_2.yaml").unlink()
    assert refused(ConfigError("logger: refused"), saves=True) == "config_2.yaml"
