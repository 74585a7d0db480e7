"""Every key of the main job refuses nonsense at the command line, before anything is built."""

from __future__ import annotations

import sys

import pytest
from hydra import compose, initialize_config_dir

from ragen_pl.config import config_dir
from ragen_pl.config.check import leaves
from ragen_pl.config.rules import Kind
from ragen_pl.config.schema import is_free_text, rule_for


def refusing_keys() -> list[str]:
    """Every key of `--cfg job` that is not free text."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        settings = dict(leaves(compose("fit")))
    keys = [key for key, value in settings.items() if value != {} and not is_free_text(key)]
    # items of a list are set together
    return sorted({key.rpartition(".")[0] if key[-1].isdigit() else key for key in keys})


@pytest.mark.slow
def test_nonsense_for_any_key_ends_the_command(fit, monkeypatch):
    monkeypatch.setitem(sys.modules, "ragen_pl.run.train", None)  # what would build a model
    keys = refusing_keys()
    assert len(keys) > 100
    for key in keys:
        rule = rule_for(key)
        # any text will do for a path or a sentence, so that these are given a list
        text = rule is not None and rule.kind is Kind.TEXT and not rule.choices
        line = fit(f"{key}=[nonsense]" if text else f"{key}=nonsense", quick=False).refused()
        assert key in line, (key, line)
