"""Starts from records of a half-trained agent (`warm_start=records`) against scripted demonstrations, then RL.

Criterion, written before the runs, three seeds: an arm has a gain over another if the mean difference of success is at
least 0.05 and has the same sign in all seeds; right after the warm start, and after 20 iterations of RL. The pairs are
each arm less `demonstrations`, and each rule less `random`, as many records as the solved ones, drawn at random. The
records are 2,048 sampled episodes from 512 initial states of one agent after 10 iterations of RL.

    python benchmarks/records.py --out /tmp/records
    python benchmarks/records.py --out /tmp/records report
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from findings import TASKS
from findings_report import curve_of
from runner import QUIET, ROOT, cost_of, fit, run_or_report

from ragen_pl.base.records import read_records

_COMMON = (
    *QUIET, *TASKS["frozenlake"], "algorithm=rloo", "algorithm.loss.kl.coefficient=0.0",
    "algorithm.loss.kl.reference=null", "callbacks.diagnostics=null", "callbacks.collapse=null", "callbacks.plots=null",
    "validation.baselines=null", "validation.blank=false", "learning_rate_end=1.0", "optimizer.lr=4e-4",
    "rollout.groups=16", "rollout.group_size=8", "validation.episodes=512", "warm_start.steps=200",
    "warm_start.value_coefficient=0.0",
)  # fmt: skip
# of equal return, so that the same episodes count as solved in all rules
_SOLVED = "warm_start.records.threshold=0.5"
_RULES: dict[str, tuple[str, ...]] = {
    "random": ("warm_start.records.rule=all", "warm_start.records.episodes={solved}"),
    "success": ("warm_start.records.rule=success",),
    "best": ("warm_start.records.rule=best", "warm_start.records.best=1", _SOLVED),
    "exponential": ("warm_start.records.rule=exponential", "warm_start.records.temperature=0.5"),
}
_ITERATIONS = 20


def play_records(out: Path) -> tuple[Path, int]:
    """Train the agent and play its episodes, unless done; return their folder and the number that are solved."""
    agent, played = out / "agent", out / "played"
    fit(agent, *_COMMON, "seed=1000", "trainer.max_epochs=10")
    if not played.exists():
        command = (
            "ragen_pl.evaluate", f"ckpt='{agent / 'checkpoints' / 'last.ckpt'}'", "env=frozenlake", "samples=4",
            "greedy=false", "validation_sets.held_out=null", "validation_sets.played.key=played",
            "validation_sets.played.episodes=512", f"to='{played}'",
        )  # fmt: skip
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True)
    file = next(played.rglob("trajectories.jsonl"))
    return played, sum(bool(record["success"]) for record in read_records(file))


def report(out: Path, *, seeds: int) -> None:
    """Print the success of each arm and seed, before and after RL, and what its runs took."""
    print("| learned | after the warm start | mean | after RL | mean | processor s |")
    print("|---|---|---|---|---|---|")
    for arm in ("demonstrations", *_RULES):
        folders = [out / arm / str(seed) for seed in range(seeds)]
        success = np.array([curve_of(folder).success[[0, -1]] for folder in folders])
        starts, ends = (", ".join(f"{value:.3f}" for value in column) for column in success.T)
        means = success.mean(axis=0)
        spent = np.mean([cost_of(folder).processor_seconds for folder in folders])
        print(f"| {arm} | {starts} | {means[0]:.3f} | {ends} | {means[1]:.3f} | {spent:.0f} |")


def main() -> None:
    """Run the arms of each seed, those that have not ended, and print their table."""
    options = run_or_report(__doc__, folder="records")
    out = options.out.absolute()
    if options.action == "run":
        played, solved = play_records(out)
        for seed in range(options.seeds):
            own = (
                *_COMMON, f"seed={seed}", f"trainer.max_epochs={_ITERATIONS}",
                f"trainer.check_val_every_n_epoch={_ITERATIONS // 2}",
            )  # fmt: skip
            fit(out / "demonstrations" / str(seed), *own)
            # demonstrations are not played
            task = [line for line in own if "demonstrator" not in line and ".stages" not in line]
            for arm, rule in _RULES.items():
                fit(
                    out / arm / str(seed), *task, "warm_start=records", "warm_start.records.held_out=skip",
                    f"warm_start.records.path='{played}'", *(line.format(solved=solved) for line in rule),
                )  # fmt: skip
    report(out, seeds=options.seeds)


if __name__ == "__main__":
    main()
