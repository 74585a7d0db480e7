"""The command line's side of the configuration: finding it, composing it, refusing what is wrong in it.

Only hydra and omegaconf are imported here, so that a wrong value is told before torch is loaded.
"""

from ragen_pl.config.check import check_config
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.main import hydra_main
from ragen_pl.config.paths import check_packages, config_dir

__all__ = ["ConfigError", "check_config", "check_packages", "config_dir", "hydra_main"]
