"""`python -m ragen_pl.import_gguf file=model.gguf to=FOLDER`: write a GGUF file's model as a Hugging Face folder.

The configuration is checked before torch is imported.
"""

from __future__ import annotations

import logging

from omegaconf import DictConfig

from ragen_pl.config import hydra_main
from ragen_pl.config.errors import ConfigError, config_errors

log = logging.getLogger(__name__)


@hydra_main("import_gguf")
def main(cfg: DictConfig) -> None:
    """Write the folder and log its contents."""
    from ragen_pl.run.checks import check_new_folder

    if cfg.dtype is None:
        raise ConfigError("dtype=null: expected one of float32, bfloat16")
    folder = check_new_folder(cfg.to, overwrite=cfg.overwrite)
    from ragen_pl.models.gguf import import_gguf

    with config_errors(f"file={cfg.file}"):
        model = import_gguf(cfg.file, str(folder), dtype=cfg.dtype)
    log.info(
        "%-11s%s, %.1f M parameters in %s",
        "model",
        model.architecture,
        model.parameters / 1e6,
        model.dtype,
    )
    log.info(
        "%-11s%.0f MB of GGUF became %.0f MB",
        "size",
        model.file_bytes / 1e6,
        model.folder_bytes / 1e6,
    )
    log.info("%-11s%s", "written to", model.folder)
    log.info(
        "%-11spython -m ragen_pl.fit model=pretrained model.build.path=%s", "train", model.folder
    )


if __name__ == "__main__":
    main()
