"""Digests of small training runs, to check that a change of the code changes no result.

A case is one training run from its config, with three iterations on one thread. There is a case for every preset in
`conf/algorithm`, every environment in `conf/env` and every experiment in `conf/experiment`, and one for each entry of
`digest_cases.EXTRAS`, which enables what the presets leave off. A record contains SHA-256 digests of the trajectories,
of the validation rollouts, of the prepared batches and of the weights, and all logged metrics.

    python benchmarks/digests.py record before.json
    python benchmarks/digests.py record after.json
    python benchmarks/digests.py compare before.json after.json

Run `record` from the root of the repository. A full record takes about six minutes on one thread. `compare` ends with
exit code 1 if anything differs. Compare only records of the same machine
and library versions; others round differently.

`trajectory_values` and `batch_values` of `digest_values` list the hashed values in a fixed order. If a field is
renamed, rename it there; the digests do not change. List renamed metrics in a JSON file for `--renamed`:

    {"update/kl_loss": "update/loss_kl", "rollout/": "train/", "rollout/turns": null, "cases": {"env/a": "env/b"}}

A name that ends in `/` is a prefix. null omits a metric from the comparison. The longest matching name applies.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from digest_cases import (
    GROUPS,
    SAVED_MODEL,
    SINGLES,
    SMALL,
    TINY_TEXT,
    TINY_VISION,
    WITH_ALL_CALLBACKS,
    cases,
)
from digest_comparison import compare
from digest_values import batch_values, digest, rollout_digests, weight_digests
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
from ragen_pl.trajectory import Trajectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OWN_ENVIRONMENTS = ROOT / "examples" / "own_environments"

_OMITTED = re.compile(r"(^|/)epoch$|^time/|_seconds$|_per_second$|memory")
"""Metrics that are not results: times, speeds, memory, and the epoch that Lightning adds to each point."""


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
