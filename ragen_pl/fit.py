"""`python -m ragen_pl.fit env=frozenlake_visual`: train an agent.

Heavy packages are imported after the configuration was checked.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.config import hydra_main
from ragen_pl.run.ranks import early_end_heard, ranks_end_together


@early_end_heard
@hydra_main("fit")
def main(cfg: DictConfig) -> float | None:
    """Run the job of the config and return the success on the validation set, the objective of sweeps."""
    from ragen_pl.run.checks import check_run

    devices, nodes = cfg.trainer.devices, cfg.trainer.num_nodes
    with ranks_end_together(devices=devices if isinstance(devices, int) else 1, nodes=nodes):
        check_run(cfg)
        from ragen_pl.run.train import train

        return train(cfg).get("val/success")


if __name__ == "__main__":
    main()
