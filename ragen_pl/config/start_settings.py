"""The config of each start of a run: `config.yaml` of the first, `config_2.yaml` of the next with other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.constraints import shown
from ragen_pl.base.settings_files import FIRST, newest_settings, number_of, settings_file
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import leaves
from ragen_pl.config.own_files import run_settings, write_settings

# keys of the start itself
_OF_THE_START = ("ckpt_path", "paths.run_dir", "paths.root")
# keys that are named first, with their values
_MOST = ("env.name", "env.target", "algorithm.name", "seed", "rollout.temperature")
_NAMED = 8
_UNSET = "unset"


def keep_settings(cfg: DictConfig, folder: Path, *, resumed: bool) -> tuple[Path, str | None]:
    """Write the config of a start into the run's folder, unless it is that of the start before.

    Args:
        cfg: Config of the start.
        folder: The run's folder.
        resumed: Whether the run has started before.

    Returns:
        The file that holds the config, and one line on what differs from the start before; None where nothing does.
    """
    first, text = folder / FIRST, OmegaConf.to_yaml(cfg, resolve=True)
    if not resumed or not first.exists():
        write_settings(first, text)
        return first, None
    before = newest_settings(folder)
    try:
        earlier = run_settings(before)
    except ConfigError as error:
        return (
            before,
            f"{error}; so the settings are not compared with those of the run's last start",
        )
    present = OmegaConf.to_container(cfg, resolve=True)
    changes = list(_changes(dict(leaves(earlier)), dict(leaves(present))))
    if not changes:
        return before, None
    file = folder / settings_file((number_of(before.name) or 1) + 1)
    write_settings(file, text)
    more = f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    named = ", ".join(changes[:_NAMED])
    return file, f"settings that differ from the run's last start: {named}{more} ({file})"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys((*_MOST, *now, *before)):
        values = [known.get(key, _UNSET) for known in (before, now)]
        if key in _OF_THE_START or values[0] == values[1]:
            continue
        if key not in _MOST and any(isinstance(value, str) and value != _UNSET for value in values):
            # texts may be long, or secret
            yield key
        else:
            yield f"{key} {' -> '.join(map(shown, values))}"
