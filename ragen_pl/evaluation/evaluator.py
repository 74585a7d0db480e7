"""Play an evaluation's panels: the policy, its warm start and the scripted players, on the same starts."""

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

from ragen_pl.assemble import build_environments, plain, rollout_settings
from ragen_pl.config.errors import ConfigError
from ragen_pl.data.panel import Panel
from ragen_pl.evaluation.panels import PanelSettings, panel_settings
from ragen_pl.evaluation.preflight import is_greedy, pass_ks, tracked_run
from ragen_pl.evaluation.records import Origin, write_episodes
from ragen_pl.evaluation.report import print_tables, write_report
from ragen_pl.evaluation.statistics import by_difficulty, figures
from ragen_pl.evaluation.tracking import log_evaluation
from ragen_pl.evaluation.weights import load_bundle, load_weights
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.pages.page import PAGE, write_page
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedProxy
from ragen_pl.rollout.transformers_engine import TransformersEngine
from ragen_pl.trajectory import Ending, Trajectory

log = logging.getLogger(__name__)
POLICY, WARM_START, BLANKED = "policy", "warm start", "pictures blanked"


@dataclass(slots=True)
class Evaluation:
    """What an evaluation has found, as it is written to `evaluation.json`."""

    about: dict[str, Any]  # weights, sampling, where it was made
    panels: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def first_success(self) -> float:
        """The policy's success on the first panel."""
        first: dict[str, Any] = next(iter(self.panels.values()))["players"]
        return float(first[POLICY]["success"])


class Evaluator:
    """Plays panels with one model.

    Args:
        cfg: settings of `conf/evaluate.yaml`.
        bundle: the policy.
        folder: where episodes are written.
    """

    def __init__(self, cfg: DictConfig, bundle: ModelBundle, *, folder: Path) -> None:
        self.cfg, self.bundle, self.folder = cfg, bundle, folder
        self.engine = TransformersEngine(bundle)
        self.context = ContextManager(bundle, **plain(cfg.context))
        self.greedy, self.pass_ks = is_greedy(cfg), pass_ks(cfg)
        self.evaluation = Evaluation(about=_about(cfg, greedy=self.greedy))

    def panel(self, settings: PanelSettings, *, blank: bool = False) -> Panel:
        """Return a panel that plays in the environments its settings ask for."""
        cfg = self.cfg
        proxy = AgentProxy(
            environments=build_environments(
                OmegaConf.create({"env": settings.env}), blank_images=blank
            ),
            context=self.context,
            **rollout_settings(cfg),
        )
        return Panel(
            settings.name, proxy, episodes=settings.episodes, key=settings.key,
            members=cfg.samples, greedy=self.greedy, options=settings.options,
        )  # fmt: skip

    def policy(self, settings: PanelSettings, *, player: str = POLICY) -> list[Trajectory]:
        """Return the policy's episodes with the engine's present weights."""
        panel = self.panel(settings, blank=player == BLANKED)
        self.engine.sync_weights(0)
        return panel.proxy.rollout(
            self.engine, panel.starts, seed_key=("evaluate", self.cfg.seed), greedy=panel.greedy
        )

    def scripted(self, settings: PanelSettings, *, player: str) -> list[Trajectory]:
        """Return a scripted player's episodes; its draws are those of the training run's summary."""
        panel = self.panel(settings)
        proxy = ScriptedProxy(
            environments=panel.proxy.environments,
            context=self.context,
            max_reply_tokens=panel.proxy.max_reply_tokens,
            max_lanes=panel.proxy.max_lanes,
            player=instantiate(self.cfg.panel.players[player]),
        )
        return proxy.play(panel.starts, seed_key=("player", player))

    def add(self, settings: PanelSettings, player: str, trajectories: list[Trajectory]) -> None:
        """Take episodes into the evaluation.

        Raises:
            ConfigError: none of them could be played.
        """
        if all(one.ending is Ending.FAILED for one in trajectories):
            raise ConfigError(
                f"panels.{settings.name}: every episode failed; the first said: {trajectories[0].error}"
            )
        told = self.evaluation.panels.setdefault(settings.name, _panel(settings, self))
        found: dict[str, Any] = dict(figures(trajectories, pass_ks=self.pass_ks))
        if levels := by_difficulty(trajectories):
            found["by_difficulty"] = {str(level): known for level, known in levels.items()}
        told["players"][player] = found

    def write(self, settings: PanelSettings, trajectories: list[Trajectory]) -> None:
        """Write the policy's episodes as records, and a page to look at them."""
        folder = self.folder / settings.name
        origin = Origin(panel=settings.name)
        records = write_episodes(trajectories, folder, reader=self.context, origin=origin)
        title = f"{Path(self.evaluation.about['checkpoint']).stem}, panel {settings.name}"
        write_page(records, folder / PAGE, title=title)


def evaluate(cfg: DictConfig) -> Evaluation:
    """Play all panels, print and write the tables, log them under the training run.

    Raises:
        ConfigError: the weights or a panel can't be played.
    """
    bundle = load_bundle(cfg).to(device_named(cfg.device))
    folder = output_folder(cfg)
    evaluator = Evaluator(cfg, bundle, folder=folder)
    panels = panel_settings(cfg)
    for settings, player, trajectories in _played(evaluator, panels):
        evaluator.add(settings, player, trajectories)
        if player == POLICY and cfg.trajectories:
            evaluator.write(settings, trajectories)
    evaluation = evaluator.evaluation
    evaluation.panels = {one.name: evaluation.panels[one.name] for one in panels}
    print_tables(evaluation.about, evaluation.panels)
    write_report(evaluation.about, evaluation.panels, folder=folder)
    run = tracked_run(cfg)
    where = log_evaluation(evaluation.panels, cfg=plain(cfg), folder=folder, run=run)
    log.info("%-11s%s", "written to", folder)
    log.info("%-11s%s", "MLflow", where)
    return evaluation


def _played(
    evaluator: Evaluator, panels: list[PanelSettings]
) -> Iterator[tuple[PanelSettings, str, list[Trajectory]]]:
    """Yield the episodes of every player on every panel, those with other weights last."""
    cfg = evaluator.cfg
    scripted = [name for name, player in (cfg.panel.players or {}).items() if player]
    for settings in panels:
        sighted = [POLICY, BLANKED] if cfg.panel.blank else [POLICY]
        for player in sighted:
            yield settings, player, _timed(evaluator.policy, settings, player=player)
        for player in scripted:
            play = evaluator.scripted
            yield settings, f"{player} player", _timed(play, settings, player=str(player))
    warm = Path(cfg.source.run) / "warm_start.pt" if cfg.source.run else None
    if cfg.panel.warm_start and warm is not None and warm.exists():
        load_weights(evaluator.bundle, warm)
        for settings in panels:
            yield settings, WARM_START, _timed(evaluator.policy, settings, player=WARM_START)


def _timed(play: Any, settings: PanelSettings, *, player: str) -> list[Trajectory]:
    began = perf_counter()
    try:
        trajectories: list[Trajectory] = play(settings, player=player)
    except ValueError as error:  # what a model or context says that does not suit the panel
        raise ConfigError(f"panels.{settings.name}: {error}") from error
    seconds = perf_counter() - began
    log.info("%s: %s, %d episodes, %.1f s", settings.name, player, len(trajectories), seconds)
    return trajectories


def _panel(settings: PanelSettings, evaluator: Evaluator) -> dict[str, Any]:
    return {
        "env": settings.env,
        "starts": settings.episodes,
        "key": settings.key,
        "options": settings.options,
        "digest": evaluator.panel(settings).digest(),
        "set_aside": settings.set_aside(evaluator.cfg.source),
        "players": {},
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
