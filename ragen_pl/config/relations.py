"""Settings of different nodes that have to agree: the rules of classes. Constructors check the settings of one node.

A class has rules by a static method `config_problems`, see `ragen_pl.engines.protocol.EngineTraits` for its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig, OmegaConf

from ragen_pl.config.errors import config_errors
from ragen_pl.config.overrides import key_of
from ragen_pl.config.signatures import class_that_defines


def relation_problems(cfg: DictConfig, targets: Mapping[str, str]) -> Iterator[str]:
    """Yield one line for each group of settings that do not agree.

    Only the modules are imported in which a class, or the nearest of its bases, defines `config_problems`.

    Args:
        cfg: Config of a command.
        targets: Paths of the classes that may have rules, each with the key or file that names it.
    """
    for target, named_by in targets.items():
        place = class_that_defines("config_problems", target)
        if place is not None:
            with config_errors(f"{named_by}={target}"):
                rules: Any = get_class(place)
                yield from rules.config_problems(cfg, ranks=_known_ranks(cfg))


def unread_overrides(cfg: DictConfig, overrides: Sequence[str]) -> Iterator[str]:
    """Yield one line for each override of a key in a node that is off (`enabled: false`), and so is not read.

    Args:
        cfg: The composed configuration.
        overrides: As on the command line.
    """
    for line in overrides:
        name, _, key = key_of(line).partition(".")
        node = cfg.get(name)
        # a group has a name of its own
        if (
            not key
            or key == "enabled"
            or not isinstance(node, DictConfig)
            or node.get("enabled", True)
        ):
            continue
        yield f"{line.lstrip('+')}: is not read, since {name}.enabled=false; set it to true, or leave this out"


def _known_ranks(cfg: DictConfig) -> int | None:
    """Return the number of processes of the Trainer; None if it depends on the machine."""
    devices, nodes = (OmegaConf.select(cfg, f"trainer.{key}") for key in ("devices", "num_nodes"))
    count = 1 if devices is None else len(devices) if isinstance(devices, ListConfig) else devices
    if not isinstance(count, int) or count < 1:
        return None
    return count * nodes if isinstance(nodes, int) and devices is not None else count


def ranks_asked_for(cfg: DictConfig) -> int:
    """Return the number of processes of the Trainer; 1 if it depends on the machine."""
    return _known_ranks(cfg) or 1
