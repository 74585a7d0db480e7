"""Files of the configuration and signatures of its classes, read on import: forks of the process have them then."""

from __future__ import annotations

from hydra._internal.core_plugins.file_config_source import FileConfigSource

from ragen_pl.config.check import check_config
from ragen_pl.config.composition import compose_accepted
from tests import parsed_once

FileConfigSource.load_config = parsed_once.load
for environment in ("frozenlake", "frozenlake_visual"):
    check_config(compose_accepted("fit", [f"env={environment}"])[0])
