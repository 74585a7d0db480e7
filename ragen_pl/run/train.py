"""A run from its config: warm start, then rollouts and updates, then a summary.

Imported late: it loads torch, lightning and transformers.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from ragen_pl.assembly.build import (
    RunComponents,
    assemble,
    build_agent,
    build_datamodule,
    build_loggers,
    build_named,
    build_validation_set,
    build_warm_start,
    check_opponents,
    check_optimizer,
    with_words,
)
from ragen_pl.assembly.start_check import TrainerCheck, check_images
from ragen_pl.assembly.weights import check_resumable, load_initial_weights
from ragen_pl.base.distributed import errors_told, on_first_rank
from ragen_pl.base.error_text import error_text
from ragen_pl.base.files import atomic_write
from ragen_pl.base.finite import NonFiniteError
from ragen_pl.base.foreign_files import ForeignFileError
from ragen_pl.base.instances import instances
from ragen_pl.base.seeding import seeded
from ragen_pl.base.settings_files import SETTINGS, newest_settings
from ragen_pl.base.stop_signals import Stopped, ending, stop_behind
from ragen_pl.callbacks.checkpoint import BestCheckpoint, RunCheckpoint
from ragen_pl.callbacks.collapse import Action, CollapseMonitor
from ragen_pl.callbacks.random_state import RandomState
from ragen_pl.callbacks.summary import RunSummary
from ragen_pl.callbacks.unused_weights import UnusedWeights
from ragen_pl.checkpoints.checkpoint_check import problem_of, text_in
from ragen_pl.checkpoints.folder import (
    Run,
    configured_run,
    is_launched,
    run_of,
    sharing_with_children,
)
from ragen_pl.checkpoints.lock import hold
from ragen_pl.checkpoints.rank_states import RankStatesError
from ragen_pl.checkpoints.sharded_checkpoint import remove_leftovers, write_tensors
from ragen_pl.checkpoints.starts import beginning_of, config_digest, counted_start, is_refusal
from ragen_pl.config.ending import PLAIN
from ragen_pl.config.environments import environment_configs, environment_nodes, is_mixture
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.config.nodes import plain
from ragen_pl.config.own_files import is_own_folder
from ragen_pl.config.settings import read_settings
from ragen_pl.config.start_settings import keep_settings
from ragen_pl.data.settings import WarmStartSettings
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.errors import RolloutError
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.metrics.proportions import objective
from ragen_pl.metrics.record import inherit
from ragen_pl.modules.frozen import FINGERPRINTS, without_frozen
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.sharding import is_sharded
from ragen_pl.ranks import ranks
from ragen_pl.run.baselines import baseline_metrics, warn_of_garbage
from ragen_pl.run.checks import check_space
from ragen_pl.run.ending import end_of_non_finite, how_to_go_on, report_stop
from ragen_pl.run.last_weights import LastWeights, write_metrics
from ragen_pl.run.reports import report_accelerator, report_template, report_views
from ragen_pl.run.trainer import LIMITS, build_trainer
from ragen_pl.tracking.mlflow_run import check_address

log = logging.getLogger(__name__)


@runtime_checkable
class ClosesAtEnd(Protocol):
    """Logger that sends its remaining records at the end of a run, after all of its phases."""

    def close(self) -> None:
        """Send it, in a limited time."""


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run that has ended.

    Attributes:
        metrics: The last metrics, those of the held-out validation set as `val/…` among them.
        folder: The run's folder. `python -m ragen_pl.evaluate ckpt=FOLDER` and the other commands take it.
        policy: The policy with the last weights.
    """

    metrics: dict[str, float] = field(repr=False)
    folder: Path
    policy: PolicyModule = field(repr=False)

    @property
    def objective(self) -> float | None:
        """The success on the held-out validation set, or the return where the environment reports no success."""
        return objective(self.metrics, "val/")

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint, from which `ckpt_path` resumes."""
        return Run(self.folder).last


def train(cfg: DictConfig, *, checkpoint_bytes: int | None = None) -> TrainedRun:
    """Run the whole job.

    Args:
        cfg: Its checked configuration.
        checkpoint_bytes: Planned size of a checkpoint, if known. The disk must have room for those that are kept.
    """
    start = time.perf_counter()
    # the folder keeps the words: later commands may use another environment, or a class with other words
    cfg = with_words(cfg)
    # asked before `shared` marks what this process starts as launched; who launched a rank has checked and reported
    first, launched = ranks.is_first(), is_launched()
    run = configured_run(cfg, make=first and not launched)
    opened = open_run(cfg, run) if first else nullcontext()
    shared = sharing_with_children(run.folder, checkpoint=run.checkpoint)
    with opened, shared, errors_with_remedy(cfg, run):
        quieten()
        if not launched:
            ranks.agree(cfg, run)
        check_start(cfg)
        if first and checkpoint_bytes is not None:
            check_space(run.folder, checkpoint=checkpoint_bytes, kept=kept_checkpoints(cfg))
        if first:
            log.info("building the model")
        components = build(cfg)
        loggers = build_loggers(cfg, run)
        if first and not launched:
            report_views(run, loggers)
        with closing_at_end(loggers):
            components = warm_start(components, run, loggers)
            metrics = reinforce(components, run, loggers, start=start)
    return TrainedRun(metrics, run.folder, components.policy)


@contextmanager
def errors_with_remedy(cfg: DictConfig, run: Run) -> Iterator[None]:
    """Tell an error of the block to all ranks, and say in it how the run can be resumed."""
    with errors_told(ranks.report):
        ranks.set_remedy(lambda: how_to_go_on(run))
        try:
            yield
        except (RolloutError, RankStatesError) as error:
            raise ConfigError(str(error)) from error
        except ForeignFileError as error:
            raise ConfigError(f"{error}; {PLAIN}") from error
        except NonFiniteError as error:
            raise ConfigError(end_of_non_finite(error, run)) from error
        except SystemExit as error:
            # after a signal, or another rank's error
            code = report_stop(error, run)
            if code == error.code:
                raise
            raise SystemExit(code) from error
        except Exception as error:
            if (stop := stop_behind(error)) is not None:
                raise SystemExit(report_stop(stop, run)) from error
            if not isinstance(error, ConfigError):
                if "timed out" in error_text(error).lower():  # of gloo
                    error.add_note(
                        f"see trainer.timeout_s={cfg.trainer.timeout_s:g} if a rank waited for another one"
                    )
                error.add_note(how_to_go_on(run))
            raise


def check_start(cfg: DictConfig) -> None:
    """Check what needs no model, and say where the run computes."""
    report_accelerator(cfg.trainer.get("accelerator", "auto"))
    check_optimizer(cfg.optimizer, key="optimizer")
    if cfg.warm_start.enabled:
        check_optimizer(cfg.warm_start.optimizer, key="warm_start.optimizer")


def build(cfg: DictConfig) -> RunComponents:
    """Build the model, its environments and validation sets."""
    with config_errors("model, context or validation set"):
        components = assemble(cfg)
    report_template(components.proxy.context)
    return components


@contextmanager
def open_run(cfg: DictConfig, run: Run) -> Iterator[None]:
    """Create a run's folder, hold its lock in the block, write the config into it and note the start.

    The config of a start that refuses it is removed, unless it is the run's first one or weights were written with it.

    Raises:
        ConfigError: Another process trains in the folder, or the run has failed at the same place again and again.
    """
    config = run.folder / "config.yaml"
    is_run = run.resumed or os.path.lexists(config)
    if is_run and not (cfg.trust or is_own_folder(config)):
        from ragen_pl.config.trust import check_folder

        check_folder(run.folder, key=f"paths.run_dir={run.folder}")
        if cfg.logger and not cfg.logger.get("uri"):
            check_address(run.folder, cfg.paths.root)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    with hold(run.folder):
        remove_leftovers(run.folder)
        if run.checkpoint is not None and (source := run_of(run.checkpoint)) is not None:
            inherit(run.folder, source)
        remove_leftovers(run.checkpoints)
        before = newest_settings(run.folder)
        kept, difference = keep_settings(cfg, run.folder, resumed=run.resumed)
        if difference is not None:
            log.warning(difference)
        if run.passed_over is not None:
            log.warning(f"{run.passed_over}; the run continues from {run.checkpoint}")
        start = {"begins": beginning_of(run), "config": config_digest(cfg)}
        failures = cfg.trainer.get("max_starts")
        try:
            with counted_start(run.folder, **start, settings=kept.name, max_failures=failures):
                yield
        except ConfigError as error:
            files = (*run.checkpoints.glob("*.ckpt"), run.warm_start, run.warm_start_checkpoint)
            used = {before.name, *(text_in(file, SETTINGS) for file in files)}
            if is_refusal(error) and kept.name not in used:
                kept.unlink(missing_ok=True)
            raise


def kept_checkpoints(cfg: DictConfig) -> int:
    """Return the number of checkpoints that a run keeps, without those that it keeps without limit."""
    callbacks = build_named(cfg.callbacks)
    kinds = instances(callbacks, pl.callbacks.ModelCheckpoint)
    kept = sum(bool(one.save_last) + max(0, one.save_top_k) for one in kinds)
    if is_mixture(cfg.env) and cfg.callbacks.get("best"):
        kept += len(environment_nodes(cfg.env))
    monitors = instances(callbacks, CollapseMonitor)
    return kept + sum(Action.ROLLBACK in one.actions for one in monitors)


@contextmanager
def closing_at_end(loggers: Sequence[Logger]) -> Iterator[None]:
    """Close the loggers that have a connection to close, after all phases of the run."""
    try:
        yield
    except Stopped:
        ending()
        raise
    finally:
        for logger in instances(loggers, ClosesAtEnd):
            logger.close()


def warm_start(components: RunComponents, run: Run, loggers: Sequence[Logger]) -> RunComponents:
    """Load the run's initial weights; learn them from demonstrations or records if there are none yet.

    Returns:
        The components to go on with: other ones if the weights were sharded for the warm start.
    """
    settings, weights = read_settings(WarmStartSettings, components.cfg.warm_start), run.warm_start
    if not settings.enabled:
        return components
    if settings.weights is not None and not run.has_initial_weights:
        given = Path(settings.weights).expanduser()
        source = f"warm_start.weights={settings.weights}"
        hint = "give the file of a run with the same model and algorithm"
        load_initial_weights(components, given, source=source, hint=hint)
        _copy_initial_weights(given, weights)
        return components
    if not run.has_initial_weights:
        check_opponents(components)
        learn_from_demonstrations(components, run, loggers)
    if is_sharded(components.policy):
        components = assemble(components.cfg)
    load_initial_weights(components, weights, source=str(weights))
    return components


def learn_from_demonstrations(
    components: RunComponents, run: Run, loggers: Sequence[Logger]
) -> None:
    """Train policy and critic on demonstrations or records and write their weights into the run's folder."""
    cfg = components.cfg
    check_images(components.policy, components.proxy.environments)
    module, demonstrations = build_warm_start(components)
    checkpoint = run.warm_start_checkpoint
    resumed = run.resumed and checkpoint.exists()
    if resumed and (problem := problem_of(checkpoint)):
        log.warning(f"{problem}; the warm start begins anew")
        resumed = False
    if resumed:
        check_resumable(checkpoint, module, trusted=cfg.trust)
    shared = (
        "accelerator", "devices", "num_nodes", "strategy", "precision", "gradient_clip_val", "deterministic",
        "benchmark", "detect_anomaly", *LIMITS,
    )  # fmt: skip
    trainer = build_trainer(
        {name: value for name, value in plain(cfg.trainer).items() if name in shared},
        max_steps=cfg.warm_start.steps,
        max_epochs=-1,
        logger=list(loggers),
        log_every_n_steps=20,
        enable_model_summary=False,
        default_root_dir=run.folder,
        callbacks=[
            *callbacks_in_warm_start(build_named(cfg.callbacks)),
            RandomState(),
            RunCheckpoint(
                dirpath=str(run.folder),
                filename=checkpoint.stem,
                every_n_train_steps=cfg.warm_start.checkpoint_every_n_steps or 0,
                save_last=False,
            ),
            UnusedWeights(),
            TrainerCheck(
                components.policy, components.proxy.environments, context=plain(cfg.context)
            ),
        ],
    )
    # the seed of dropout
    with seeded(cfg.seed, "warm_start"):
        ckpt_path = checkpoint if resumed else None
        trainer.fit(
            module, datamodule=demonstrations, ckpt_path=ckpt_path, weights_only=not cfg.trust
        )
    module.check_weights()
    # every rank may have a part of it
    state = on_first_rank(trainer.strategy.lightning_module_state_dict())
    if trainer.is_global_zero:
        saved = {
            "module": without_frozen(module, state),
            FINGERPRINTS: module.fingerprints,
            "demonstrations": demonstrations.statistics,
            SETTINGS: newest_settings(run.folder).name,
        }
        write_tensors(saved, run.warm_start)
    trainer.strategy.remove_checkpoint(checkpoint)
    trainer.strategy.barrier()


def callbacks_in_warm_start(callbacks: Sequence[pl.Callback]) -> list[pl.Callback]:
    """Return those of a run's callbacks that the warm start uses too."""
    return [one for one in callbacks if isinstance(one, RolloutCallback) and one.in_warm_start]


@rank_zero_only
def _copy_initial_weights(given: Path, copy: Path) -> None:
    """Copy the initial weights into the run's folder. A resumed run then needs no other run's files."""
    with atomic_write(copy, durable=True) as file:
        shutil.copyfile(given, file)


def reinforce(
    components: RunComponents, run: Run, loggers: Sequence[Logger], *, start: float
) -> dict[str, float]:
    """Alternate rollouts and updates, then measure the last weights on every validation set."""
    cfg = components.cfg
    with config_errors("algorithm, optimizer or rollout"):
        agent, datamodule = build_agent(components), build_datamodule(components)
    if run.checkpoint is not None:
        check_resumable(run.checkpoint, agent, needed="agent", trusted=cfg.trust)
    summary = RunSummary(print_at_end=False)
    validates = cfg.trainer.get("limit_val_batches") != 0
    last = LastWeights(run, blank_set=_blank_set(components) if validates else None)
    callbacks = [RolloutUpdate(), UnusedWeights(), summary, last, *build_named(cfg.callbacks)]
    if cfg.callbacks.get("best"):
        # before all checkpoints: that of an iteration then holds their best scores
        callbacks[1:1] = map(BestCheckpoint.of_environment, agent.environments)
    for callback in instances(callbacks, pl.callbacks.ModelCheckpoint):
        callback.dirpath = str(run.checkpoints)
    trainer = build_trainer(
        plain(cfg.trainer),
        logger=list(loggers),
        callbacks=callbacks,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=run.folder,
    )
    digest = " ".join(one.digest() for one in components.validation_sets)
    for logger in loggers:
        logger.log_hyperparams({"validation_digest": digest})
    trainer.fit(agent, datamodule=datamodule, ckpt_path=run.checkpoint, weights_only=not cfg.trust)
    if validates and not last.metrics:
        # it had finished before
        if trainer.is_global_zero:
            log.info("validating the last weights")
        trainer.validate(agent, datamodule=datamodule, verbose=False)
    metrics = dict(last.metrics)
    if trainer.is_global_zero:
        baselines = (_scripted_baselines(components) if validates else {}) | last.blank
        for name, column in baselines.items():
            policy, _, environment = name.partition(", ")
            parts = [policy.replace(" ", "_"), *([environment] if environment else [])]
            metrics |= {"/".join([*parts, key]): value for key, value in column.items()}
        metrics["time/total_s"] = time.perf_counter() - start
        warn_of_garbage(metrics.get("val/return", math.inf), baselines)
        summary.show(trainer, references=baselines)
        write_metrics(metrics, run)
    return metrics


def _scripted_baselines(components: RunComponents) -> dict[str, dict[str, float]]:
    """Return the metrics of scripted policies by their names, in a mixture `<policy>, <environment>`."""
    rows: dict[str, dict[str, float]] = {}
    configs = environment_configs(components.cfg).values()
    for cfg, one in zip(configs, components.validation_sets, strict=True):
        own = baseline_metrics(cfg.validation.baselines, one)
        place = f", {one.name}" if one.environment else ""
        rows |= {f"{name}{place}": row for name, row in own.items()}
    return rows


def _blank_set(components: RunComponents) -> Callable[[], ValidationSet] | None:
    """Return a function that builds the validation set with blank images; None if there is none."""
    cfg = components.cfg
    if not cfg.validation.blank:
        return None
    return partial(
        build_validation_set,
        components.proxy,
        cfg.env,
        episodes=cfg.validation.episodes,
        blank_images=True,
    )


def quieten() -> None:
    """Suppress advice of Lightning and transformers that does not apply to this trainer."""
    for text in (
        "does not have many workers",
        "smaller than the logging interval",
        "in eval mode at the start",
        "LeafSpec",
        # metrics are summed over ranks before they are logged
        "recommended to use `self.log",
        "exists and is not empty",
        # a run that goes on in another folder keeps checkpoints of its own there
        "The dirpath has changed",
        # what FSDP2's modules return is read and not changed
        "returned a view tensor",
        # on a login node, where nothing runs by srun
        "`srun` command is available",
    ):
        warnings.filterwarnings("ignore", message=f".*{text}.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
