"""Repeat a recorded optimizer step of one rank, in one process, and report where it is not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ragen_pl.assembly.build import (
    assemble_agent,
    assemble_warm_start,
    build_critic,
    build_policy,
    device_named,
)
from ragen_pl.assembly.weights import (
    build_for,
    check_frozen,
    check_shapes,
    load_initial_weights,
    module_state,
    read_checkpoint,
)
from ragen_pl.base.phases import wide_console
from ragen_pl.base.settings_files import SETTINGS, settings_of_weights
from ragen_pl.checkpoints.folder import Run, run_of
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.config.own_files import is_own, is_own_folder, run_settings
from ragen_pl.config.trust import check_folder, check_settings
from ragen_pl.data.recorded_step import RecordedStep
from ragen_pl.engines.protocol import EnginePolicy
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.frozen import FINGERPRINTS, Fingerprint, fingerprints, with_frozen
from ragen_pl.modules.optimized import UPDATE, OptimizedModule
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.recording import Finding, find, repeat
from ragen_pl.modules.tracing import StepTrace
from ragen_pl.run.train import quieten
from ragen_pl.run.trainer import build_trainer
from ragen_pl.tracking.checkpoints import group_of

log = logging.getLogger(__name__)
# groups of a run's config that a step is repeated with, and what of them is not used
_GROUPS = (
    "env",
    "model",
    "critic",
    "algorithm",
    "optimizer",
    "rollout",
    "update",
    "warm_start",
    "trainer",
)
_USED = {
    "env": ("target", "prompt_format"),
    "trainer": ("precision", "accumulate_grad_batches"),
}
_UNUSED = {
    "rollout": ("engine",),
    "algorithm": ("rewards", "filter"),
    "warm_start": ("demonstrator", "records", "weights"),
}
_SHIPPED = ("env/*", "model/*", "algorithm/*", "algorithm/defaults/*", "warm_start/*", "fit")
_HINT = "give a file of a run's bad_batch or batches folder"
# Columns of a log, which has no width of its own.
_WIDTH = 160


@dataclass(slots=True)
class Models:
    """Policy and critic that weights are loaded into."""

    policy: PolicyModule
    critic: CriticModule | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded optimizer step that is repeated.

    Attributes:
        step: An optimizer step, as one rank has taken it.
        weights: Weights before the step.
        fingerprints: Fingerprints of the weights that are left out of these.
        run: The run's folder.
        settings: The config of the start that it is of.
    """

    step: RecordedStep
    weights: Mapping[str, Tensor]
    fingerprints: Mapping[str, Fingerprint]
    run: Path
    settings: Path


def replay(cfg: DictConfig) -> Finding | None:
    """Repeat a step, print the norms of each part, and return its first number that is not finite.

    Raises:
        ConfigError: There is nothing to repeat, or its weights are those of another model.
    """
    quieten()
    recorded = read_batch(cfg)
    settings = read_settings(recorded.settings, trusted=cfg.trust)
    columns = {"as in the run": None} | ({cfg.dtype: cfg.dtype} if cfg.dtype else {})
    traces: dict[str, list[StepTrace]] = {}
    for title, dtype in columns.items():
        module = build_module(
            settings, recorded, dtype=dtype, device=device_named(cfg.device), trusted=cfg.trust
        )
        traces[title] = repeat(module, in_type(recorded.step, dtype))
    return report(recorded.step, traces, console=wide_console(_WIDTH))


def read_batch(cfg: DictConfig) -> Recorded:
    """Return the step of `batch=FILE`."""
    if cfg.batch is None:
        raise ConfigError(
            "batch has no value; set batch=FILE of a run's bad_batch or batches folder"
        )
    file = Path(cfg.batch).expanduser().absolute()
    place = f"batch={cfg.batch}"
    with config_errors(place, hint=_HINT):
        step = RecordedStep.read(file)
    run = _run_folder(cfg, file, place)
    saved = read_checkpoint(file.with_name(step.weights), source=place, hint=_HINT)
    settings = settings_of_weights(run, saved.get(SETTINGS))
    return Recorded(step, module_state(saved), saved.get(FINGERPRINTS, {}), run, settings)


def _run_folder(cfg: DictConfig, file: Path, place: str) -> Path:
    run = Path(cfg.paths.run_dir).expanduser().absolute() if cfg.paths.run_dir else run_of(file)
    if run is None or not (run / "config.yaml").exists():
        raise ConfigError(
            f"{place}: no run's config.yaml next to it; set paths.run_dir=… of the run"
        )
    return run


def read_settings(file: Path, *, trusted: bool) -> DictConfig:
    """Return the config of a run.

    Raises:
        ConfigError: It cannot be read, or somebody else's names code that no shipped configuration names.
    """
    settings = run_settings(file)
    for name in _GROUPS:
        group_of(settings, name, file=file)
    if not (trusted or is_own_folder(file)):
        check_folder(file.parent, key=str(file.parent))
    if not (trusted or is_own(file)):
        settings = _used(settings)
        check_settings(settings, file=file, given=None, shipped=_SHIPPED)
    read = OmegaConf.create(settings)
    assert isinstance(read, DictConfig)
    return read


def _used(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a step is repeated with; what is left out here can't act."""
    used = {name: value for name, value in settings.items() if not isinstance(value, dict | list)}
    for name in _GROUPS:
        kept, left_out = _USED.get(name, settings[name]), _UNUSED.get(name, ())
        used[name] = {
            key: value
            for key, value in settings[name].items()
            if key in kept and key not in left_out
        }
    return used


def build_module(
    settings: DictConfig,
    recorded: Recorded,
    *,
    dtype: str | None,
    device: torch.device,
    trusted: bool = False,
) -> OptimizedModule:
    """Build the training module of a run and load its weights.

    Args:
        settings: Config of the run.
        recorded: What is repeated.
        dtype: Type of all weights and computations; None for the run's own.
        device: Where to compute.
        trusted: Whether the config is taken as it is, whoever wrote it.
    """
    build = partial(build_for, recorded.weights, settings=None if trusted else recorded.settings)
    with config_errors("model"):
        bundle = build(settings)
        critic = build_critic(settings, bundle, build=partial(build, key="critic.build"))
        models = Models(build_policy(bundle, settings["update"]), critic)
    module: OptimizedModule
    if recorded.step.phase == UPDATE:
        run = Run(recorded.run)
        if run.warm_start.exists():
            # the reference is a copy of them
            load_initial_weights(models, run.warm_start, source=str(run.warm_start))
        module = assemble_agent(settings, models.policy, models.critic, engine=_no_engine)
    else:
        module = assemble_warm_start(settings, models.policy, models.critic)
    complete = with_frozen(module, recorded.weights)
    hint = "give the run that the step was recorded in as paths.run_dir"
    check_shapes(complete, module, source=str(recorded.run), hint=hint)
    check_frozen(recorded.fingerprints, fingerprints(module), source=str(recorded.run))
    module.load_state_dict(complete)
    module.trainer = build_trainer(
        {
            "accelerator": device.type,
            "devices": 1,
            "precision": settings.trainer.precision if dtype is None else "32-true",
        },
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module.setup("fit")
    if dtype is not None:
        module.to(getattr(torch, dtype))
    return module.to(device).train()


def _no_engine(
    policy: EnginePolicy,
    *,
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> NoReturn:
    """Stand for the run's engine, whose class the settings of somebody else may name."""
    raise RuntimeError("a repeated step samples nothing")


def in_type(step: RecordedStep, dtype: str | None) -> RecordedStep:
    """Return a step for a model in another type: the reference's states, which its head reads, are converted."""
    if dtype is None:
        return step
    kind: torch.dtype = getattr(torch, dtype)
    minibatches = [
        minibatch
        if minibatch.reference is None
        or minibatch.reference.ndim == 1
        or minibatch.reference_ids is not None
        else replace(minibatch, reference=minibatch.reference.to(kind))
        for minibatch in step.minibatches
    ]
    return replace(step, minibatches=minibatches)


# ---- report


def report(
    step: RecordedStep, traces: Mapping[str, Sequence[StepTrace]], *, console: Console
) -> Finding | None:
    """Print a step and return its first value that is not finite, as computed in the run.

    Args:
        step: The step.
        traces: What each of its minibatches showed, by the title of its columns.
        console: Where to print.
    """
    as_run = next(iter(traces.values()))
    finding = find(as_run)
    minibatch = finding.minibatch if finding is not None else 0
    shown = {title: of_minibatches[minibatch] for title, of_minibatches in traces.items()}
    name = f"iteration {step.iteration}" if step.iteration else step.phase
    losses = ", ".join(f"{trace.loss:.6g}" for trace in as_run)
    for line in (
        f"{name}, optimizer step {step.step}",
        f"rank {step.rank} of {step.ranks}: loss of each minibatch {losses}",
        f"parts in minibatch {minibatch + 1} of rank {step.rank}:",
    ):
        _print(console, line)
    console.print(table_of(shown))
    for title, trace in shown.items():
        place = trace.first_non_finite()
        result = "all numbers are finite" if place is None else f"the first not finite is {place}"
        _print(console, f"{title}: {result}")
    return finding


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def table_of(traces: Mapping[str, StepTrace]) -> Table:
    """Return a table of the norms of each part, with three columns for each trace."""
    table = Table()
    table.add_column("part", no_wrap=True)
    for title in traces:
        suffix = f", {title}" if len(traces) > 1 else ""
        for column in ("output", "its gradient", "weights' gradient"):
            table.add_column(column + suffix, justify="right")
    for name in dict.fromkeys(name for trace in traces.values() for name in trace.parts):
        cells = [cell for trace in traces.values() for cell in _cells(trace, name)]
        table.add_row(name, *cells)
    return table


def _cells(trace: StepTrace, name: str) -> Iterator[str]:
    part = trace.parts.get(name)
    yield "-" if part is None else f"{part.output:.4g}"
    yield "-" if part is None or part.gradient is None else f"{part.gradient:.4g}"
    own = [norm for weight, norm in trace.weights.items() if weight.rpartition(".")[0] == name]
    yield f"{torch.tensor(own, dtype=torch.float64).norm():.4g}" if own else "-"
