"""Play an evaluation's validation sets: the policy, its warm start and the scripted policies, on the same starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ragen_pl.config.errors import ConfigError
from ragen_pl.data.validation import ValidationSet
from ragen_pl.evaluation.checks import is_greedy, pass_ks, tracked_run
from ragen_pl.evaluation.mlflow_log import log_evaluation
from ragen_pl.evaluation.report import print_tables, write_report
from ragen_pl.evaluation.validation_sets import ValidationSettings, validation_settings
from ragen_pl.metrics.intervals import success_by_difficulty, validation_metrics
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedProxy
from ragen_pl.run.build import build_environments, engine_factory, plain, rollout_settings
from ragen_pl.run.weights import load_bundle, load_weights
from ragen_pl.trajectory import EpisodeStatus, Trajectory
from ragen_pl.viewing.page import PAGE, write_page
from ragen_pl.viewing.records import Origin, write_episodes

log = logging.getLogger(__name__)
POLICY, WARM_START, BLANKED = "policy", "warm start", "images blanked"


@dataclass(slots=True)
class Evaluation:
    """What an evaluation has found, as it is written to `evaluation.json`."""

    about: dict[str, Any]  # weights, sampling, where it was made
    validation_sets: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def first_success(self) -> float:
        """The policy's success on the first panel."""
        first: dict[str, Any] = next(iter(self.validation_sets.values()))["policies"]
        return float(first[POLICY]["success"])


class Evaluator:
    """Plays validation sets with one model.

    Args:
        cfg: settings of `conf/evaluate.yaml`.
        bundle: the policy.
        folder: where episodes are written.
    """

    def __init__(self, cfg: DictConfig, bundle: ModelBundle, *, folder: Path) -> None:
        self.cfg, self.bundle, self.folder = cfg, bundle, folder
        self.engine = engine_factory(cfg)(PolicyModule(bundle))
        self.context = ContextManager(bundle, **plain(cfg.context))
        self.greedy, self.pass_ks = is_greedy(cfg), pass_ks(cfg)
        self.evaluation = Evaluation(about=_about(cfg, greedy=self.greedy))

    def validation_set(self, settings: ValidationSettings, *, blank: bool = False) -> ValidationSet:
        """Return a validation set that plays in the environments its settings ask for."""
        cfg = self.cfg
        proxy = AgentProxy(
            environments=build_environments(
                OmegaConf.create({"env": settings.env}), blank_images=blank
            ),
            context=self.context,
            **rollout_settings(cfg),
        )
        return ValidationSet(
            settings.name, proxy, episodes=settings.episodes, key=settings.key,
            members=cfg.samples, greedy=self.greedy, options=settings.options,
        )  # fmt: skip

    def trained(
        self, settings: ValidationSettings, *, policy_name: str = POLICY
    ) -> list[Trajectory]:
        """Return the policy's episodes with the engine's present weights."""
        validation_set = self.validation_set(settings, blank=policy_name == BLANKED)
        self.engine.load_weights(0)
        return validation_set.proxy.rollout(
            self.engine,
            validation_set.starts,
            seed_key=("evaluate", self.cfg.seed),
            greedy=validation_set.greedy,
        )

    def scripted(self, settings: ValidationSettings, *, policy_name: str) -> list[Trajectory]:
        """Return a scripted policy's episodes; its draws are those of the training run's summary."""
        validation_set = self.validation_set(settings)
        proxy = ScriptedProxy(
            environments=validation_set.proxy.environments,
            context=self.context,
            max_response_tokens=validation_set.proxy.max_response_tokens,
            num_envs=validation_set.proxy.num_envs,
            scripted_policy=instantiate(self.cfg.validation.baselines[policy_name]),
        )
        return proxy.play(validation_set.starts, seed_key=("player", policy_name))

    def add(
        self, settings: ValidationSettings, policy_name: str, trajectories: list[Trajectory]
    ) -> None:
        """Take episodes into the evaluation.

        Raises:
            ConfigError: none of them could be played.
        """
        if all(one.status is EpisodeStatus.FAILED for one in trajectories):
            raise ConfigError(
                f"validation_sets.{settings.name}: every episode failed; the first said: {trajectories[0].error}"
            )
        told = self.evaluation.validation_sets.setdefault(
            settings.name, _validation(settings, self)
        )
        found: dict[str, Any] = dict(validation_metrics(trajectories, pass_ks=self.pass_ks))
        if levels := success_by_difficulty(trajectories):
            found["by_difficulty"] = {str(level): known for level, known in levels.items()}
        told["policies"][policy_name] = found

    def write(self, settings: ValidationSettings, trajectories: list[Trajectory]) -> None:
        """Write the policy's episodes as records, and a page to look at them."""
        folder = self.folder / settings.name
        origin = Origin(validation_set=settings.name)
        records = write_episodes(trajectories, folder, reader=self.context, origin=origin)
        title = f"{Path(self.evaluation.about['checkpoint']).stem}, validation set {settings.name}"
        write_page(records, folder / PAGE, title=title)


def evaluate(cfg: DictConfig) -> Evaluation:
    """Play all validation sets, print and write the tables, log them under the training run.

    Raises:
        ConfigError: the weights or a validation set can't be played.
    """
    bundle = load_bundle(cfg).to(device_named(cfg.device))
    folder = output_folder(cfg)
    evaluator = Evaluator(cfg, bundle, folder=folder)
    validation_sets = validation_settings(cfg)
    for settings, policy_name, trajectories in _played(evaluator, validation_sets):
        evaluator.add(settings, policy_name, trajectories)
        if policy_name == POLICY and cfg.trajectories:
            evaluator.write(settings, trajectories)
    evaluator.engine.close()
    evaluation = evaluator.evaluation
    evaluation.validation_sets = {
        one.name: evaluation.validation_sets[one.name] for one in validation_sets
    }
    print_tables(evaluation.about, evaluation.validation_sets)
    write_report(evaluation.about, evaluation.validation_sets, folder=folder)
    run = tracked_run(cfg)
    where = log_evaluation(evaluation.validation_sets, cfg=plain(cfg), folder=folder, run=run)
    log.info("%-11s%s", "written to", folder)
    log.info("%-11s%s", "MLflow", where)
    return evaluation


def _played(
    evaluator: Evaluator, validation_sets: list[ValidationSettings]
) -> Iterator[tuple[ValidationSettings, str, list[Trajectory]]]:
    """Yield the episodes of every player on every validation set, those with other weights last."""
    cfg = evaluator.cfg
    scripted = [
        name for name, policy_name in (cfg.validation.baselines or {}).items() if policy_name
    ]
    for settings in validation_sets:
        sighted = [POLICY, BLANKED] if cfg.validation.blank else [POLICY]
        for policy_name in sighted:
            yield (
                settings,
                policy_name,
                _timed(evaluator.trained, settings, policy_name=policy_name),
            )
        for policy_name in scripted:
            play = evaluator.scripted
            yield (
                settings,
                f"{policy_name} policy",
                _timed(play, settings, policy_name=str(policy_name)),
            )
    warm = Path(cfg.source.run) / "warm_start.pt" if cfg.source.run else None
    if cfg.validation.warm_start and warm is not None and warm.exists():
        load_weights(evaluator.bundle, warm)
        for settings in validation_sets:
            yield settings, WARM_START, _timed(evaluator.trained, settings, policy_name=WARM_START)


def _timed(play: Any, settings: ValidationSettings, *, policy_name: str) -> list[Trajectory]:
    began = perf_counter()
    try:
        trajectories: list[Trajectory] = play(settings, policy_name=policy_name)
    except (
        ValueError
    ) as error:  # what a model or context says that does not suit the validation set
        raise ConfigError(f"validation_sets.{settings.name}: {error}") from error
    seconds = perf_counter() - began
    log.info("%s: %s, %d episodes, %.1f s", settings.name, policy_name, len(trajectories), seconds)
    return trajectories


def _validation(settings: ValidationSettings, evaluator: Evaluator) -> dict[str, Any]:
    return {
        "env": settings.env,
        "starts": settings.episodes,
        "key": settings.key,
        "options": settings.options,
        "digest": evaluator.validation_set(settings).digest(),
        "set_aside": settings.set_aside(evaluator.cfg.source),
        "policies": {},
    }


def _about(cfg: DictConfig, *, greedy: bool) -> dict[str, Any]:
    return {
        "checkpoint": cfg.source.checkpoint or "untrained",
        "run": cfg.source.run,
        "greedy": greedy,
        "samples": cfg.samples,
        "temperature": None if greedy else cfg.rollout.temperature,
        "seed": cfg.seed,
    }


def output_folder(cfg: DictConfig) -> Path:
    """Return the folder of an evaluation's files: `to`, else a new one in the run, else under `paths.root`."""
    if cfg.to is not None:
        return Path(cfg.to).expanduser().absolute()
    home = Path(cfg.source.run) if cfg.source.run else Path(cfg.paths.root).absolute()
    stem = home / "evaluations" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    number, folder = 1, stem
    while folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}_{number}")
    return folder


def device_named(name: str) -> torch.device:
    """Return a device by its name; `auto` is the GPU where there is one.

    Raises:
        ConfigError: torch finds no CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no CUDA device; set device=cpu")
    return torch.device(name)
