"""`python -m ragen_pl.play ckpt=last env=frozenlake_visual`: watch an episode, or play one yourself.

Only the configuration is read here; heavy packages are imported after it has been checked.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.base.machine import collection_paused
from ragen_pl.config import hydra_main
from ragen_pl.evaluation.settings import resolve_settings


@hydra_main("play", prepare=resolve_settings)
def main(cfg: DictConfig) -> float:
    """Play one episode and return its return."""
    from ragen_pl.playing.checks import check_play

    check_play(cfg)
    with collection_paused():
        from ragen_pl.playing.play import play

    return play(cfg).reward


if __name__ == "__main__":
    main()
