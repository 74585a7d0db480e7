"""Configurations as the commands compose them."""

from __future__ import annotations

from support.runs import parsed_once  # noqa: F401
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from ragen_pl.config import check_config, config_dir
from ragen_pl.evaluation.settings import resolve_settings


def composed(*overrides: str, command: str = "fit", checked: bool = True) -> DictConfig:
    """Return a command's configuration, with its keys and values checked or not."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose(command, overrides=list(overrides))
    if checked:
        check_config(cfg)
    return cfg


def resolved(*arguments: str) -> list[str]:
    """Return the overrides of a command line, those of the run that it names included."""
    return resolve_settings(get_args_parser().parse_args(list(arguments)))


def evaluation_config(*arguments: str, command: str = "evaluate") -> DictConfig:
    """Return the configuration of a command that reads a run's settings."""
    return composed(*resolved(*arguments), command=command)
