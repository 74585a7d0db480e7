"""`python -m ragen_pl.page records=FOLDER`: write the trajectory page of recorded episodes."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from ragen_pl.config import hydra_main
from ragen_pl.config.errors import ConfigError


@hydra_main("page")
def main(cfg: DictConfig) -> None:
    """Write the page and print its path."""
    from ragen_pl.viewing.page import PAGE, write_page
    from ragen_pl.viewing.records import FILE, read_records

    file = Path(cfg.records).expanduser().absolute()
    file = file / FILE if file.is_dir() else file
    path = Path(cfg.to).expanduser().absolute() if cfg.to else file.with_name(PAGE)
    try:
        records = list(read_records(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"records={cfg.records}: {error}") from error
    title = cfg.title or file.parent.name
    print(write_page(records, path, title=title, images=file.parent, episodes=cfg.episodes))


if __name__ == "__main__":
    main()
