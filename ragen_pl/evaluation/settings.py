"""The settings a checkpoint is used with: those of its run, changed by the command line.

`resolve_settings` runs before Hydra composes. It finds the checkpoint of `ckpt=` and puts its run's settings
into Hydra's store as the config `trained`, which `conf/evaluate.yaml` starts from. Every key of the run can be
overridden as usual, and `env=...` replaces the run's whole environment. What comes from a file of somebody else is
checked (`ragen_pl.config.trust`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import CountOrZero
from ragen_pl.config.environments import environment_configs
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.hydra_errors import translated
from ragen_pl.config.nodes import plain
from ragen_pl.config.own_files import is_own, is_own_folder
from ragen_pl.config.paths import config_dir, searched
from ragen_pl.config.references import references_in, references_of_environment, with_references
from ragen_pl.config.settings import keys_of
from ragen_pl.config.trust import check_folder, check_settings, replaced_by
from ragen_pl.evaluation.validation_sets import environment_key
from ragen_pl.rollout.settings import EpisodeSettings
from ragen_pl.tracking.checkpoints import NEWEST, Checkpoint, find_checkpoint

# Options that are resolved here; Hydra does not see them, apart from `ckpt`.
_ENGINE, _BASELINES = "rollout/engine", "validation/baselines"
# an environment whose file has no scripted policies of its own
_NO_POLICIES = "env=custom"
_RESOLVED = ("ckpt", "env", "model", _ENGINE, _BASELINES)
# Settings of a pretrained model that a checkpoint is used with.
_LOADING = ("dtype", "attn_implementation")
HELD_OUT = ("held_out", "environment")
"""Keys of `source` that say which initial states training held out."""
# more initial states than any validation set has
_MANY = 1 << 53
_PRETRAINED = {
    "_target_": "ragen_pl.models.build.load_pretrained",
    "dtype": "float32",
    "attn_implementation": "auto",
    "max_tokens": None,
    "trust_remote_code": False,
}

Settings = dict[str, Any]


@checked
@dataclass(frozen=True, kw_only=True)
class Source:
    """Keys of `source`: origin of the weights, as `resolve_settings` finds it.

    Attributes:
        checkpoint: The checkpoint; null without one.
        run: Folder of its run.
        untrained: Whether the model's first weights are used instead.
        held_out: Number of initial states that training held out.
        environment: The environment that they belong to.
    """

    checkpoint: str | None = None
    run: str | None = None
    untrained: bool = False
    held_out: CountOrZero = 0
    environment: str | None = None


def resolve_evaluation(args: argparse.Namespace) -> list[str]:
    """Return the overrides of an evaluation as `resolve_settings` does, with `logger=none` as `mlflow=false`.

    Raises:
        ConfigError: As `resolve_settings`, or another logger than MLflow is given.
    """
    overrides = []
    for line in args.overrides:
        key, _, value = line.partition("=")
        if key.lstrip("+") != "logger":
            overrides.append(line)
        elif value in ("none", "null"):
            overrides.append("mlflow=false")
        elif value != "mlflow":
            raise ConfigError(
                f"{line}: an evaluation is logged to MLflow, under its run, or nowhere; set logger=none or mlflow=true"
            )
    return resolve_settings(argparse.Namespace(**vars(args) | {"overrides": overrides}))


def resolve_settings(args: argparse.Namespace) -> list[str]:
    """Store the config `trained` and return the remaining overrides for Hydra.

    Args:
        args: Hydra's parsed command line.

    Raises:
        ConfigError: A checkpoint does not exist, or required settings are missing.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(args.overrides))
    except HydraException as error:
        raise ConfigError(translated(error)) from error
    overrides = {override.key_or_group: override for override in parsed}
    trained = _trained_settings(overrides, args=args)
    ConfigStore.instance().store(name="trained", node=trained)
    remaining = [_line(override) for override in parsed if override.key_or_group not in _RESOLVED]
    ckpt = _value(overrides, "ckpt")
    if ckpt is not None:
        # Quoted, since a run's id may look like a number.
        quoted = ckpt.replace("\\", "\\\\").replace('"', '\\"')
        remaining.append(f'ckpt="{quoted}"')
    return remaining


def _trained_settings(overrides: Mapping[str, Override], *, args: argparse.Namespace) -> DictConfig:
    env, model, ckpt = (_value(overrides, name) for name in ("env", "model", "ckpt"))
    engine = _value(overrides, _ENGINE)
    run_dir = _value(overrides, "paths.run_dir")
    chosen = [f"env={env}"] if env else []
    # an environment of a mixture need not have a file of its name, unless the newest run is looked for by it
    by_name = not ckpt or (ckpt in NEWEST and not run_dir)
    first = chosen if by_name else []
    composed = _composed(first, args=args)
    root = _value(overrides, "paths.root") or composed.paths.root
    trained: Settings = {}
    if ckpt:
        name = (_value(overrides, "env.name") or composed.env.name) if env and by_name else None
        checkpoint = find_checkpoint(ckpt, root=root, name=name, run_dir=run_dir)
        trained = checkpoint.settings()
        if "environments" in trained.get("env", {}):
            trained, env = _of_mixture(trained, env, ckpt=ckpt)
    has_run = bool(trained)
    chosen = [f"env={env}"] if env else []
    if chosen != first:
        composed = _composed(chosen, args=args)
    shipped = plain(composed)
    references = references_in(composed, "env", "context", "rollout")
    settings = _default_settings(shipped)
    settings["source"]["untrained"] = model is not None
    settings["paths"] = {"root": root, "run_dir": run_dir}
    if ckpt:
        if not has_run and not checkpoint.is_folder and not (model and env):
            raise ConfigError(
                f"ckpt={checkpoint.path}: no run's config.yaml next to it; set paths.run_dir=… of the run, or "
                "env=… and model=…"
            )
        _apply_checkpoint(settings, checkpoint, trained, keep_env=env is not None)
    if model:
        with_model = _composed([*chosen, f"model={model}"], args=args)
        settings["model"] = plain(with_model)["model"]
        references |= references_in(with_model, "model")
    if (ckpt or model) and not env and not has_run:
        raise ConfigError("env has no value, and the weights name no environment; set env=…")
    if ckpt and not _is_true(overrides, "trust"):
        if not is_own_folder(checkpoint.settings_file):
            check_folder(checkpoint.folder, key=f"ckpt={ckpt}", is_model=checkpoint.is_folder)
        if has_run and not is_own(checkpoint.settings_file):
            _check_foreign(settings, overrides, checkpoint, chosen_env=env is not None)
    if has_run and not env:
        references |= references_of_environment(
            settings["env"].get("target"), _folders(overrides, args=args)
        )
    if engine:
        with_engine = _composed([f"{_ENGINE}={engine}"], args=args)
        settings["rollout"]["engine"] = plain(with_engine)["rollout"]["engine"]
        references |= references_in(with_engine, "rollout.engine")
    if baselines := _value(overrides, _BASELINES):
        # without an environment's file, policies of other names are the run's own
        known = {} if env else _baselines([_NO_POLICIES, f"{_BASELINES}=optimal"], args=args)
        of_run = {} if env else settings["validation"]["baselines"] or {}
        option = [*(chosen or [_NO_POLICIES]), f"{_BASELINES}={baselines}"]
        own = {name: policy for name, policy in of_run.items() if name not in known}
        settings["validation"]["baselines"] = _baselines(option, args=args) | own
    build = settings["model"]["build"]
    if "max_tokens" in build and (model or (ckpt and checkpoint.is_folder)):
        # other policies keep the positions of their run
        build["max_tokens"] = "${context.max_tokens}"
    return with_references(settings, references)


def _baselines(overrides: list[str], *, args: argparse.Namespace) -> Settings:
    """Return the scripted policies of a training configuration."""
    return plain(_composed(overrides, args=args))["validation"]["baselines"] or {}


def _of_mixture(trained: Settings, env: str | None, *, ckpt: str) -> tuple[Settings, str | None]:
    """Return the settings of a run on a mixture as those of a run on the environment that `env` names, and no `env`.

    With an `env` that is none of the mixture's, both are returned as they are.

    Raises:
        ConfigError: No environment is chosen.
    """
    cfg = OmegaConf.create(trained)
    names = [*cfg.env.environments]
    if env is None:
        raise ConfigError(
            f"ckpt={ckpt}: was trained on a mixture of {', '.join(names)}; choose one, such as env={names[0]}"
        )
    if env not in names:
        return trained, env
    # what refers to other values is checked later
    return plain(environment_configs(cfg)[env], resolve=False), None


def _check_foreign(
    settings: Settings,
    overrides: Mapping[str, Override],
    checkpoint: Checkpoint,
    *,
    chosen_env: bool,
) -> None:
    """Check the settings that come from a file of somebody else: those that the command line did not choose.

    Args:
        settings: The settings.
        overrides: Those of the command line.
        checkpoint: The checkpoint.
        chosen_env: Whether the environment's settings are those of a file that the command line chose.

    Raises:
        ConfigError: They name code or an address, or run code of a model.
    """
    parts = {"env": ("env", "validation"), "model": ("model",)}
    chosen = {part for name, of in parts.items() if _value(overrides, name) for part in of}
    chosen -= set() if chosen_env else {*parts["env"]}
    chosen |= {"source", "paths"}
    taken = {part: values for part, values in settings.items() if part not in chosen}
    if _value(overrides, _ENGINE):
        taken["rollout"] = {
            key: value for key, value in taken["rollout"].items() if key != "engine"
        }
    given = [replaced_by(key, override.value()) for key, override in overrides.items()]
    if checkpoint.is_folder:
        given.append(iter([("model.build.path", str(checkpoint.path))]))
    check_settings(taken, file=checkpoint.settings_file, given=dict(chain.from_iterable(given)))


def _default_settings(shipped: Settings) -> Settings:
    """Return the settings of an evaluation without a checkpoint."""
    validation = shipped["validation"]
    return {
        "env": shipped["env"],
        "model": shipped["model"],
        "context": shipped["context"],
        "rollout": _of_episodes(shipped["rollout"]),
        "validation": {
            "episodes": validation["episodes"],
            "baselines": validation.get("baselines"),
            "warm_start": True,
            "blank": False,
        },
        "source": asdict(Source()),
    }


def _apply_checkpoint(
    settings: Settings, checkpoint: Checkpoint, trained: Settings, *, keep_env: bool
) -> None:
    """Replace default settings by those of a checkpoint.

    Args:
        settings: Settings to change.
        checkpoint: The checkpoint.
        trained: Its own settings, empty if its run is unknown.
        keep_env: Whether the command line chose the environment.
    """
    if trained:
        _apply_run(settings, trained, keep_env=keep_env)
    if checkpoint.is_folder:
        build = trained.get("model", {}).get("build", {})
        loading = {key: build[key] for key in _LOADING if build.get(key)}
        settings["model"] = {"build": _PRETRAINED | loading | {"path": str(checkpoint.path)}}
    settings["source"] |= {
        "checkpoint": str(checkpoint.path),
        "run": str(checkpoint.run) if checkpoint.run else None,
    }


def _apply_run(settings: Settings, trained: Settings, *, keep_env: bool) -> None:
    validation = trained.get("validation", {})
    rollout = trained.get("rollout", {})
    settings["model"] = trained["model"]
    if keep_env:
        # The prompt format belongs to the policy, not to the environment.
        prompt_format = trained["env"].get("prompt_format", settings["env"]["prompt_format"])
        settings["env"]["prompt_format"] = prompt_format
    else:
        settings["env"] = trained["env"]
        settings["validation"]["baselines"] = validation.get("baselines")
    kept = ("episodes", "warm_start")
    settings["validation"] |= {key: validation[key] for key in kept if key in validation}
    settings["context"] |= trained.get("context", {})
    settings["rollout"] |= _of_episodes(rollout)
    settings["source"] |= _held_out(trained)


def _held_out(trained: Settings) -> Settings:
    """Return the keys of `source` that say which initial states training held out."""
    if of_run := trained.get("source"):
        # of an exported policy, whose other settings may be changed ones
        return {key: of_run.get(key) for key in HELD_OUT}
    env, validation = trained["env"], trained.get("validation", {})
    if env.get("held_out_fraction") is not None:
        # whatever their number
        count = _MANY
    else:
        count = validation["episodes"] if validation.get("held_out") else 0
    return {"held_out": count, "environment": environment_key(env) if count else None}


def _of_episodes(rollout: Settings) -> Settings:
    """Return the keys of `rollout` that episodes are played with."""
    return {
        key: rollout[key]
        for key in ("engine", "failures", *keys_of(EpisodeSettings))
        if key in rollout
    }


def _composed(overrides: list[str], *, args: argparse.Namespace) -> DictConfig:
    """Return the training config with these overrides."""
    search_path = searched(args.config_dir)
    search_path += [
        override
        for override in args.overrides
        if override.lstrip("+").startswith("hydra.searchpath=")
    ]
    directory = Path(args.config_path or config_dir()).resolve()
    with initialize_config_dir(str(directory), version_base="1.3"):
        try:
            return compose("fit", overrides=[*search_path[-1:], *overrides])
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(translated(error)) from error


def _folders(overrides: Mapping[str, Override], *, args: argparse.Namespace) -> list[Path]:
    """Return the folders of configurations that the command line adds to the shipped one."""
    given = [folder for folder in (args.config_dir, args.config_path) if folder]
    searched_too = overrides.get("hydra.searchpath")
    places = searched_too.value() if searched_too is not None else None
    for place in places if isinstance(places, list) else []:
        kind, _, folder = str(place).partition("://")
        given += [folder] if kind == "file" else []
    return [Path(folder).resolve() for folder in given]


def _line(override: Override) -> str:
    """Return an override for Hydra; keys of validation sets may be new, so they are added or changed."""
    line = str(override.input_line)
    return f"++{line}" if line.startswith("validation_sets.") else line


def _value(overrides: Mapping[str, Override], name: str) -> str | None:
    """Return the command line's value of a key as text; None if it is missing, null or empty."""
    override = overrides.get(name)
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
    # As it was written: 0123 is not 123.
    return str(override.input_line).partition("=")[2]


def _is_true(overrides: Mapping[str, Override], name: str) -> bool:
    """Return whether the command line sets a key to true."""
    return name in overrides and overrides[name].value() is True
