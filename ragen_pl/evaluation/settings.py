"""The settings a checkpoint is used with: those of its run, with the command line's on top.

`settle` runs before Hydra composes. It finds the checkpoint that `ckpt=` names and puts its run's settings
into Hydra's store as the config `trained`, which `conf/evaluate.yaml` begins with. So every key of the run
can be overridden as usual, and `env=…` takes the place of the run's environment as a whole.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ragen_pl.config.errors import ConfigError, tell
from ragen_pl.config.paths import config_dir, searched
from ragen_pl.evaluation.validation_sets import environment
from ragen_pl.run.checkpoints import Checkpoint, find_checkpoint

_SETTLED = ("ckpt", "env", "model")
_ROLLOUT = ("engine", "temperature", "max_response_tokens", "num_envs")
_PLAIN_CHECKPOINT = (
    "ckpt={0}: no run's config.yaml beside it; set paths.run_dir=… of the run, or env=… and model=…"
)
_PRETRAINED = {
    "_target_": "ragen_pl.models.build.load_pretrained",
    "dtype": "float32",
    "attn_implementation": "sdpa",
}


def settle(args: argparse.Namespace) -> list[str]:
    """Store the config `trained` and return the overrides that are left for Hydra.

    Args:
        args: Hydra's parsed command line.

    Raises:
        ConfigError: a checkpoint, or settings that are needed, can't be found.
    """
    try:
        overrides = OverridesParser.create().parse_overrides(list(args.overrides))
    except HydraException as error:
        raise ConfigError(tell(error)) from error
    said = {one.key_or_group: one for one in overrides}
    kept = [_line(one) for one in overrides if one.key_or_group not in _SETTLED]
    ckpt = _text(said, "ckpt")
    if ckpt is not None:  # quoted, for a run's id may look like a number
        quoted = ckpt.replace("\\", "\\\\").replace('"', '\\"')
        kept.append(f'ckpt="{quoted}"')
    base = _base(said, args=args)
    ConfigStore.instance().store(name="trained", node=OmegaConf.create(base))
    return kept


def _base(said: dict[str, Override], *, args: argparse.Namespace) -> dict[str, Any]:
    env, model, ckpt = (_text(said, name) for name in ("env", "model", "ckpt"))
    shipped = _shipped([f"env={env}"] if env else [], args=args)
    root = _text(said, "paths.root") or shipped["paths"]["root"]
    name = (_text(said, "env.name") or shipped["env"]["name"]) if env else None
    run_dir = _text(said, "paths.run_dir")
    base = {
        "env": shipped["env"],
        "model": shipped["model"],
        "context": shipped["context"],
        "rollout": {key: shipped["rollout"][key] for key in _ROLLOUT},
        "validation": {
            "episodes": shipped["validation"]["episodes"],
            "baselines": shipped["validation"].get("baselines"),
            "warm_start": True,
            "blank": False,
        },
        "paths": {"root": root, "run_dir": run_dir},
        "source": {
            "checkpoint": None,
            "run": None,
            "untrained": model is not None,
            "held_out": 0,  # starts that training set aside
            "environment": None,  # in which
        },
    }
    if ckpt:
        checkpoint = find_checkpoint(ckpt, root=root, name=name, run_dir=run_dir)
        _take_over(base, checkpoint, keep_env=env is not None, has_model=model is not None)
    if model:
        base["model"] = _shipped([f"model={model}"], args=args)["model"]
    known = base["source"].pop("known", False)
    if (ckpt or model) and not env and not known:
        raise ConfigError("env has no value: the weights tell of no environment; set env=…")
    return base


def _take_over(
    base: dict[str, Any], checkpoint: Checkpoint, *, keep_env: bool, has_model: bool
) -> None:
    """Put a checkpoint's own settings in place of the shipped ones."""
    trained = checkpoint.settings()
    if not trained and not checkpoint.is_folder and not (has_model and keep_env):
        raise ConfigError(_PLAIN_CHECKPOINT.format(checkpoint.path))
    if trained:
        validation_set = trained.get("validation", {})
        for name in ("env", "model"):
            if name != "env" or not keep_env:
                base[name] = trained[name]
        if keep_env:  # the form of its responses goes with the policy
            known = trained["env"].get("prompt_format", base["env"]["prompt_format"])
            base["env"]["prompt_format"] = known
        else:
            base["validation"]["baselines"] = validation_set.get("baselines")
        base["validation"] |= {
            key: validation_set[key] for key in ("episodes", "warm_start") if key in validation_set
        }
        base["context"] |= trained.get("context", {})
        rollout = trained.get("rollout", {})
        base["rollout"] |= {key: rollout[key] for key in _ROLLOUT if key in rollout}
        if validation_set.get("held_out"):
            base["source"] |= {
                "held_out": validation_set["episodes"],
                "environment": environment(trained["env"]),
            }
    if checkpoint.is_folder:
        loading = {
            key: trained.get("model", {}).get("build", {}).get(key)
            for key in ("dtype", "attn_implementation")
        }
        known = {key: value for key, value in loading.items() if value}
        base["model"] = {"build": _PRETRAINED | known | {"path": str(checkpoint.path)}}
    base["source"] |= {
        "checkpoint": str(checkpoint.path),
        "run": str(checkpoint.run) if checkpoint.run else None,
        "known": bool(trained),
    }


def _shipped(overrides: list[str], *, args: argparse.Namespace) -> dict[str, Any]:
    """Return the training config that these overrides make, as plain settings."""
    places = searched(args.config_dir)
    places += [one for one in args.overrides if one.lstrip("+").startswith("hydra.searchpath=")]
    directory = Path(args.config_path or config_dir()).resolve()
    with initialize_config_dir(str(directory), version_base="1.3"):
        try:
            cfg: DictConfig = compose("fit", overrides=[*places[-1:], *overrides])
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(tell(error)) from error
    settings = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items()}


def _line(override: Override) -> str:
    """Return an override as Hydra is to read it; a validation set may be added, or added to, like any other change."""
    line = str(override.input_line)
    return f"++{line}" if line.startswith("validation_sets.") else line


def _text(said: dict[str, Override], name: str) -> str | None:
    """Return what the command line says of a key that decides all others; None for nothing or null."""
    override = said.get(name)
    if override is None:
        return None
    if override.is_sweep_override():
        raise ConfigError(
            f"{override.input_line}: several values; evaluate one at a time, or as validation sets"
        )
    value = override.value()
    if isinstance(value, str):
        return value or None
    if value is None or isinstance(value, dict | list):
        return None
    return str(override.input_line).partition("=")[2]  # as it was written: 0123 is not 123
