"""`python -m ragen_pl.page records=FOLDER`: write the trajectory page of recorded episodes."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from ragen_pl.config import hydra_main
from ragen_pl.config.errors import ConfigError, config_errors


@hydra_main("page")
def main(cfg: DictConfig) -> None:
    """Write the page and print its path."""
    from ragen_pl.base.foreign_files import is_inside
    from ragen_pl.base.records import FILE, read_records
    from ragen_pl.viewing.page import PAGE, PLAYED, write_page
    from ragen_pl.viewing.run_files import played_outcomes

    file = Path(cfg.records).expanduser().absolute()
    if file.is_dir() and not (file / FILE).exists():
        raise ConfigError(f"records={cfg.records}: {_without_records(file, name=FILE)}")
    file = file / FILE if file.is_dir() else file
    path = Path(cfg.to).expanduser().absolute() if cfg.to else file.with_name(PAGE)
    title = cfg.title or file.parent.name
    if not is_inside(file.parent, file):
        raise ConfigError(f"records={cfg.records}: {file} is a link that leads out of its folder")
    with config_errors(f"records={cfg.records}", hint="give records that ragen_pl has written"):
        page = write_page(
            list(read_records(file)),
            path,
            title=title,
            images=file.parent,
            episodes=cfg.episodes,
            played=played_outcomes(file.parent, PLAYED),
        )
    print(page)


def _without_records(folder: Path, *, name: str) -> str:
    """Return the remedy for a folder without records, which names the newest records below it."""
    newest = max(folder.rglob(name), key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return f"there is no {name} in it or below; give the folder of an iteration or of an evaluated validation set"
    return f"there is no {name} in it; below it the newest is in records={newest.parent}"


if __name__ == "__main__":
    main()
