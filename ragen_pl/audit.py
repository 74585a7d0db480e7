"""`python -m ragen_pl.audit ckpt=last`: how well each algorithm credits the turns of a policy.

The configuration is checked before torch is imported.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.base.machine import collection_paused
from ragen_pl.config import hydra_main


@hydra_main("audit")
def main(cfg: DictConfig) -> None:
    """Play episodes and their continuations, and print how the algorithms' advantages agree with the effects."""
    with collection_paused():
        from ragen_pl.evaluation.auditing import audit

    audit(cfg)


if __name__ == "__main__":
    main()
