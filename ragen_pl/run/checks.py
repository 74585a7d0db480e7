"""What can be known of a run before anything heavy is imported: its environment, its tracking, its checkpoint."""

from __future__ import annotations

import os
import shutil
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import is_zipfile

from omegaconf import DictConfig, OmegaConf

from ragen_pl.config.errors import ConfigError
from ragen_pl.config.pairs import class_named
from ragen_pl.config.readings import declared_readings
from ragen_pl.run.environment_check import probe
from ragen_pl.run.folder import RUN_DIR, Run, locate
from ragen_pl.run.tracking import check_reachable, tracking_uri

if TYPE_CHECKING:
    import gymnasium

_ROOM = (
    200 * 2**20
)  # bytes: three checkpoints of the small model with its optimizer, and the metrics


def preflight(cfg: DictConfig) -> None:
    """Check what the run will need; takes a fraction of a second.

    Raises:
        ConfigError: the environment cannot be made, or MLflow cannot be reached.
        FileNotFoundError: there is nothing to resume from, told in one line.
    """
    check_adapters(cfg)
    check_environment(cfg.env)
    probe(cfg)
    check_world_model(cfg)
    check_monitor(cfg)
    check_anchor_states(cfg)
    if str((cfg.logger or {}).get("_target_", "")).endswith(".RunLogger"):
        check_reachable(tracking_uri(cfg.paths.root, uri=cfg.logger.get("uri")))
    check_agreement(cfg)
    run = locate(
        root=cfg.paths.root,
        name=cfg.env.name,
        run_dir=cfg.paths.run_dir,
        ckpt_path=cfg.ckpt_path,
    )
    check_folder(run.folder)
    check_unused(cfg, run)
    has_started = cfg.ckpt_path is not None and run.warm_start.exists()
    for file, said in (
        (run.checkpoint, f"ckpt_path={cfg.ckpt_path}"),
        (run.warm_start, str(run.warm_start)),
        *([] if has_started else given_initial_weights(cfg)),
    ):
        if file and file.exists() and not is_zipfile(file):
            raise ConfigError(
                f"{said}: {file} is damaged or no checkpoint; give another one, or delete it and start anew"
            )


def given_initial_weights(cfg: DictConfig) -> list[tuple[Path, str]]:
    """Return the weights to begin from, and what the user said of them, where any were given.

    Raises:
        ConfigError: there is no such file.
    """
    given = OmegaConf.select(cfg, "warm_start.weights")
    if given is None:
        return []
    file, said = Path(str(given)).expanduser(), f"warm_start.weights={given}"
    if not file.exists():
        raise ConfigError(f"{said}: expected a path that exists")
    return [(file, said)]


def check_unused(cfg: DictConfig, run: Run) -> None:
    """Check that a new run does not write over another one.

    Raises:
        ConfigError: its folder holds one.
    """
    told = (
        RUN_DIR in os.environ or started_outside() > 1
    )  # by a first rank, which may have begun to write
    if cfg.ckpt_path is None and not told and run.has_started:
        raise ConfigError(
            f"paths.run_dir={cfg.paths.run_dir}: holds a run already; go on with it by ckpt_path=last, or set "
            "another folder"
        )


def started_outside() -> int:
    """Return how many processes torchrun or srun have started, 1 where they have not."""
    return max(int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "SLURM_NTASKS"))


def check_folder(
    folder: Path,
    *,
    said: str | None = None,
    hint: str = "set paths.root (or paths.run_dir) to a folder of yours",
) -> None:
    """Check that a run, or what is made of one, can be written to this folder, which need not exist yet.

    Args:
        folder: an absolute path.
        said: what the user said that it follows from; None for the path itself.
        mend: what to do where it is somebody else's.

    Raises:
        ConfigError: something that is no folder is in the way, it may not be written to, or the disk is full.
    """
    place = next(path for path in (folder, *folder.parents) if path.exists())
    told = said or str(folder)
    if not place.is_dir():
        raise ConfigError(f"{told}: cannot be made, for {place} is a file; {hint}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{told}: {place} may not be written to; {hint}")
    free = shutil.disk_usage(place).free
    if free < _ROOM:
        raise ConfigError(
            f"{told}: {free >> 20} MB are left on its disk, a run needs {_ROOM >> 20} MB for checkpoints; "
            f"make room, or {hint}"
        )


def check_environment(env: DictConfig) -> None:
    """Make the config's environment once, so that it can refuse its settings.

    Raises:
        ConfigError: it does not exist or does not take its settings.
    """
    from gymnasium.error import Error

    try:
        _make(env)
    except (Error, ImportError, AttributeError) as error:
        raise ConfigError(
            f"env.target={env.target}: {error}; give a gymnasium id such as envs:ragen/FrozenLake-v0, "
            "or a class path such as my_package.my_module.MyEnv"
        ) from error
    except Exception as error:  # whatever an environment's own constructor raises
        text = str(error).split(" was raised from the environment creator")[0]
        raise ConfigError(f"env.kwargs of {env.target}: {text}") from error


def check_agreement(cfg: DictConfig) -> None:
    """Check that processes which torchrun or srun have started know the run's folder.

    Raises:
        ConfigError: each would name one of its own.
    """
    outside = started_outside()
    named = cfg.paths.run_dir or cfg.ckpt_path or os.environ.get(RUN_DIR)
    if outside > 1 and not named:
        raise ConfigError(
            f"paths.run_dir=null: {outside} processes were started from outside (torchrun, srun), and each would name "
            "a folder of its own; set paths.run_dir"
        )


def check_adapters(cfg: DictConfig) -> None:
    """Check that adapters can be put in.

    Raises:
        ConfigError: LoRA is asked for, and peft is not installed.
    """
    if OmegaConf.select(cfg, "model.build.lora") is not None and find_spec("peft") is None:
        raise ConfigError(
            "model.build.lora: peft is not installed; pip install 'ragen_pl[lora]', or set null"
        )


def check_world_model(cfg: DictConfig) -> None:
    """Check that a reward for true statements has statements, and a truth to hold them against.

    Raises:
        ConfigError: the prompt format has no such block, or the environment no `relations()`.
    """
    wanted = (("grounding_weight", "grounding"), ("worldmodeling_weight", "worldmodeling"))
    for weight, word in wanted:
        value = OmegaConf.select(cfg, f"algorithm.rewards.world_model.{weight}")
        if not value:
            continue
        if word not in str(cfg.env.prompt_format):
            raise ConfigError(
                f"algorithm.rewards.world_model.{weight}={value}: a response in "
                f"env.prompt_format={cfg.env.prompt_format} has no such block; "
                f"set env.prompt_format={word} or grounding_worldmodeling"
            )
        environment = _make(cfg.env).unwrapped
        if not hasattr(environment, "relations"):
            raise ConfigError(
                f"algorithm.rewards.world_model.{weight}={value}: {type(environment).__name__} has no "
                f"relations() to compare statements with; give it one, or set algorithm.rewards.world_model.{weight}=0"
            )


def check_monitor(cfg: DictConfig) -> None:
    """Check that a collapse monitor has readings, and that each alarm has one limit.

    Raises:
        ConfigError: `callbacks.diagnostics` is left out, or an alarm has no limit or two.
    """
    callbacks = cfg.get("callbacks") or {}
    monitor = callbacks.get("collapse")
    if not monitor:
        return
    if not callbacks.get("diagnostics"):
        raise ConfigError(
            "callbacks.diagnostics=null: callbacks.collapse reads it; set callbacks.collapse=null too"
        )
    for name, alarm in (monitor.get("alarms") or {}).items():
        if alarm and (alarm.get("below") is None) == (alarm.get("above") is None):
            raise ConfigError(
                f"callbacks.collapse.alarms.{name}: expected one of below and above; set the other to null"
            )
        reading = str(alarm.get("reading") or "") if alarm else ""
        readings = declared_readings()
        if reading and not any(fnmatchcase(reading, known) for known in readings):
            near = get_close_matches(reading, readings, n=1)
            raise ConfigError(
                f"callbacks.collapse.alarms.{name}.reading={reading}: no such reading; "
                + (f"did you mean {near[0]}?" if near else "docs/diagnostics.md has them all")
            )


def check_anchor_states(cfg: DictConfig) -> None:
    """Check that an estimator which compares turns from the same state can tell states apart.

    Raises:
        ConfigError: the environment has no `state_key()`.
    """
    estimator = class_named(cfg, "algorithm.estimator")
    if estimator != "GroupInGroup":
        return
    environment = _make(cfg.env).unwrapped
    if not hasattr(environment, "state_key"):
        raise ConfigError(
            f"algorithm.estimator={estimator}: {type(environment).__name__} has no state_key() to tell by which turns "
            "began in the same state; give it one, or set algorithm=grpo"
        )


def _make(env: DictConfig) -> gymnasium.Env[object, object]:
    import gymnasium

    settings = OmegaConf.to_container(env.kwargs, resolve=True) if env.get("kwargs") else {}
    assert isinstance(settings, dict)
    target, kwargs = str(env.target), {str(name): value for name, value in settings.items()}
    if "/" in target or target in gymnasium.registry:
        made: gymnasium.Env[object, object] = gymnasium.make(
            target, disable_env_checker=True, **kwargs
        )
        return made
    module, _, name = target.rpartition(".")
    if not module:
        raise ImportError(f"there is no environment {target!r}")
    made = getattr(import_module(module), name)(**kwargs)
    return made
