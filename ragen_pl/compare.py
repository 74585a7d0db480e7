"""`python -m ragen_pl.compare run=A with=B`: compare runs on the same held-out episodes.

It reads what validations and evaluations have written. Nothing is played, and torch is not imported.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.config import hydra_main
from ragen_pl.config.nodes import plain


@hydra_main("compare")
def main(cfg: DictConfig) -> None:
    """Print the differences, and write them if `to` is set."""
    from ragen_pl.evaluation.comparison import compare, print_comparison, write_comparison
    from ragen_pl.evaluation.played import Question

    given = plain(cfg)
    left, right = (
        [given[key]] if isinstance(given[key], str) else given[key] or [] for key in ("run", "with")
    )
    asked = ("which", "set", "may_differ", "overlap", "resamples", "seed")
    found = compare(left, right, Question(**{key: given[key] for key in asked}))
    print_comparison(found)
    if cfg.to is not None:
        print(f"written to {write_comparison(found, cfg.to)}")


if __name__ == "__main__":
    main()
