"""`python -m ragen_pl.sync run=FOLDER`: send a run's unsent records to MLflow.

A run does it itself. This is for one that has ended while its MLflow server was away.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from ragen_pl.config import hydra_main
from ragen_pl.config.errors import ConfigError


@hydra_main("sync")
def main(cfg: DictConfig) -> None:
    """Send it and print the result."""
    if not isinstance(cfg.run, str):
        raise ConfigError(f"run={cfg.run or 'null'}: expected a run's folder")
    from ragen_pl.tracking.unsent import send_unsent

    print(send_unsent(Path(cfg.run).expanduser().absolute(), trusted=cfg.trust))


if __name__ == "__main__":
    main()
