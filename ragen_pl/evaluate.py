"""`python -m ragen_pl.evaluate ckpt=last env=frozenlake_visual`: evaluate a policy on validation sets.

The configuration is checked before torch is imported.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.base.machine import collection_paused
from ragen_pl.config import hydra_main
from ragen_pl.evaluation.settings import resolve_evaluation


@hydra_main("evaluate", prepare=resolve_evaluation)
def main(cfg: DictConfig) -> float:
    """Play the validation sets and return the policy's success on the first one, or its return, for sweeps."""
    from ragen_pl.evaluation.checks import check_evaluation

    check_evaluation(cfg)
    with collection_paused():
        from ragen_pl.evaluation.evaluator import evaluate

    return evaluate(cfg).objective


if __name__ == "__main__":
    main()
