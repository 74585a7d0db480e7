"""Each key of the main job refuses a wrong value before anything is built."""

from __future__ import annotations

import copy
import sys

import pytest
from omegaconf import DictConfig, OmegaConf
from support.runs.composing import composed

from ragen_pl.config import ConfigError, check_config
from ragen_pl.config.nodes import leaves


@pytest.fixture(scope="module")
def settings() -> DictConfig:
    return composed()


def keys(settings: DictConfig) -> list[str]:
    """Return the keys of `--cfg job`."""
    settable = [key for key, value in dict(leaves(settings)).items() if value != {}]
    # items of a list are set together
    return sorted({key.rpartition(".")[0] if key[-1].isdigit() else key for key in settable})


def refusal(settings: DictConfig, key: str, value: object) -> str | None:
    """Return the message for a value, None if it is accepted."""
    changed = copy.deepcopy(settings)
    OmegaConf.update(changed, key, value)
    try:
        check_config(changed)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_a_wrong_value_for_any_key_is_refused(settings, fit, monkeypatch):
    """Some keys are tried on the command line, those that only the environment can check among them."""
    monkeypatch.setitem(sys.modules, "ragen_pl.run.train", None)  # what would build a model
    assert len(keys(settings)) > 100
    for number, key in enumerate(keys(settings)):
        text = "nonsense"
        message = refusal(settings, key, text)
        if message is None:  # it takes any text
            text = "[nonsense]"
            message = refusal(settings, key, ["nonsense"])
        if message is None or number % 12 == 0:
            message = fit(f"{key}={text}", quick=False).refused()
        assert key in message and "\n" not in message, (key, message)
