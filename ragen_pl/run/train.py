"""A run from its config: warm start, then rollout and update in turn, then a summary.

Imported late: it loads torch, lightning and transformers.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from ragen_pl.callbacks.summary import RunSummary
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.modules.agent import AgentModule
from ragen_pl.rollout.errors import RolloutError
from ragen_pl.run.baselines import baseline_metrics
from ragen_pl.run.build import (
    RunComponents,
    assemble,
    build_agent,
    build_callbacks,
    build_datamodule,
    build_warm_start,
    plain,
)
from ragen_pl.run.folder import RUN_DIR, Run, forget_sharing, locate, share_with_children
from ragen_pl.run.guards import (
    AS_IT_WAS,
    check_checkpoint,
    check_optimizer,
    load_initial_weights,
    stopped,
    warn_about_template,
)
from ragen_pl.seeding import seeded

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> dict[str, float]:
    """Run the whole job and return the last metrics, the objective of a sweep among them."""
    began = time.perf_counter()
    run = open_run(cfg)
    try:
        quieten()
        check_optimizer(cfg.optimizer, key="optimizer")
        if cfg.warm_start.enabled:
            check_optimizer(cfg.warm_start.optimizer, key="warm_start.optimizer")
        with config_errors("model, context or validation set"):
            parts = assemble(cfg)
        warn_about_template(parts)
        logger = build_logger(cfg, run)
        warm_start(parts, run, logger)
        return reinforce(parts, run, logger, began=began)
    except RolloutError as error:
        raise ConfigError(str(error)) from error
    except SystemExit as error:  # of Lightning, after SIGTERM or Ctrl-C
        raise SystemExit(stopped(error, run)) from error
    finally:
        forget_sharing()


def open_run(cfg: DictConfig) -> Run:
    """Find the run's folder, create it and write the config into it."""
    run = locate(
        root=cfg.paths.root,
        name=cfg.env.name,
        run_dir=cfg.paths.run_dir,
        ckpt_path=cfg.ckpt_path,
    )
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    # what a refused run has left is written over, by the first rank alone
    new = cfg.ckpt_path is None and RUN_DIR not in os.environ
    share_with_children(run.folder)
    config = run.folder / "config.yaml"
    if new or not config.exists():
        config.write_text(OmegaConf.to_yaml(cfg, resolve=True))
    return run


def build_logger(cfg: DictConfig, run: Run) -> Any:
    """Build the config's logger, or return False for none."""
    if not cfg.logger:
        return False
    settings = {"run_dir": str(run.folder), "settings": plain(cfg)}
    return instantiate(cfg.logger, **settings, _recursive_=False, _convert_="all")


def warm_start(parts: RunComponents, run: Run, logger: Any) -> None:
    """Begin from demonstrations or from another run's weights, or from what an earlier part of the run made of them."""
    cfg = parts.cfg.warm_start
    if not cfg.enabled:
        return
    own = run.warm_start
    if own.exists() and parts.cfg.ckpt_path:
        load_initial_weights(parts, own, said=str(own), hint=AS_IT_WAS)
    elif cfg.weights is not None:
        given = Path(cfg.weights).expanduser()
        load_initial_weights(
            parts, given, said=f"warm_start.weights={cfg.weights}", hint="give that of a like run"
        )
        _copy_initial_weights(given, own)
    else:
        learn_from_demonstrations(parts, run, logger)
        load_initial_weights(parts, own, said=str(own), hint=AS_IT_WAS)


def learn_from_demonstrations(parts: RunComponents, run: Run, logger: Any) -> None:
    """Train policy and critic on demonstrations and write their weights into the run's folder."""
    cfg = parts.cfg
    module, demonstrations = build_warm_start(parts)
    settings = plain(cfg.trainer)
    keep = ("accelerator", "devices", "num_nodes", "strategy", "precision", "gradient_clip_val")
    trainer = build_trainer(
        {name: settings[name] for name in keep if name in settings},
        max_steps=cfg.warm_start.steps,
        max_epochs=-1,
        logger=logger,
        log_every_n_steps=20,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=run.folder,
        callbacks=[
            callback
            for callback in build_callbacks(cfg)
            if getattr(callback, "in_warm_start", False)
        ],
    )
    with seeded(cfg.seed, "warm_start"):  # dropout
        trainer.fit(module, datamodule=demonstrations)
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        partial = run.warm_start.with_suffix(".partial")
        torch.save(
            {"module": module.state_dict(), "demonstrations": demonstrations.statistics},
            partial,
        )
        partial.replace(run.warm_start)
    trainer.strategy.barrier()


@rank_zero_only
def _copy_initial_weights(given: Path, own: Path) -> None:
    """Copy the weights that a run begins from into its folder, so that it needs nobody else's to go on."""
    partial = own.with_suffix(".partial")
    shutil.copyfile(given, partial)
    partial.replace(own)


def reinforce(parts: RunComponents, run: Run, logger: Any, *, began: float) -> dict[str, float]:
    """Alternate rollouts and updates, then measure the last weights on every panel."""
    cfg = parts.cfg
    with config_errors("algorithm, optimizer or rollout"):
        agent, datamodule = build_agent(parts), build_datamodule(parts)
    check_checkpoint(run.checkpoint, agent)
    summary = RunSummary(print_at_end=False)
    callbacks = [RolloutUpdate(), summary, *build_callbacks(cfg)]
    for callback in callbacks:
        if isinstance(callback, pl.callbacks.ModelCheckpoint):
            callback.dirpath = str(run.checkpoints)
    trainer = build_trainer(
        plain(cfg.trainer),
        logger=logger,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=run.folder,
    )
    if logger:
        logger.log_hyperparams({"validation_digest": parts.validation_sets[0].digest()})
    trainer.fit(agent, datamodule=datamodule, ckpt_path=run.checkpoint, weights_only=False)
    metrics = final_metrics(trainer, agent, datamodule)
    if trainer.is_global_zero:
        references = baseline_metrics(parts, agent, device=trainer.strategy.root_device)
        for name, column in references.items():
            metrics |= {f"{name.replace(' ', '_')}/{key}": value for key, value in column.items()}
        metrics["time/total_s"] = time.perf_counter() - began
        summary.show(trainer, references=references)
        file = run.folder / "figures.json"
        # a run that was finished before has no new metrics of its update
        known = json.loads(file.read_text()) if run.checkpoint and file.exists() else {}
        file.write_text(json.dumps(known | metrics, indent=1, sort_keys=True))
    return metrics


def final_metrics(
    trainer: pl.Trainer, agent: AgentModule, datamodule: pl.LightningDataModule
) -> dict[str, float]:
    """Return the run's last metrics, those of the validation set for its last weights."""
    metrics = dict(trainer.callback_metrics)
    told = any(name.startswith("val/") for name in metrics)
    if not told or trainer.current_epoch % (trainer.check_val_every_n_epoch or 1):
        # the run ended between two validations, or was finished before
        trainer.validate(agent, datamodule=datamodule, verbose=False)
        metrics |= trainer.callback_metrics
    return {name: float(value) for name, value in metrics.items()}


def build_trainer(settings: dict[str, Any], **own: Any) -> pl.Trainer:
    """Build a Trainer; what it refuses is the configuration's."""
    anywhere = "trainer.accelerator=cpu trainer.devices=1 trainer.strategy=auto run anywhere"
    with config_errors("trainer", hint=anywhere):
        return pl.Trainer(**settings, **own)


def quieten() -> None:
    """Leave out the advice of Lightning and transformers that does not apply to this trainer."""
    for text in (
        "does not have many workers",
        "smaller than the logging interval",
        "in eval mode at the start",
        "LeafSpec",
        "recommended to use `self.log",  # metrics are summed over ranks before they are logged
        "exists and is not empty",
    ):
        warnings.filterwarnings("ignore", message=f".*{text}.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
