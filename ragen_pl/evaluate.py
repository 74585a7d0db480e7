"""`python -m ragen_pl.evaluate ckpt=last env=frozenlake_visual`: what a policy comes to, on any panel.

Only the configuration is looked at here; what is heavy is imported once it is known to be sound.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.config import hydra_main
from ragen_pl.evaluation.settings import settle


@hydra_main("evaluate", prepare=settle)
def main(cfg: DictConfig) -> float:
    """Play the validation sets; return the policy's success on the first one, for sweeps."""
    from ragen_pl.evaluation.checks import preflight

    preflight(cfg)
    from ragen_pl.evaluation.evaluator import evaluate

    return evaluate(cfg).first_success


if __name__ == "__main__":
    main()
