"""`python -m ragen_pl.fit env=frozenlake_visual`: train an agent.

Only the configuration is looked at here; what is heavy is imported once it is known to be sound.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.config import hydra_main


@hydra_main("fit")
def main(cfg: DictConfig) -> float | None:
    """Run the job that the config describes; return the validation set's success, for sweeps to maximise."""
    from ragen_pl.run.checks import preflight

    preflight(cfg)
    from ragen_pl.run.train import train

    return train(cfg).get("val/success")


if __name__ == "__main__":
    main()
