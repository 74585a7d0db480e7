"""`python -m ragen_pl.fit env=frozenlake_visual`: train an agent.

Heavy packages are imported after the configuration was checked. Signals are heard before Hydra is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragen_pl.base.stop_signals import stopped_by_signals

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """Run the job of the command line."""
    with stopped_by_signals(for_good=True):
        from ragen_pl.config import hydra_main
        from ragen_pl.ranks.ranks import early_end_reported

        @early_end_reported
        @hydra_main("fit")
        def run(cfg: DictConfig) -> float | None:
            """Run the job of the config and return its objective, the success on the validation set."""
            from ragen_pl.api import train_config

            return train_config(cfg).objective

        run()


if __name__ == "__main__":
    main()
