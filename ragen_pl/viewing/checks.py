"""What can be known of an episode to play before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from ragen_pl.config.errors import ConfigError
from ragen_pl.evaluation.checks import check_source
from ragen_pl.run.checks import check_environment

FORMATS = (".gif", ".png")


def preflight(cfg: DictConfig) -> None:
    """Check policy, environment and the file to save.

    Raises:
        ConfigError: on the first thing that can't be done.
    """
    if cfg.policy == "agent":
        check_source(cfg, instead="policy=human, random or optimal, which need none")
    elif cfg.policy != "human" and not (cfg.validation.baselines or {}).get(cfg.policy):
        raise ConfigError(
            f"policy={cfg.policy}: validation.baselines has no player of that name for this environment; "
            "use policy=human or policy=agent"
        )
    check_environment(cfg.env)
    if cfg.save is not None:
        file = Path(cfg.save).expanduser()
        if file.suffix.lower() not in FORMATS:
            raise ConfigError(
                f"save={cfg.save}: expected a name that ends in .gif or .png, or null"
            )
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"save={cfg.save}: there is no folder {file.absolute().parent}")
