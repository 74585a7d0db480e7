"""Each key of the main job refuses a wrong value on the command line before anything is built."""

from __future__ import annotations

import sys

import pytest
from hydra import compose, initialize_config_dir

from ragen_pl.config import ConfigError, check_config, config_dir
from ragen_pl.config.check import leaves


def keys() -> list[str]:
    """Return the keys of `--cfg job`."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        settings = dict(leaves(compose("fit")))
    settable = [key for key, value in settings.items() if value != {}]
    # items of a list are set together
    return sorted({key.rpartition(".")[0] if key[-1].isdigit() else key for key in settable})


def accepts_text(key: str) -> bool:
    """Return whether a text is a valid value, and a list has to serve as the wrong one."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("fit", overrides=[f"{key}=nonsense"])
    try:
        check_config(cfg)
    except ConfigError:
        return False
    return True


@pytest.mark.slow
def test_wrong_value_for_any_key_ends_the_command(fit, monkeypatch):
    monkeypatch.setitem(sys.modules, "ragen_pl.run.train", None)  # what would build a model
    assert len(keys()) > 100
    for key in keys():
        value = "[nonsense]" if accepts_text(key) else "nonsense"
        line = fit(f"{key}={value}", quick=False).refused()
        assert key in line, (key, line)
