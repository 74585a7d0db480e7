"""Play an evaluation's validation sets with the trained policy, its warm start and scripted policies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ragen_pl.assembly.build import (
    build_context,
    build_endpoint,
    build_engine,
    build_environments,
    build_proxy,
    device_named,
    episode_settings,
)
from ragen_pl.assembly.weights import load_bundle, load_weights
from ragen_pl.base.phases import phase
from ragen_pl.base.records import FILE, Origin, write_episodes
from ragen_pl.checkpoints.folder import Run, make_time_stamped
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import plain
from ragen_pl.config.settings import read_settings
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.protocol import RolloutEngine
from ragen_pl.evaluation.checks import has_weights
from ragen_pl.evaluation.mlflow_log import log_evaluation, tracked_run
from ragen_pl.evaluation.report import (
    BLANK_IMAGES,
    JSON,
    POLICY,
    WARM_START,
    print_tables,
    write_report,
)
from ragen_pl.evaluation.sampling import SamplingSettings
from ragen_pl.evaluation.validation_sets import ValidationSettings, validation_settings
from ragen_pl.metrics.intervals import success_by_difficulty, validation_metrics
from ragen_pl.metrics.proportions import objective
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import Context, TextContext
from ragen_pl.rollout.endpoint import ChatEndpoint
from ragen_pl.rollout.failures import errors_of, most_common
from ragen_pl.rollout.proxy import Progress, truncation_of
from ragen_pl.trajectory import Trajectory
from ragen_pl.viewing.page import PAGE, write_page

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Evaluation:
    """Results of an evaluation, in the form of `evaluation.json`.

    Attributes:
        about: Weights, sampling parameters and seed.
        validation_sets: Settings and metrics by the validation set's name.
    """

    about: dict[str, Any]
    validation_sets: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def objective(self) -> float:
        """The first policy's success on the first validation set, or its return where none is reported."""
        policies: dict[str, Any] = next(iter(self.validation_sets.values()))["policies"]
        value = objective(next(iter(policies.values())))
        assert value is not None
        return float(value)


@dataclass(frozen=True, slots=True)
class PlayedSet:
    """Episodes of a policy on a validation set."""

    settings: ValidationSettings
    policy: str
    trajectories: list[Trajectory]


class Evaluator:
    """Evaluation of one model on validation sets.

    Args:
        cfg: Settings of `conf/evaluate.yaml`.
        bundle: Model of the policy; None to evaluate an endpoint only.
        folder: Folder for the episodes.
        endpoint: Model behind an API.
    """

    def __init__(
        self,
        cfg: DictConfig,
        bundle: ModelBundle | None,
        *,
        folder: Path,
        endpoint: ChatEndpoint | None = None,
    ) -> None:
        self.cfg, self.bundle, self.folder, self.endpoint = cfg, bundle, folder, endpoint
        self.engine: RolloutEngine | None = None
        self.context: ContextManager | None = None
        if bundle is not None:
            self.context = build_context(bundle, cfg.context)
            self.engine = build_engine(cfg.rollout.engine, bundle)
        self.sampling = read_settings(SamplingSettings, cfg)
        self.evaluation = Evaluation(about=_about(cfg, greedy=self.sampling.is_greedy))

    def validation_set(self, settings: ValidationSettings, *, blank: bool = False) -> ValidationSet:
        """Return a validation set that plays in the environments of its settings."""
        return self._validation_set(
            settings,
            context=self.context or TextContext(),
            blank=blank,
        )

    def _validation_set(
        self, settings: ValidationSettings, *, context: Context, blank: bool = False, **changes: Any
    ) -> ValidationSet:
        environments = build_environments(
            OmegaConf.create(settings.env), blank_images=blank, record_states=True
        )
        return ValidationSet(
            settings.name,
            build_proxy(self.cfg.rollout, environments=environments, context=context, **changes),
            episodes=settings.episodes,
            key=settings.key,
            members=self.sampling.samples,
            greedy=self.sampling.is_greedy,
            options=settings.options,
        )

    @property
    def endpoint_row(self) -> str:
        """Name of the row of the model behind an API; a model of `ragen_pl.serve` is named as the policy."""
        assert self.endpoint is not None
        others = {POLICY, BLANK_IMAGES, WARM_START, *(self.cfg.validation.baselines or {})}
        model = self.endpoint.model
        return f"{model} (API)" if model in others else model

    @property
    def shown_policy(self) -> str:
        """Name of the policy whose episodes are written."""
        return POLICY if self.endpoint is None or self.engine is not None else self.endpoint_row

    def close(self) -> None:
        """End the engine and the endpoint."""
        if self.engine is not None:
            self.engine.close()
        if self.endpoint is not None:
            log.info("%s: %s", self.endpoint.model, self.endpoint.usage)
            self.endpoint.close()

    def play(self) -> Iterator[PlayedSet]:
        """Yield the episodes of every policy on every validation set, the warm start last.

        Raises:
            ConfigError: The model can't play a validation set.
        """
        validation_sets = validation_settings(self.cfg)
        for settings in validation_sets:
            if self.engine is not None:
                yield self._timed(settings, POLICY, partial(self._sampled, settings))
                if self.cfg.validation.blank:
                    blank = partial(self._sampled, settings, blank=True)
                    yield self._timed(settings, BLANK_IMAGES, blank)
            if self.endpoint is not None:
                asked = partial(self._asked, settings, self.endpoint)
                yield self._timed(settings, self.endpoint_row, asked)
            for name, baseline in (self.cfg.validation.baselines or {}).items():
                if baseline:
                    scripted = partial(self._scripted, settings, str(name))
                    yield self._timed(settings, str(name), scripted)
        if self._load_warm_start():
            for settings in validation_sets:
                yield self._timed(settings, WARM_START, partial(self._sampled, settings))

    def _sampled(
        self, settings: ValidationSettings, progress: Progress, *, blank: bool = False
    ) -> list[Trajectory]:
        """Return the model's episodes with its present weights."""
        assert self.engine is not None
        validation_set = self.validation_set(settings, blank=blank)
        self.engine.load_weights(0)
        return validation_set.play(
            self.engine, version=0, seed_key=("evaluate", self.cfg.seed), progress=progress
        )

    def _asked(
        self, settings: ValidationSettings, endpoint: ChatEndpoint, progress: Progress
    ) -> list[Trajectory]:
        """Return the episodes of the model behind an API."""
        validation_set = self._validation_set(
            settings, context=endpoint.context, max_response_tokens=endpoint.max_tokens
        )
        return validation_set.play_endpoint(
            endpoint, seed_key=("evaluate", self.cfg.seed), progress=progress
        )

    def _scripted(
        self, settings: ValidationSettings, name: str, progress: Progress
    ) -> list[Trajectory]:
        """Return a scripted policy's episodes; its random draws are those of the training run's summary."""
        policy = instantiate(self.cfg.validation.baselines[name])
        return self.validation_set(settings).play_scripted(policy, name=name, progress=progress)

    def _load_warm_start(self) -> bool:
        """Load the weights of the run's warm start, and return whether there are any."""
        run = self.cfg.source.run
        if not self.cfg.validation.warm_start or run is None or self.bundle is None:
            return False
        file = Run(Path(run)).warm_start
        if file.exists():
            load_weights(self.bundle, file)
        return file.exists()

    def _timed(
        self,
        settings: ValidationSettings,
        policy: str,
        play: Callable[[Progress], list[Trajectory]],
    ) -> PlayedSet:
        count = settings.episodes * self.sampling.samples
        try:
            with phase(f"{settings.name}: {policy}", count) as progress:
                trajectories = play(progress)
        # Raised by a model or context that does not suit the environment, such as a text model with images.
        except ValueError as error:
            raise ConfigError(f"validation_sets.{settings.name}: {error}") from error
        return PlayedSet(settings, policy, trajectories)

    def add(self, played: PlayedSet) -> None:
        """Add the metrics of episodes to the evaluation, with what an endpoint was asked until then.

        Raises:
            ConfigError: Every episode failed.
        """
        settings, trajectories = played.settings, played.trajectories
        if self.endpoint is not None:
            self.evaluation.about["endpoint"] = {
                "model": self.endpoint.model,
                **self.endpoint.usage.report(),
            }
        errors = errors_of(trajectories)
        if len(errors) == len(trajectories):
            raise ConfigError(
                f"validation_sets.{settings.name}: every episode failed; most with {most_common(errors)}"
            )
        metrics: dict[str, Any] = dict(
            validation_metrics(trajectories, pass_ks=self.sampling.pass_ks)
        )
        if levels := success_by_difficulty(trajectories):
            metrics["by_difficulty"] = {str(level): success for level, success in levels.items()}
        validation_sets = self.evaluation.validation_sets
        if settings.name not in validation_sets:
            validation_sets[settings.name] = self._description(settings)
        validation_sets[settings.name]["policies"][played.policy] = metrics

    def _description(self, settings: ValidationSettings) -> dict[str, Any]:
        return {
            "env": settings.env,
            "initial_states": settings.episodes,
            "key": settings.key,
            "options": settings.options,
            "digest": self.validation_set(settings).digest(),
            "set_aside": settings.set_aside(self.cfg.source),
            "policies": {},
        }

    def write(self, played: PlayedSet) -> None:
        """Write the episodes as records, and a page that shows them."""
        name = played.settings.name
        records = write_episodes(
            played.trajectories,
            self.folder / name,
            reader=self.context if played.policy == POLICY else None,
            origin=Origin(validation_set=name, policy=played.policy),
        )
        write_page(records, self.folder / name / PAGE, title=self._title(name))

    def _title(self, validation_set: str) -> str:
        """Return the heading of a page: run, weights, validation set and time."""
        about = self.evaluation.about
        run = f"{'/'.join(Path(about['run']).parts[-2:])}, " if about["run"] else ""
        time = datetime.now().strftime("%Y-%m-%d %H:%M")
        # a model's name may have dots
        weights = Path(about["checkpoint"]).name.removesuffix(".ckpt")
        return f"{run}{weights}, validation set {validation_set}, evaluated {time}"


def evaluate(cfg: DictConfig) -> Evaluation:
    """Play all validation sets, print and write the tables, log them under the training run.

    The tables of what was played are written where a later set fails, or the command is interrupted.

    Raises:
        ConfigError: The weights can't be loaded, or a validation set can't be played.
    """
    endpoint, bundle = build_endpoint(cfg), None
    if has_weights(cfg):
        log.info("loading the model")
        bundle = load_bundle(cfg).to(device_named(cfg.device))
    folder = output_folder(cfg)
    evaluator = Evaluator(cfg, bundle, folder=folder, endpoint=endpoint)
    evaluation = evaluator.evaluation
    # of an earlier evaluation in this folder, for whose episodes those of this one would be taken
    names = [settings.name for settings in validation_settings(cfg)]
    for file in (JSON, *(f"{name}/{each}" for name in names for each in (FILE, PAGE))):
        (folder / file).unlink(missing_ok=True)
    with closing(evaluator):
        for played in evaluator.play():
            evaluator.add(played)
            if played.policy == evaluator.shown_policy and cfg.trajectories:
                evaluator.write(played)
            write_report(evaluation.about, evaluation.validation_sets, folder=folder)
    print_tables(evaluation.about, evaluation.validation_sets)
    run = tracked_run(cfg)
    location = log_evaluation(
        evaluation.validation_sets,
        cfg=plain(cfg),
        folder=folder,
        run=run,
        of=None if run is None or cfg.trust else Path(cfg.source.run),
    )
    log.info("%-11s%s", "written to", folder)
    log.info("%-11s%s", "MLflow", location)
    return evaluation


def _about(cfg: DictConfig, *, greedy: bool) -> dict[str, Any]:
    kept = truncation_of(episode_settings(cfg.rollout))
    return {
        "checkpoint": cfg.source.checkpoint
        or ("untrained" if has_weights(cfg) else cfg.endpoint.model),
        "run": cfg.source.run,
        "greedy": greedy,
        "samples": cfg.samples,
        "temperature": None if greedy else cfg.rollout.temperature,
        "truncation": {} if greedy or kept is None else kept.limits(),
        "seed": cfg.seed,
    }


def output_folder(cfg: DictConfig) -> Path:
    """Return the folder for an evaluation's files: `to`, or a new one that is made in the run or under `paths.root`."""
    if cfg.to is not None:
        return Path(cfg.to).expanduser().absolute()
    home = Path(cfg.source.run) if cfg.source.run else Path(cfg.paths.root).expanduser().absolute()
    return make_time_stamped(home / "evaluations")
