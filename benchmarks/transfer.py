"""Evaluate policies in environments that they were not trained in, and print a table of success.

Rows are the environments trained in, columns those played. Each run's last checkpoint plays the validation set of each
environment, greedily, with the environment's shipped settings and the run's own model, context and response length. The
weights do not change. Actions have the names that the environments give them; others are invalid. Run
`python benchmarks/transfer.py RUN … --envs frozenlake_visual sokoban_visual babyai_visual`, with folders of runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.progress import track

from ragen_pl.data.validation import HELD_OUT


def evaluate(run: Path, env: str, *, episodes: int) -> dict[str, Any]:
    """Return the metrics of each policy in an environment."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "ragen_pl.evaluate", f"ckpt={run}", f"env={env}", f"to={folder}",
            f"validation.episodes={episodes}", "validation.warm_start=false", "validation.blank=false",
            "trajectories=false", "mlflow=false",
        ]  # fmt: skip
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            raise SystemExit(f"{' '.join(command)}\n{finished.stdout}{finished.stderr}")
        report = json.loads((Path(folder) / "evaluation.json").read_text())
    policies: dict[str, Any] = report["validation_sets"][HELD_OUT]["policies"]
    return policies


def cell(metrics: dict[str, Any]) -> str:
    """Return success with its interval, and the share of valid actions."""
    interval = f"[{metrics['success_low']:.2f}, {metrics['success_high']:.2f}]"
    return f"{metrics['success']:.2f} {interval}, valid {metrics['valid_actions']:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--envs", nargs="+", required=True, help="names of conf/env")
    parser.add_argument("--episodes", type=int, default=256)
    args = parser.parse_args()
    rows: dict[str, list[str]] = {}
    random: list[str] = []
    for run in track(args.runs, description="runs"):
        trained = OmegaConf.load(run / "config.yaml").env.name
        played = [evaluate(run, env, episodes=args.episodes) for env in args.envs]
        rows[trained] = [cell(policies["policy"]) for policies in played]
        random = [cell(policies["random"]) for policies in played]
    print("| trained in | " + " | ".join(args.envs) + " |")
    print("|---" * (len(args.envs) + 1) + "|")
    for name, cells in (rows | {"random policy": random}).items():
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
