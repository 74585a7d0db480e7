"""Sampling of a mixture's environments by learning progress or learnability (`env.sampling`), against equal shares.

Criterion, written before the runs, three seeds: a rule has a gain if the mean over the environments of greedy success
on the same held-out episodes, less that of equal shares, is at least 0.02 in the mean of the seeds and has the same
sign in all of them; harm likewise below 0; else none. The environments, model and warm start are those of
docs/mixture.md's comparison with single runs. Each run plays 48 iterations of 48 episodes.

    python benchmarks/sampling.py --out /tmp/sampling
    python benchmarks/sampling.py --out /tmp/sampling report
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from runner import QUIET, cost_of, fit, run_or_report

_ENVIRONMENTS = {
    "frozenlake": (
        "{share: 1, max_turns: 6, kwargs: {size: 3, plans: false}, curriculum: null, "
        "validation: {episodes: 128, baselines: null}, "
        "warm_start: {episodes: 512, stages: null, demonstrator: {noise: 1.0}}}"
    ),
    "bandit": "{share: 1, validation: {episodes: 128, baselines: null}, warm_start: {episodes: 512}}",
    "sokoban": (
        "{share: 1, max_turns: 8, kwargs: {size: 5, walls: 0, max_pushes: 2, plans: false}, "
        "validation: {episodes: 128, baselines: null}, warm_start: {episodes: 512, demonstrator: {noise: 0.5}}}"
    ),
}
_COMMON = (
    *QUIET, "env=mixture", f"env.environments={{{', '.join(f'{k}: {v}' for k, v in _ENVIRONMENTS.items())}}}",
    "model=small_lm", "algorithm=trico", "rollout.groups=48", "warm_start.batch_size=32", "warm_start.steps=150",
    "learning_rate_end=1.0", "callbacks.plots=null", "callbacks.best=null", "callbacks.diagnostics=null",
    "callbacks.collapse=null", "validation.baselines=null",
)  # fmt: skip
_ARMS = {
    "shares": (),
    "progress": ("env.sampling={rule: progress}",),
    "learnability": ("env.sampling={rule: learnability}",),
}
_ITERATIONS = 48


def report(out: Path, *, seeds: int) -> None:
    """Print the last success of each arm, environment and seed."""
    print(f"| sampled by | {' | '.join(_ENVIRONMENTS)} | mean | processor s |")
    print(f"|---|{'---|' * (len(_ENVIRONMENTS) + 2)}")
    for arm in _ARMS:
        folders = [out / arm / str(seed) for seed in range(seeds)]
        metrics = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
        success = np.array(
            [[one[f"val/{name}/success"] for name in _ENVIRONMENTS] for one in metrics]
        )
        columns = [", ".join(f"{value:.3f}" for value in of_seeds) for of_seeds in success.T]
        means = success.mean(axis=1)
        mean = f"{', '.join(f'{value:.3f}' for value in means)}: {means.mean():.3f}"
        spent = np.mean([cost_of(folder).processor_seconds for folder in folders])
        print(f"| {arm} | {' | '.join(columns)} | {mean} | {spent:.0f} |")


def main() -> None:
    """Run the arms of each seed, those that have not ended, and print their table."""
    options = run_or_report(__doc__, folder="sampling")
    out = options.out.absolute()
    if options.action == "run":
        for seed in range(options.seeds):
            own = (*_COMMON, f"seed={seed}", f"trainer.check_val_every_n_epoch={_ITERATIONS // 3}")
            start = out / "start" / str(seed)
            fit(start, *own, "trainer.max_epochs=0", "trainer.limit_val_batches=0")
            for arm, overrides in _ARMS.items():
                fit(
                    out / arm / str(seed), *own, *overrides, f"trainer.max_epochs={_ITERATIONS}",
                    f"warm_start.weights='{start / 'warm_start.pt'}'",
                )  # fmt: skip
    report(out, seeds=options.seeds)


if __name__ == "__main__":
    main()
