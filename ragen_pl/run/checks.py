"""Checks of a run before its model is built: environment, components, tracking, folder and checkpoints."""

from __future__ import annotations

import logging
import math
import os
import shutil
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.machine import collection_paused
from ragen_pl.checkpoints.checkpoint_check import is_listed, number_in, problem_of
from ragen_pl.checkpoints.folder import RUN_DIR, Run, configured_run, is_launched, outside_processes
from ragen_pl.config.environments import environment_configs, environment_nodes, is_mixture
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.relations import ranks_asked_for
from ragen_pl.environments.check import check_environments
from ragen_pl.tracking.mlflow_process import logs_by, start_early
from ragen_pl.tracking.mlflow_run import known_run

log = logging.getLogger(__name__)
# bytes of three checkpoints of the small model with its optimizer, and of the metrics
_NEEDED_SPACE = 200 * 2**20


def check_run(cfg: DictConfig) -> None:
    """Check the requirements of a run. Everything but the components is checked before torch is imported.

    Raises:
        ConfigError: With the first thing that is wrong.
        FileNotFoundError: There is nothing to resume from.
    """
    if not is_launched():
        for name, env in environment_nodes(cfg.env).items():
            shown = name if name == env.target else f"{name} ({env.target})"
            log.info("checking %s", shown)
    check_validation_batches(cfg)
    environments = check_environments(cfg)
    check_files(cfg)
    if cfg.get("algorithm"):
        if not is_launched() and outside_processes() == 1 and logs_by(cfg.logger):
            start_early()
        if not is_launched():
            log.info("loading torch and the settings' classes")
        with collection_paused():
            from ragen_pl.assembly.component_checks import check_components

        check_components(cfg, environments)
    # a run's unsent records are kept
    if cfg.logger and not known_run(configured_run(cfg).folder):
        from ragen_pl.assembly.component_checks import check_logger

        check_logger(cfg)


def check_validation_batches(cfg: DictConfig) -> None:
    """Check that a fraction of the batches of a validation is one batch or more.

    Raises:
        ConfigError: It is less than one.
    """
    limit = OmegaConf.select(cfg, "trainer.limit_val_batches")
    if not isinstance(limit, float) or not 0 < limit < 1:
        return
    at_once, ranks = cfg.rollout.num_envs, max(ranks_asked_for(cfg), outside_processes())
    for name, alone in environment_configs(cfg).items():
        episodes = alone.validation.episodes
        batches = math.ceil(math.ceil(episodes / ranks) / at_once)
        if int(batches * limit) < 1:
            key = f"env.environments.{name}." if is_mixture(cfg.env) else ""
            raise ConfigError(
                f"trainer.limit_val_batches={limit}: is less than one batch, since a validation has {batches} "
                f"({key}validation.episodes={episodes}, rollout.num_envs={at_once} at once); set a number of batches, "
                "such as 1"
            )


def check_files(cfg: DictConfig) -> None:
    """Check the run's folder and the files that the run starts from.

    Raises:
        ConfigError: The folder cannot be written or holds another run, a file is damaged, or the run ends before its
            checkpoint.
        FileNotFoundError: There is nothing to resume from.
    """
    check_shared_folder(cfg)
    run = configured_run(cfg)
    check_folder(run.folder)
    check_unused(cfg, run)
    files = [
        (run.checkpoint, f"ckpt_path={cfg.ckpt_path}"),
        (run.warm_start, str(run.warm_start)),
    ]
    given = OmegaConf.select(cfg, "warm_start.weights")
    if given is not None and not run.has_initial_weights:
        weights = Path(str(given)).expanduser()
        if not weights.exists():
            raise ConfigError(f"warm_start.weights={given}: expected a path that exists")
        files.append((weights, f"warm_start.weights={given}"))
    for file, place in files:
        alone = outside_processes() == 1
        problem = problem_of(file, folders=alone) if file and is_listed(file) else None
        if problem:
            raise ConfigError(f"{place}: {problem}; give another one, or delete it and start anew")
    limit = OmegaConf.select(cfg, "trainer.max_epochs")
    done = (number_in(run.checkpoint, "epoch") or 0) if run.checkpoint else 0
    if limit is not None and 0 <= limit < done:
        raise ConfigError(
            f"trainer.max_epochs={limit}: {run.checkpoint} is of iteration {done + 1}; set {done + 1} or more, or give "
            "an earlier checkpoint"
        )


def check_unused(cfg: DictConfig, run: Run) -> None:
    """Check that a new run does not write over another one.

    Raises:
        ConfigError: Its folder holds one.
    """
    # the first rank of this run may have begun to write
    is_shared = RUN_DIR in os.environ or outside_processes() > 1
    if cfg.ckpt_path is None and not is_shared and run.has_started:
        raise ConfigError(
            f"paths.run_dir={cfg.paths.run_dir}: holds a run already; continue it by ckpt_path=last, or set "
            "another folder"
        )


def check_folder(
    folder: Path,
    *,
    place: str | None = None,
    hint: str = "set paths.root (or paths.run_dir) to a folder of yours",
) -> None:
    """Check that a folder can be written. It need not exist yet.

    Args:
        folder: An absolute path.
        place: Key and value that the folder follows from; None for the path itself.
        hint: Remedy for a folder that cannot be written.

    Raises:
        ConfigError: A file is in the way, the folder may not be written to, or the disk is full.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    name = place or str(folder)
    if not existing.is_dir():
        raise ConfigError(f"{name}: cannot be made, for {existing} is a file; {hint}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}: {existing} may not be written to; {hint}")
    free = shutil.disk_usage(existing).free
    if free < _NEEDED_SPACE:
        raise ConfigError(
            f"{name}: {free >> 20} MB are left on its disk, a run needs {_NEEDED_SPACE >> 20} MB for checkpoints; "
            f"make room, or {hint}"
        )


def check_space(folder: Path, *, checkpoint: int, kept: int) -> None:
    """Check that the disk of a run's folder has room for its checkpoints. Those that it has are replaced.

    Args:
        folder: The run's folder, which exists.
        checkpoint: Planned bytes of one.
        kept: Number of them that are kept.

    Raises:
        ConfigError: There is too little.
    """
    used = sum(file.stat().st_size for file in folder.glob("checkpoints/**/*") if file.is_file())
    free = shutil.disk_usage(folder).free + used
    # one more while it is written
    needed = (kept + 1) * checkpoint
    if free < needed:
        raise ConfigError(
            f"paths.run_dir={folder}: {free / 1e9:.1f} GB are left on its disk, and {kept} checkpoints of "
            f"{checkpoint / 1e9:.1f} GB with one more in writing need {needed / 1e9:.1f} GB; make room, keep fewer "
            "(callbacks.checkpoint.save_top_k=0 callbacks.best=null), or set another folder"
        )


def check_new_folder(to: str | None, *, overwrite: bool) -> Path:
    """Check the folder that a command is to write, the setting `to`, and return its absolute path.

    Raises:
        ConfigError: There is none, it is not empty, or it cannot be written.
    """
    if to is None:
        raise ConfigError("to has no value; set to=FOLDER")
    folder = Path(to).expanduser().absolute()
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ConfigError(f"to={to}: the folder is not empty; give another, or set overwrite=true")
    check_folder(folder, place=f"to={to}", hint="give a folder that can be written")
    return folder


def check_shared_folder(cfg: DictConfig) -> None:
    """Check that all processes that torchrun, srun or a person on each machine started know the run's folder.

    Raises:
        ConfigError: Each process would name its own.
    """
    if cfg.paths.run_dir or os.environ.get(RUN_DIR):
        return
    nodes, processes = OmegaConf.select(cfg, "trainer.num_nodes", default=1), outside_processes()
    is_path = cfg.ckpt_path not in (None, "last", "auto")
    if nodes > 1 and not is_path:
        starters = f"{nodes} machines (trainer.num_nodes) start the run"
    elif processes > 1 and not cfg.ckpt_path:
        starters = f"{processes} processes were started from outside (torchrun, srun)"
    else:
        return
    raise ConfigError(
        f"paths.run_dir=null: {starters}, and each would name a folder of its own; set paths.run_dir to a folder that "
        "all of them share"
    )
