"""`python -m ragen_pl.export ckpt=last to=FOLDER`: a policy as a Hugging Face folder.

Only the configuration is looked at here; what is heavy is imported once it is known to be sound.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.config import hydra_main
from ragen_pl.evaluation.settings import settle


@hydra_main("export", prepare=settle)
def main(cfg: DictConfig) -> None:
    """Write the folder."""
    from ragen_pl.evaluation.checks import check_export

    check_export(cfg)
    from ragen_pl.evaluation.exporting import export

    export(cfg)


if __name__ == "__main__":
    main()
