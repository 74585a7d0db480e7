"""`python -m ragen_pl.fit env=frozenlake_visual`: train an agent.

Heavy packages are imported after the configuration was checked.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.api import train_config
from ragen_pl.config import hydra_main
from ragen_pl.run.ranks import early_end_heard


@early_end_heard
@hydra_main("fit")
def main(cfg: DictConfig) -> float | None:
    """Run the job of the config and return the success on the validation set, the objective of sweeps."""
    return train_config(cfg).metrics.get("val/success")


if __name__ == "__main__":
    main()
