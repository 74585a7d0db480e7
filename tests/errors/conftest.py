"""Commands run in this process, so that torch is loaded once for all of them."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig
from support.runs.called_commands import Result, caller

from ragen_pl.evaluation import settings

HERE = Path(__file__).parent
QUICK = (
    "logger=none",
    "callbacks.progress=null",
    "callbacks.trajectories=null",
    "callbacks.plots=null",
    "trainer.max_epochs=1",
    "warm_start.steps=2",
    "warm_start.episodes=4",
    "rollout.groups=2",
    "validation.episodes=2",
    "validation.blank=false",
)
# with `env=frozenlake`: a model and episodes as small as a run can have
TINY = (
    "env=frozenlake",
    "env.max_turns=2",
    "rollout.max_response_tokens=24",
    "++model.build.text.hidden_size=32",
    "++model.build.text.intermediate_size=64",
    "++model.build.text.num_hidden_layers=1",
    "validation.baselines=null",
)
compose_shipped = settings._composed


@functools.cache
def shipped(overrides: tuple[str, ...]) -> DictConfig:
    """Return the settings of a run that starts anew."""
    return compose_shipped(list(overrides), args=get_args_parser().parse_args([]))


@pytest.fixture
def composed_once(monkeypatch):
    """Compose the shipped settings that commands lay those of a folder over once, which takes most of their time."""
    monkeypatch.setattr(settings, "_composed", lambda overrides, *, args: shipped(tuple(overrides)))


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Arguments of a run that is as short as can be."""
    return TINY


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return `python -m ragen_pl.NAME` as a function of its name and arguments."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """An empty folder for the run that the tests copy."""
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def run(fit, trained, tmp_path) -> Path:
    """The folder of a short run of the arguments TINY."""
    if not trained.exists():
        assert fit(*TINY, f"paths.run_dir={trained}").code == 0
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def fit(command):
    """Return `python -m ragen_pl.fit` as a function of its arguments."""

    def call(*arguments: str, quick: bool = True) -> Result:
        root = (
            []
            if any(argument.startswith("paths.") for argument in arguments)
            else ["paths.root=runs"]
        )
        without = "warm_start=none" in arguments
        small = [
            argument
            for argument in QUICK
            if quick and not (without and argument.startswith("warm_start."))
        ]
        return command("fit", *small, *root, *arguments)

    return call
