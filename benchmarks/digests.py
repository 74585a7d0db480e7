"""Digests of small training runs, to check that a change of the code changes no result.

A case is one training run from its config, with three iterations on one thread. There is a case for every preset in
`conf/algorithm`, every environment in `conf/env` and every experiment in `conf/experiment`, and one for each entry of
`EXTRAS`, which enables what the presets leave off. A record contains SHA-256 digests of the trajectories, of the
validation rollouts, of the prepared batches and of the weights, and all logged metrics.

    python benchmarks/digests.py record before.json
    python benchmarks/digests.py record after.json
    python benchmarks/digests.py compare before.json after.json

Run `record` from the root of the repository. A full record takes about six minutes on one thread. `compare` ends with
exit code 1 if anything differs. Compare only records of the same machine
and library versions; others round differently.

`trajectory_values` and `batch_values` list the hashed values in a fixed order. If a field is renamed, rename it there;
the digests do not change. List renamed metrics in a JSON file for `--renamed`:

    {"update/kl_loss": "update/loss_kl", "rollout/": "train/", "rollout/turns": null, "cases": {"env/a": "env/b"}}

A name that ends in `/` is a prefix. null omits a metric from the comparison. The longest matching name applies.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatch
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.loggers.logger import Logger
from omegaconf import DictConfig

from ragen_pl.config import check_config, config_dir
from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.validation import VALIDATION_PURPOSE
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.models.build import build_small_lm
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.run.train import train
from ragen_pl.trajectory import Trajectory, Turn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OWN_ENVIRONMENTS = ROOT / "examples" / "own_environments"

TINY_TEXT = (
    "model.build.text.hidden_size=64", "model.build.text.intermediate_size=128",
    "model.build.text.num_attention_heads=2",
)  # fmt: skip
TINY_VISION = ("model.build.vision.width=48", "model.build.vision.heads=2")
SMALL = (
    "trainer.max_epochs=3", "trainer.check_val_every_n_epoch=2", "update.epochs=2", "update.minibatches=2",
    "validation.episodes=16", "warm_start.episodes=64", "warm_start.steps=60", "warm_start.batch_size=8",
    "warm_start.optimizer.lr=1e-2", "optimizer.lr=2e-3", "callbacks.progress=null", "callbacks.plots=null",
    "callbacks.trajectories=null", "callbacks.checkpoint=null", "callbacks.best=null",
)  # fmt: skip
SINGLES = ("rollout.groups=16",)
GROUPS = ("rollout.groups=4", "rollout.group_size=4")
SHORT = ("env.max_turns=4", "env.invalid_ends=false", "env.kwargs.min_distance=1")

ALGORITHMS, MODULES = "ragen_pl.algorithms", "ragen_pl.modules"
LOSS_MASK = f"algorithm.masks.loss._target_={ALGORITHMS}.masks"
CREDIT_MASK = f"algorithm.masks.advantage._target_={ALGORITHMS}.masks"
KL_MASK = f"algorithm.loss.kl.mask._target_={ALGORITHMS}.masks"
LOSS = f"algorithm.loss.policy._target_={ALGORITHMS}.ratio_losses"
BY = f"algorithm.normalize.by._target_={ALGORITHMS}.normalization"
KEEP = f"algorithm.filter.keep._target_={ALGORITHMS}.group_filter"
MISMATCH = f"+algorithm.loss.mismatch._target_={ALGORITHMS}.mismatch"
REFERENCE = f"algorithm.loss.kl.reference._target_={MODULES}.reference"
ADAPTIVE = "{_target_:ragen_pl.rollout.temperature.AdaptiveTemperature,beta:0.5}"
DROPOUT = "+model.build.text.attention_dropout=0.1"
TEXT, IMAGES = ("env=frozenlake", *SHORT), ("env=frozenlake_visual", *SHORT)
# Placeholder for the folder of a small language model.
SAVED_MODEL = "SAVED_MODEL"

# Settings that no preset uses. Independent settings share a case.
EXTRAS: dict[str, tuple[str, ...]] = {
    # critics, layouts, the update phase
    "own_critic": (
        *IMAGES,
        "algorithm=turn_ppo",
        "algorithm.critic=own",
        "critic.lr=1e-3",
        "algorithm.loss.value_clip=0.1",
        "context.window=3",
        "env.turn_limit_bootstraps=true",
        DROPOUT,
    ),
    "window_all": (
        *IMAGES,
        "algorithm=trico",
        "context.window=all",
        "context.system_prompt=instructions",
        "update.length_buckets=2",
        "context.max_tokens=330",
    ),
    "window_3": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        "context.window=3",
        "rollout.num_envs=6",
        "context.turn_template='{observation} now'",
    ),
    "truncated_sampling": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        "algorithm.loss.kl.estimator=k3",
        "rollout.top_p=0.95",
        "rollout.top_k=50",
        "rollout.min_p=0.01",
    ),
    "accumulated_gradients": (
        *IMAGES,
        "algorithm=starpo",
        "trainer.accumulate_grad_batches=2",
        "trainer.gradient_clip_val=0.1",
        DROPOUT,
    ),
    "no_warm_start": (
        *TEXT,
        "algorithm=starpo",
        "warm_start=none",
        f"{LOSS_MASK}.no_special",
        "algorithm.rewards.overlong.penalty=0.5",
    ),
    "adapters": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        "model=pretrained",
        f"model.build.path={SAVED_MODEL}",
        "model.build.lora={r:4,lora_alpha:8}",
        f"{REFERENCE}.AdaptersOff",
        "algorithm.rewards.overlong.penalty=0.5",
    ),
    # contexts, prompt formats, environments
    "left_out": (
        *IMAGES,
        "algorithm=trico",
        "context.window=3",
        "context.leave_out.patches=0.25",
        "context.leave_out.turns=0.5",
    ),
    "grounding": (
        "env=sokoban_visual",
        "env.max_turns=4",
        "env.invalid_ends=false",
        "algorithm=starpo",
        "env.prompt_format=grounding",
        "algorithm.rewards.world_model.grounding_weight=0.2",
        "rollout.max_response_tokens=48",
    ),
    "worldmodeling": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        "env.prompt_format=worldmodeling",
        "algorithm.rewards.world_model.worldmodeling_weight=0.2",
        "algorithm.rewards.world_model.judge.floor=0.5",
        "rollout.max_response_tokens=48",
    ),
    "no_think": (
        *TEXT,
        "algorithm=trico",
        "env.prompt_format=no_think",
        f"{BY}.ByBatch",
        "+algorithm.normalize.by.scale_by_std=false",
    ),
    "several_actions": (
        *IMAGES,
        "algorithm=gigpo",
        *GROUPS,
        "env.max_actions_per_turn=3",
        "rollout.max_response_tokens=40",
    ),
    "own_images": (
        "env=custom",
        "env.target=my_environments.BrightSide",
        "env.visual=true",
        "model=small_vlm",
    ),
    # rewards and groups
    "curriculum_and_shaping": (
        *IMAGES,
        "algorithm=starpo",
        "curriculum.above=0.0",
        "curriculum.window=1",
        "algorithm.rewards.placement.place=end",
        "algorithm.rewards.weights.turn=0.5",
        "algorithm.rewards.weights.final=2.0",
        "algorithm.rewards.weights.format=3.0",
        "algorithm.rewards.think_length.amount=0.5",
        "algorithm.rewards.think_length.low=1",
        "algorithm.rewards.think_length.high=8",
        "algorithm.rewards.action_efficiency.penalty=0.1",
        "algorithm.rewards.overlong.penalty=0.2",
        "rollout.max_response_tokens=14",
    ),
    "normalized_by_group": (
        *TEXT,
        "algorithm=starpo",
        *GROUPS,
        f"{BY}.ByGroup",
        "algorithm.normalize.clip_low=-1.0",
        "algorithm.normalize.clip_high=1.0",
        "algorithm.loss.whiten=false",
    ),
    "normalized_running": (
        *TEXT,
        "algorithm=starpo",
        *GROUPS,
        f"{BY}.Running",
        "+algorithm.normalize.by.decay=0.5",
        f"{KEEP}.TopMass",
        "+algorithm.filter.keep.share=0.6",
        "algorithm.filter.rescale=sqrt",
    ),
    "normalized_by_schedule": (
        *TEXT,
        "algorithm=starpo",
        *GROUPS,
        f"{BY}.Schedule",
        "+algorithm.normalize.by.starts=[0,1,2]",
        f"{KEEP}.TopCount",
        "+algorithm.filter.keep.count=2",
        "algorithm.filter.rescale=linear",
        "algorithm.filter.reweight=1.0",
    ),
    # masks and temperatures
    "mask_of_high_entropy": (
        *TEXT,
        "algorithm=starpo",
        "algorithm.masks.top_entropy=0.2",
        f"{CREDIT_MASK}.action_span",
        "algorithm.masks.overlong_responses=mask",
        "rollout.max_response_tokens=14",
        f"rollout.adaptive_temperature={ADAPTIVE}",
        "rollout.temperature=0.9",
    ),
    "mask_by_importance": (
        *IMAGES,
        "algorithm=trico_importance",
        "algorithm.masks.importance.advantage=0.5",
        "context.window=2",
        f"{LOSS_MASK}.think_span",
    ),
    # losses
    "sequence_ratio": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        f"{LOSS}.SequencePolicyLoss",
        "algorithm.loss.policy.clip_low=0.01",
        "algorithm.loss.policy.clip_high=0.02",
        "algorithm.loss.kl.estimator=k2",
    ),
    "clipped_weights": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        f"{LOSS}.ClippedWeightLoss",
        "algorithm.loss.kl.estimator=k1",
        "algorithm.loss.kl.aggregation=token-mean",
        f"{KL_MASK}.until_action",
    ),
    "dual_clip_and_entropy": (
        *TEXT,
        "algorithm=starpo",
        "algorithm.loss.policy.dual_clip=1.05",
        "algorithm.loss.policy.clip_low=0.05",
        "algorithm.loss.entropy_coefficient=0.05",
        "algorithm.loss.entropy_target=2.0",
        "algorithm.loss.value_coefficient=0.5",
        "algorithm.loss.policy.aggregation=constant",
        "algorithm.loss.policy.constant=20",
    ),
    "moving_reference": (
        *TEXT,
        "algorithm=starpo",
        f"{REFERENCE}.MovingAverage",
        "+algorithm.loss.kl.reference.decay=0.5",
        "algorithm.loss.kl.estimator=k3",
        "algorithm.loss.kl.coefficient=0.2",
    ),
    "kl_in_reward": (
        *TEXT,
        "algorithm=trico",
        "algorithm.loss.kl.place=reward",
        "algorithm.loss.kl.coefficient=0.1",
        f"{LOSS_MASK}.think_weighted",
        "+algorithm.masks.loss.think=0.25",
        f"{CREDIT_MASK}.no_special",
    ),
    "k2_in_reward": (
        *TEXT,
        "algorithm=rloo",
        *GROUPS,
        "algorithm.loss.kl.estimator=k2",
        f"{REFERENCE}.MovingAverage",
    ),
    "mismatch_of_tokens": (
        *IMAGES,
        "algorithm=starpo",
        f"{MISMATCH}.TruncatedWeights",
        "+algorithm.loss.mismatch.cap=1.0",
        "rollout.temperature=0.7",
        "trainer.precision=bf16-mixed",
    ),
    "mismatch_of_responses": (
        *TEXT,
        "algorithm=grpo",
        *GROUPS,
        f"{MISMATCH}.MaskedWeights",
        "+algorithm.loss.mismatch.level=sequence",
        "+algorithm.loss.mismatch.low=0.99",
        "+algorithm.loss.mismatch.high=1.01",
        "trainer.precision=bf16-mixed",
    ),
    # callbacks
    "all_callbacks": (
        "env=frozenlake_visual",
        "callbacks.checkpoint.every_n_epochs=1",
        "callbacks.trajectories.every_n_iterations=1",
        "callbacks.diagnostics.probe_every_n_iterations=1",
        "callbacks.diagnostics.first=1",
        "callbacks.plots.every_n_iterations=2",
        "callbacks.collapse.actions=[mitigate]",
        "callbacks.collapse.grace=1",
        "callbacks.collapse.alarms.format.below=1.0",
        "callbacks.collapse.alarms.format.patience=1",
        "callbacks.collapse.mitigation.kl_coefficient=0.5",
        "callbacks.collapse.mitigation.learning_rate_share=0.5",
        "callbacks.collapse.mitigation.entropy_target=2.0",
    ),
}
# This case keeps the callbacks that SMALL disables.
WITH_ALL_CALLBACKS = "extra/all_callbacks"

_OMITTED = re.compile(r"(^|/)epoch$|^time/|_seconds$|_per_second$|memory")
"""Metrics that are not results: times, speeds, memory, and the epoch that Lightning adds to each point."""


# ---- hashed values


def digest(values: Iterable[object]) -> str:
    """Return a hash of the values in order, each with its type and size."""
    sha = hashlib.sha256()
    for value in values:
        sha.update(_encoded(value))
    return sha.hexdigest()


def _pixels(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return images of one size as `[images, 3, height, width]`; empty `[0]` without images."""
    if not images:
        return torch.zeros(0)
    return torch.stack([image.permute(2, 0, 1) for image in images])


def _encoded(value: object) -> bytes:
    if isinstance(value, Enum):
        return _encoded(value.value)
    if value is None:
        return b"none;"
    if isinstance(value, bool | np.bool_):
        return b"true;" if value else b"false;"
    if isinstance(value, int | np.integer):
        return f"int {int(value)};".encode()
    if isinstance(value, float | np.floating):
        return f"float {float(value).hex()};".encode()
    if isinstance(value, str):
        return f"text {len(value)} {value};".encode()
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{value.dtype} {tuple(value.shape)} ".encode() + flat.numpy().tobytes() + b";"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes() + b";"
    if isinstance(value, list | tuple):
        return b"".join([f"list {len(value)} ".encode(), *map(_encoded, value)])
    raise TypeError(f"digest: {type(value).__name__} has no encoding here; hash its fields")


def rollout_digests(trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """Return a digest of the trajectories, and one of their log-probs and entropies."""
    return {
        "trajectories": digest(chain.from_iterable(map(trajectory_values, trajectories))),
        "likelihoods": digest(chain.from_iterable(map(likelihoods, trajectories))),
    }


def trajectory_values(trajectory: Trajectory) -> Iterator[object]:
    """Yield the values of a trajectory and its turns, without log-probs."""
    yield from (trajectory.group, trajectory.member, trajectory.seed)
    yield trajectory.system_prompt_length
    yield from (trajectory.status, trajectory.success, trajectory.difficulty)
    yield from (trajectory.error, trajectory.reward)
    yield from (trajectory.final_prompt_ids, trajectory.final_images, trajectory.final_patches)
    yield len(trajectory.turns)
    for turn in trajectory.turns:
        yield from turn_values(turn)


def turn_values(turn: Turn) -> Iterator[object]:
    """Yield the prompt, the response and the rewards of a turn."""
    yield from (turn.observation.text, turn.observation.images)
    yield from (turn.prompt_ids, turn.prompt_images, turn.prompt_patches, turn.turns_left_out)
    yield from (turn.response_ids, turn.spans, turn.response_text, turn.think, turn.actions)
    yield from (
        turn.action_is_valid,
        turn.action_is_effective,
        turn.hit_length_limit,
        turn.temperature,
    )
    yield from (turn.reward, sorted(turn.reward_terms.values()))
    yield from (turn.state_description, turn.state_key)
    for statement in turn.statements:
        yield from (statement.block, statement.text, statement.agreement, statement.score)
        yield [value for relation in statement.true_relations for value in relation]


def likelihoods(trajectory: Trajectory) -> Iterator[object]:
    """Yield the log-probs and entropies of a trajectory."""
    for turn in trajectory.turns:
        yield from (turn.response_logprobs, turn.response_entropy)


def batch_values(batch: TrajectoryBatch) -> dict[str, list[object]]:
    """Return the values of a prepared batch, in groups that `compare` names."""
    samples, episodes = batch.samples, batch.episodes
    return {
        "inputs": [
            samples.input_ids,
            samples.length,
            samples.turn,
            samples.token,
            samples.spans,
            samples.temperature,
            samples.image_index,
            samples.patches,
            samples.episode,
            samples.weight,
            _pixels(batch.images),
        ],
        "behavior": [samples.behavior_logprobs],
        "masks": [samples.loss_mask, samples.loss_weight, samples.advantage_mask, samples.kl_mask],
        "advantages": [samples.advantages],
        "returns": [samples.returns],
        "values": [samples.values, episodes.bootstrap],
        "episodes": [
            episodes.turn_rewards,
            episodes.turns,
            episodes.group,
            episodes.member,
            episodes.hit_length_limit,
            episodes.weight,
            episodes.truncated,
        ],
        "reference": [batch.reference],
        "entropy": [batch.entropy],
    }


def weight_digests(state: Mapping[str, object]) -> dict[str, Any]:
    """Return a digest of each tensor, and one of all distinct tensors that does not depend on names."""
    digests = {
        name: digest([tensor])[:16]
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    }
    return {"all": digest(sorted(set(digests.values()))), "tensors": digests}


# ---- callback and logger, named in the config of a run


class JsonLines:
    """File with one JSON value per line."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def add(self, value: object) -> None:
        """Append a value."""
        with self.file.open("a") as stream:
            stream.write(json.dumps(value) + "\n")

    def read(self) -> list[Any]:
        """Return all values."""
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text().splitlines()]


class DigestCallback(RolloutCallback):
    """Record digests of the trajectories and the prepared batch of each iteration, and of the final weights.

    Args:
        file: Output file, one line per iteration.
    """

    def __init__(self, *, file: str) -> None:
        self.lines = JsonLines(file)

    def on_rollout_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, trajectories: Sequence[Trajectory]
    ) -> None:
        """Record the iteration."""
        batch: TrajectoryBatch = trainer.datamodule.buffer  # type: ignore[attr-defined]
        groups = {name: digest(values) for name, values in batch_values(batch).items()}
        self.lines.add({"rollout": rollout_digests(trajectories), "batch": groups})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the weights."""
        self.lines.add({"weights": weight_digests(pl_module.state_dict())})


class PointLogger(Logger):
    """Logger that records every logged value exactly.

    Args:
        file: Output file, one line per call.
        others: Arguments of all loggers, not used.
    """

    name, version = "points", 0

    def __init__(self, *, file: str, **others: object) -> None:
        super().__init__()
        self.lines = JsonLines(file)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record the metrics of a step."""
        self.lines.add([step, {name: float(value).hex() for name, value in metrics.items()}])


@contextlib.contextmanager
def validation_rollouts() -> Iterator[list[dict[str, str]]]:
    """Collect digests of the validation rollouts inside the context, one item per rollout."""
    digests: list[dict[str, str]] = []
    original = AgentProxy.rollout

    def rollout(self: AgentProxy, *args: Any, **kwargs: Any) -> list[Trajectory]:
        trajectories = original(self, *args, **kwargs)
        if kwargs["seed_key"][0] == VALIDATION_PURPOSE:
            digests.append(rollout_digests(trajectories))
        return trajectories

    AgentProxy.rollout = rollout  # type: ignore[method-assign]
    try:
        yield digests
    finally:
        AgentProxy.rollout = original  # type: ignore[method-assign]


# ---- recording


# environments that need a server or a library of `make test-environments`
NEEDS_MORE = (
    *("arithmetic", "countdown", "mini_sudoku", "reasoning_gym", "word_problem"),
    *("metaworld", "miniwob", "miniworld", "openenv", "textarena", "textworld"),
)


def cases() -> dict[str, tuple[str, ...]]:
    """Return the overrides of every case by its name."""
    presets: dict[str, tuple[str, ...]] = {}
    for name in _options("algorithm"):
        presets[f"algorithm/{name}"] = (f"algorithm={name}", *IMAGES)
    for name in _options("env"):
        if name in NEEDS_MORE:
            continue
        target = ("env.target=my_environments.GuessTheNumber",) if name == "custom" else ()
        presets[f"env/{name}"] = (f"env={name}", *target)
    for name in _options("experiment"):
        presets[f"experiment/{name}"] = (f"experiment={name}", *IMAGES)
    return presets | {f"extra/{name}": overrides for name, overrides in EXTRAS.items()}


def _options(group: str) -> list[str]:
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))


def small_config(case: str, overrides: Sequence[str], folder: Path) -> DictConfig:
    """Return the checked config of a case with small sizes. The overrides of the case take precedence."""
    folder.mkdir(parents=True)
    if f"model.build.path={SAVED_MODEL}" in overrides:
        model = folder / "model"
        build_small_lm(text={"hidden_size": 64, "intermediate_size": 128}).save(model)
        overrides = [override.replace(SAVED_MODEL, str(model)) for override in overrides]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        full = compose("fit", overrides=list(overrides))
        small = [name for name in SMALL if case != WITH_ALL_CALLBACKS or "callbacks." not in name]
        small += SINGLES if full.rollout.group_size == 1 else GROUPS
        if not full.warm_start.enabled:
            small = [name for name in small if not name.startswith("warm_start.")]
        if "text" in full.model.build:
            small += TINY_TEXT
        if "vision" in full.model.build:
            small += TINY_VISION
        # The first override of a group and the last override of a value take effect.
        cfg = compose("fit", overrides=[*small, *overrides, *_recorders(folder)])
    check_config(cfg)
    return cfg


def _recorders(folder: Path) -> list[str]:
    return [
        "logger=csv", "logger._target_=digests.PointLogger", f"+logger.file={folder}/points.jsonl",
        "+callbacks.digests._target_=digests.DigestCallback",
        f"+callbacks.digests.file={folder}/iterations.jsonl", f"paths.run_dir={folder}/run",
    ]  # fmt: skip


def record_case(case: str, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a case and return its record."""
    cfg = small_config(case, overrides, folder)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    with validation_rollouts() as validation:
        final_metrics = train(cfg).metrics
    lines = JsonLines(f"{folder}/iterations.jsonl").read()
    iterations, [end] = lines[:-1], lines[-1:]
    file = folder / "run" / "warm_start.pt"
    initial_weights = torch.load(file, weights_only=True)["module"] if file.exists() else {}
    metrics = _metrics(JsonLines(f"{folder}/points.jsonl").read())
    final = {
        name: [[None, value.hex()]] for name, value in final_metrics.items() if name not in metrics
    }
    return {
        "training": [iteration["rollout"] for iteration in iterations],
        "validation": validation,
        "weights": end["weights"],
        "warm_start": weight_digests(initial_weights),
        "advantages": [iteration["batch"] for iteration in iterations],
        "metrics": metrics
        | {name: points for name, points in final.items() if not _OMITTED.search(name)},
    }


def _metrics(points: Sequence[tuple[int | None, Mapping[str, str]]]) -> dict[str, list[Any]]:
    """Return the [step, value] pairs of each metric, without metrics that are not results."""
    metrics: dict[str, list[Any]] = {}
    for step, values in points:
        for name, value in values.items():
            if not _OMITTED.search(name):
                metrics.setdefault(name, []).append([step, value])
    return dict(sorted(metrics.items()))


def surroundings() -> dict[str, str]:
    """Return the commit and what results depend on besides the code."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    libraries = ("torch", "lightning", "transformers", "numpy", "gymnasium")
    return {
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        **{name: version(name) for name in libraries},
    }


def record(out: Path, *, only: str) -> int:
    """Run the cases and write the record. Return the exit code."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    sys.path[:0] = [str(HERE), str(OWN_ENVIRONMENTS)]
    records: dict[str, Any] = {}
    selected = {name: case for name, case in cases().items() if fnmatch(name, only)}
    for name, overrides in selected.items():
        start, output = time.process_time(), io.StringIO()
        with tempfile.TemporaryDirectory() as root:
            try:
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    records[name] = record_case(name, overrides, Path(root) / "case")
                status = "recorded"
            except (Exception, SystemExit) as error:
                status = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                sys.stderr.write(traceback.format_exc())
        print(f"{name:<36}{time.process_time() - start:6.1f} s  {status}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"surroundings": surroundings(), "cases": records}, indent=1))
    print(f"{len(records)} of {len(selected)} cases in {out}")
    return int(len(records) < len(selected) or not selected)


# ---- comparing


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, renamed: Mapping[str, str | None], tolerance: float | None
) -> list[str]:  # fmt: skip
    """Return the differences between two records of a case, one phrase each."""
    phrases = _first(old, new, "training", "trajectories", word="iteration")
    phrases += _first(old, new, "validation", "trajectories", word="rollout")
    if tolerance is None:
        phrases += _first(old, new, "training", "likelihoods", word="iteration")
        phrases += _first(old, new, "validation", "likelihoods", word="rollout")
        for part in ("warm_start", "weights"):
            if old[part]["all"] != new[part]["all"]:
                phrases.append(f"{part}{_tensors(old[part]['tensors'], new[part]['tensors'])}")
        for part in old["advantages"][0] if old["advantages"] else ():
            phrases += _first(old, new, "advantages", part, word="iteration")
    return phrases + _metric_differences(
        old["metrics"], new["metrics"], renamed=renamed, tolerance=tolerance
    )


def _first(
    old: Mapping[str, Any], new: Mapping[str, Any], part: str, detail: str, *, word: str
) -> list[str]:
    """Return where the digests of a part differ first."""
    before, after = ([digests.get(detail) for digests in side[part]] for side in (old, new))
    if before == after:
        return []
    name = f"{part} ({detail})"
    if len(before) != len(after):
        return [f"{name}: {len(before)} {word}s before, {len(after)} after"]
    pairs = enumerate(zip(before, after, strict=True))
    number = next(number for number, (old_digest, new_digest) in pairs if old_digest != new_digest)
    return [f"{name} from {word} {number}"]


def _tensors(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return how many tensors differ and the name of the first one."""
    if set(old) != set(new):
        return f" ({len(set(old.values()) - set(new.values()))} of {len(old)} tensors)"
    names = [name for name in old if old[name] != new[name]]
    return f" ({len(names)} of {len(old)} tensors, first {names[0]})"


def _metric_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, renamed: Mapping[str, str | None], tolerance: float | None
) -> list[str]:  # fmt: skip
    expected = {new_name(name, renamed): points for name, points in old.items()}
    expected.pop(None, None)
    phrases = []
    for word, names in (
        ("missing", [name for name in expected if name not in new]),
        ("new", [name for name in new if name not in expected]),
        ("different", [name for name in expected if name in new and not _alike(expected[name], new[name], tolerance)]),
    ):  # fmt: skip
        if names:
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            phrases.append(f"metrics {word}: {', '.join(map(str, names[:6]))}{more}")
    return phrases


def new_name(name: str, renamed: Mapping[str, str | None]) -> str | None:
    """Return the new name of a metric, None if it is omitted.

    >>> new_name("a/b/c", {"a/": "x/", "a/b/": "y/"}), new_name("a/b", {"a/b": "c"}), new_name("d", {"d": None})
    ('y/c', 'c', None)
    """
    matches = [
        key for key in renamed if name == key or (key.endswith("/") and name.startswith(key))
    ]
    if not matches:
        return name
    key = max(matches, key=len)
    target = renamed[key]
    return None if target is None else target + name.removeprefix(key)


def _alike(old: Sequence[Any], new: Sequence[Any], tolerance: float | None) -> bool:
    """Return whether two curves have the same steps and values."""
    if tolerance is None or len(old) != len(new):
        return old == new
    return all(
        step == other and _close(x, y, tolerance)
        for (step, x), (other, y) in zip(_numbers(old), _numbers(new), strict=True)
    )


def _close(old: float, new: float, tolerance: float) -> bool:
    """Return whether two values agree. Values below 0.01, often sums that cancel, count as 0.01."""
    if math.isnan(old) or math.isnan(new):
        return math.isnan(old) and math.isnan(new)
    return math.isclose(old, new, rel_tol=tolerance, abs_tol=tolerance / 100)


def _numbers(points: Sequence[Any]) -> Iterator[tuple[int | None, float]]:
    for step, value in points:
        yield step, float.fromhex(value)


def compare(
    before: Path, after: Path, *, renamed: Path | None, tolerance: float | None, only: str
) -> int:
    """Print one line per case. Return the exit code."""
    old, new = (json.loads(file.read_text()) for file in (before, after))
    names = json.loads(renamed.read_text()) if renamed else {}
    renamed_cases = names.pop("cases", {})
    for key, value in old["surroundings"].items():
        if key != "commit" and value != new["surroundings"].get(key):
            print(f"note: {key} {value} before, {new['surroundings'].get(key)} after")
    first = {renamed_cases.get(name, name): case for name, case in old["cases"].items()}
    second, different = new["cases"], 0
    selected = [name for name in dict.fromkeys([*first, *second]) if fnmatch(name, only)]
    for name in selected:
        if name not in first or name not in second:
            phrases = [f"not in the {'first' if name not in first else 'second'} record"]
        else:
            phrases = differences(first[name], second[name], renamed=names, tolerance=tolerance)
        different += bool(phrases)
        print(f"{name:<36}{'; '.join(phrases) or 'identical'}")
    print(f"{different} of {len(selected)} cases differ")
    return int(bool(different) or not selected)


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="run the cases and write their digests")
    recording.add_argument("out", type=Path)
    comparing = actions.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--renamed", type=Path, help="JSON: old name to new name of metrics")
    comparing.add_argument(
        "--tolerance", type=float,
        help="relative tolerance of metrics; compares trajectories exactly, and no digests of floats",
    )  # fmt: skip
    for command in (recording, comparing):
        command.add_argument("--only", default="*", help="pattern of cases, such as 'env/*'")
    args = parser.parse_args()
    if args.action == "record":
        return record(args.out, only=args.only)
    return compare(
        args.before, args.after, renamed=args.renamed, tolerance=args.tolerance, only=args.only
    )


if __name__ == "__main__":
    raise SystemExit(main())
