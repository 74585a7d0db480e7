"""`python -m ragen_pl.replay batch=FILE`: repeat a recorded optimizer step, and find where it is not finite.

The configuration is checked before torch is imported.
"""

from __future__ import annotations

from argparse import Namespace

from omegaconf import DictConfig

from ragen_pl.base.machine import collection_paused
from ragen_pl.config import ConfigError, hydra_main


def name_file(args: Namespace) -> list[str]:
    """Return the overrides, with a file that is given alone as `batch`.

    Raises:
        ConfigError: A checkpoint is given.

    >>> name_file(Namespace(overrides=["runs/a/bad_batch/0003_00017_0.pt", "dtype=float32"]))
    ['batch=runs/a/bad_batch/0003_00017_0.pt', 'dtype=float32']
    """
    if given := [word for word in args.overrides if word.startswith("ckpt=")]:
        raise ConfigError(
            f"{given[0]}: the step of a checkpoint is not repeated; set batch=FILE of a run's bad_batch or batches "
            "folder, where callbacks.record_batches.every_n_iterations=1 keeps steps"
        )
    return [word if "=" in word else f"batch={word}" for word in args.overrides]


@hydra_main("replay", prepare=name_file)
def main(cfg: DictConfig) -> None:
    """Repeat the step and print the norms of each part."""
    with collection_paused():
        from ragen_pl.replaying.step import replay

    replay(cfg)


if __name__ == "__main__":
    main()
