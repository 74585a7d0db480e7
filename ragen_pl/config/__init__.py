"""Configuration of the command line: finding it, composing it and checking it.

No heavy package is imported here: a wrong value is refused before torch is loaded.
"""

from ragen_pl.config.check import check_config
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.main import hydra_main
from ragen_pl.config.paths import check_packages, config_dir

__all__ = ["ConfigError", "check_config", "check_packages", "config_dir", "hydra_main"]
