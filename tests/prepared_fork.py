"""What each command reads first, for the forks of a process that has imported this module: the files of the
configuration and the sources of the classes in it.
"""

from __future__ import annotations

from hydra._internal.core_plugins.file_config_source import FileConfigSource

from ragen_pl.config.check import check_config
from ragen_pl.config.composition import compose_accepted
from tests import parsed_once

FileConfigSource.load_config = parsed_once.load
for environment in ("frozenlake", "frozenlake_visual"):
    check_config(compose_accepted("fit", [f"env={environment}"])[0])
