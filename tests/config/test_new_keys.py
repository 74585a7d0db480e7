"""Keys of mappings that are the user's, mappings without keys, and keys that are not read."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.runs.composing import composed as composed_by_hydra

import ragen_pl
from ragen_pl.config import ConfigError, check_config
from ragen_pl.config.check import takes_any_key
from ragen_pl.config.composition import compose_accepted, composed
from ragen_pl.config.main import _accepted

PROGRAM = ("env=program", "env.command=[a]")


def test_mappings_of_the_users_own_keys_take_any_key() -> None:
    given = ["env.kwargs.variables={SHOP: north, SHOPS: '2'}", "env.kwargs.models.judge.url=x"]
    cfg, replaced = compose_accepted("fit", [*PROGRAM, *given])
    check_config(cfg)
    assert cfg.env.kwargs.variables == {"SHOP": "north", "SHOPS": "2"}
    assert cfg.env.kwargs.models == {"judge": {"url": "x"}}
    # Hydra itself composes the command line with these
    again = composed_by_hydra(*PROGRAM, *(replaced[line] for line in given))
    assert again.env.kwargs == cfg.env.kwargs


def test_python_values_may_have_new_keys_too() -> None:
    settings: dict[str, Any] = {
        "env": "program", "env.command": ["a"], "env.kwargs": {"variables": {"SHOP": "north"}},
    }  # fmt: skip
    assert composed("fit", settings).env.kwargs.variables == {"SHOP": "north"}


def test_a_new_key_in_a_sweep_has_all_its_values() -> None:
    line = "env.kwargs.variables.SHOP=north,south"
    replaced = {"env.kwargs.variables.SHOP=north": "++env.kwargs.variables.SHOP=north"}
    assert _accepted(["seed=1", line], replaced) == ["seed=1", f"++{line}"]


def test_which_mappings_have_keys_of_the_user() -> None:
    """Every mapping in an annotation, but those that classes and settings describe."""
    cfg = composed_by_hydra(*PROGRAM, checked=False)
    for key in ("env.kwargs.variables.A", "env.kwargs.models.judge", "env.kwargs.models.judge.url"):
        assert takes_any_key(cfg, key)
    for key in (
        "env.colour", "env.kwargs.colour", "rollout.grups", "callbacks.mine", "validation.baselines.mine",
        "rollout.failures.more", "optimizer.fused", "trainer.devicez", "warm_start.demonstrator.x", "lern",
    ):  # fmt: skip
        assert not takes_any_key(cfg, key), key


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("env.kwargs.variables.PORT=80", r"env\.kwargs\.variables\.PORT=80: expected text"),
        ("env.kwargs.varables.A=b", "unknown key env.kwargs.varables; did you mean"),
        ("model.build.text.hidden_sise=3", "did you mean model.build.text.hidden_size"),
        ("trainer={}", r"trainer=\{\}: an empty mapping changes nothing"),
        ("rollout={}", r"rollout=\{\}: an empty mapping changes nothing"),
        ("trainer=[]", r"^trainer=\[\]: trainer is one of default, "),
        ("+model=[ ]", r"^\+model=\[ \]: model is one of "),
        ("rollout/engine=[]", r"^rollout/engine=\[\]: rollout/engine is one of "),
    ],
)
def test_wrong_keys_are_still_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(compose_accepted("fit", [*PROGRAM, line])[0])


def test_an_empty_mapping_removes_what_is_there() -> None:
    cfg, replaced = compose_accepted("fit", ["env=frozenlake", "validation.baselines={}"])
    assert cfg.validation.baselines is None
    assert replaced == {"validation.baselines={}": "validation.baselines=null"}


@pytest.mark.parametrize("env", ["program", "frozenlake"])
def test_a_warm_start_of_the_command_line_is_enabled(env: str) -> None:
    for chosen in ("warm_start=demonstrations", "warm_start.enabled=true"):
        cfg = composed_by_hydra(f"env={env}", chosen, "warm_start.weights=x", checked=False)
        assert cfg.warm_start.enabled and cfg.warm_start.weights == "x"
        assert cfg.warm_start.demonstrator._target_ and cfg.warm_start.optimizer.lr > 0
    for off in ("warm_start=none", "warm_start.enabled=false"):
        assert not composed_by_hydra(f"env={env}", off).warm_start.enabled
    assert composed_by_hydra(f"env={env}", checked=False).warm_start.enabled == (env != "program")


def test_weights_that_are_not_read_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    for off in ("warm_start=none", "warm_start.enabled=false"):
        cfg = composed_by_hydra("env=bandit", off, "warm_start.weights=x.pt", checked=False)
        with pytest.raises(ConfigError, match=r"warm_start\.weights=x\.pt: is not read.*=true"):
            check_config(cfg)


def test_other_keys_that_are_not_read_have_a_line(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"env": "bandit", "warm_start": "none", "warm_start.steps": 3}
    with caplog.at_level(logging.WARNING):
        ragen_pl.config.composition.composed("fit", settings)
        assert "warm_start.steps=3: is not read, since warm_start.enabled=false" in caplog.text
        caplog.clear()
        ragen_pl.config.composition.composed("fit", settings | {"warm_start": "demonstrations"})
    assert not caplog.text
