"""`python -m ragen_pl.export ckpt=last to=FOLDER`: write a policy as a Hugging Face folder.

The configuration is checked before torch is imported.
"""

from __future__ import annotations

from omegaconf import DictConfig

from ragen_pl.base.machine import collection_paused
from ragen_pl.config import hydra_main
from ragen_pl.evaluation.settings import resolve_settings


@hydra_main("export", prepare=resolve_settings)
def main(cfg: DictConfig) -> None:
    """Write the folder."""
    from ragen_pl.evaluation.checks import check_export

    check_export(cfg)
    with collection_paused():
        from ragen_pl.evaluation.exporting import export

    export(cfg)


if __name__ == "__main__":
    main()
