"""`python -m ragen_pl.serve ckpt=last`: answer requests with a trained policy, as in training.

The configuration is checked before torch is imported.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.base.machine import collection_paused
from ragen_pl.config import hydra_main
from ragen_pl.evaluation.settings import resolve_settings


@hydra_main("serve", prepare=resolve_settings)
def main(cfg: DictConfig) -> None:
    """Serve the policy until a signal ends the process."""
    from ragen_pl.deployment.checks import check_serve

    check_serve(cfg)
    with collection_paused():
        from ragen_pl.deployment.serving import serve

    serve(cfg)


if __name__ == "__main__":
    main()
