"""A mixture's environments: sampled by progress or learnability (`env.sampling`), and with rewards of another scale.

All runs have the environments, model and warm start of docs/mixture.md's comparison with single runs. The criteria were
written before the runs; three seeds.

- `sampling`, 48 iterations of 48 episodes: a rule has a gain if the mean over the environments of greedy success on the
  same held-out episodes, less that of equal shares, is at least 0.02 in the mean of the seeds and has the same sign in
  all of them; harm likewise below 0; else none.
- `scales`, 16 iterations of 12 groups of 4 episodes: all rewards of the lake are multiplied by 10. Whitened within each
  environment (`reinforce_pp`) they may not change the answer: in each environment the mean difference of the seeds is
  at most 0.05 in size. Without whitening (`rloo`) the same difference is reported.

    python benchmarks/mixture.py --out /tmp/mixture
    python benchmarks/mixture.py --out /tmp/mixture report
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
    *QUIET, "env=mixture", "model=small_lm", "warm_start.batch_size=32", "warm_start.steps=150",
    "learning_rate_end=1.0", "callbacks.plots=null", "callbacks.best=null", "callbacks.diagnostics=null",
    "callbacks.collapse=null", "validation.baselines=null",
)  # fmt: skip
_TEN_TIMES = "+env.environments.frozenlake.rewards={weights: {turn: 10, final: 10, format: 10}}"
_GROUPS = (
    "rollout.groups=12", "rollout.group_size=4", "algorithm.loss.kl.coefficient=0.0",
    "algorithm.loss.kl.reference=null",
)  # fmt: skip
_SHARES = ("algorithm=trico", "rollout.groups=48")
# iterations, and arms with their overrides
_EXPERIMENTS: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {
    "sampling": (
        48,
        {
            "shares": _SHARES,
            "progress": (*_SHARES, "env.sampling={rule: progress}"),
            "learnability": (*_SHARES, "env.sampling={rule: learnability}"),
        },
    ),
    "scales": (
        16,
        {
            "whitened": ("algorithm=reinforce_pp", *_GROUPS),
            "whitened, ten times": ("algorithm=reinforce_pp", *_GROUPS, _TEN_TIMES),
            "not whitened": ("algorithm=rloo", *_GROUPS),
            "not whitened, ten times": ("algorithm=rloo", *_GROUPS, _TEN_TIMES),
        },
    ),
}


def report(out: Path, experiment: str, *, seeds: int) -> None:
    """Print the last success of each arm, environment and seed."""
    print(f"| {experiment} | {' | '.join(_ENVIRONMENTS)} | mean | processor s |")
    print(f"|---|{'---|' * (len(_ENVIRONMENTS) + 2)}")
    for arm in _EXPERIMENTS[experiment][1]:
        folders = [_folder(out, experiment, arm, seed) for seed in range(seeds)]
        metrics = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
        success = np.array(
            [[one[f"val/{name}/success"] for name in _ENVIRONMENTS] for one in metrics]
        )
        columns = [", ".join(f"{value:.3f}" for value in of_seeds) for of_seeds in success.T]
        means = success.mean(axis=1)
        mean = f"{', '.join(f'{value:.3f}' for value in means)}: {means.mean():.3f}"
        spent = np.mean([cost_of(folder).processor_seconds for folder in folders])
        print(f"| {arm} | {' | '.join(columns)} | {mean} | {spent:.0f} |")


def _folder(out: Path, experiment: str, arm: str, seed: int) -> Path:
    return out / experiment / arm.replace(", ", "_").replace(" ", "_") / str(seed)


def main() -> None:
    """Run the arms of each seed, those that have not ended, and print their tables."""
    options = run_or_report(__doc__, folder="mixture", experiments=tuple(_EXPERIMENTS))
    out = options.out.absolute()
    for experiment in options.experiments:
        iterations, arms = _EXPERIMENTS[experiment]
        for seed in range(options.seeds) if options.action == "run" else ():
            mixture = (
                f"env.environments={{{', '.join(f'{k}: {v}' for k, v in _ENVIRONMENTS.items())}}}"
            )
            own = (*_COMMON, mixture, f"seed={seed}")
            start = out / "start" / str(seed)
            fit(start, *own, *_SHARES, "trainer.max_epochs=0", "trainer.limit_val_batches=0")
            for arm, overrides in arms.items():
                fit(
                    _folder(out, experiment, arm, seed), *own, *overrides, f"trainer.max_epochs={iterations}",
                    "trainer.check_val_every_n_epoch=16",
                    f"warm_start.weights='{start / 'warm_start.pt'}'",
                )  # fmt: skip
        report(out, experiment, seeds=options.seeds)


if __name__ == "__main__":
    main()
