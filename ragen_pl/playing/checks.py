"""Checks of an episode to play before heavy packages are imported."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from ragen_pl.config.errors import ConfigError
from ragen_pl.environments.calls import check_made
from ragen_pl.evaluation.checks import check_source

FORMATS = (".gif", ".png")


def check_play(cfg: DictConfig) -> None:
    """Check policy, environment and the file to save.

    Raises:
        ConfigError: With the first thing that is wrong.
    """
    if cfg.policy == "agent":
        check_source(cfg, instead="policy=human, random or optimal, which need none")
    elif cfg.policy == "endpoint":
        if cfg.endpoint is None:
            raise ConfigError(
                "policy=endpoint: there is none; set endpoint=openai endpoint.model=…"
            )
    elif cfg.policy != "human" and not (cfg.validation.baselines or {}).get(cfg.policy):
        raise ConfigError(
            f"policy={cfg.policy}: validation.baselines has no policy of that name for this environment; set "
            "validation/baselines=optimal if it has optimal_action(rng), or policy=human or agent"
        )
    if cfg.seat is not None and (cfg.policy != "human" or cfg.ckpt is None):
        raise ConfigError(
            f"seat={cfg.seat}: is that of a person against a trained agent; set policy=human and ckpt=…, or seat=null"
        )
    check_made(cfg.env)
    if cfg.save is not None:
        file = Path(cfg.save).expanduser()
        if file.suffix.lower() not in FORMATS:
            raise ConfigError(
                f"save={cfg.save}: expected a name that ends in .gif or .png, or null"
            )
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"save={cfg.save}: there is no folder {file.absolute().parent}")
