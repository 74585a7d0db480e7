"""`--help`: groups and keys that exist, short enough for a terminal."""

from __future__ import annotations

import re

import pytest
from composing import composed, resolved
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from ragen_pl.config import config_dir

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
