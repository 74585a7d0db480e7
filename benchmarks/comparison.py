"""Compare algorithms with the same model, environments, initial weights and wall time over several seeds.

Each combination of environment, algorithm and seed is one run of `python -m ragen_pl.fit`. Runs of the same environment
and seed start from the weights of one warm start. RICO's samples are whole episodes, and it has its own warm start.
Finished runs are kept and interrupted runs are resumed. The report with its plots is `docs/results.md`.

    python benchmarks/comparison.py run --out runs/comparison
    python benchmarks/comparison.py report --out runs/comparison
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from comparison_report import write_report
from runner import ROOT, fit

# demonstrations without plans, so that algorithms differ by what they teach
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "frozenlake_visual": ("env=frozenlake_visual",),
    "sokoban_visual": (
        "env=sokoban_visual", "env.kwargs.plans=false", "env.kwargs.max_pushes=2", "env.max_turns=12",
        "model=small_vlm", "warm_start.steps=1200", "warm_start.episodes=4096", "warm_start.demonstrator.noise=0.85",
    ),
}  # fmt: skip
# Only run if named by --environments.
FURTHER_ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    # up to three actions a turn, after a plan: the policy chooses how long a turn is
    "sokoban": (
        "env=sokoban", "env.kwargs.max_pushes=2", "env.max_turns=6", "env.max_actions_per_turn=3",
        "model=small_lm", "rollout.max_response_tokens=56", "warm_start.steps=500", "warm_start.episodes=4096",
        "~warm_start.demonstrator.noise", "~warm_start.demonstrator.base",
        "warm_start.demonstrator._target_=ragen_pl.envs.policies.SeveralActions", "+warm_start.demonstrator.most=3",
        "+warm_start.demonstrator.policy={_target_: ragen_pl.envs.policies.NoisyPolicy, noise: 0.5, base: optimal}",
        "optimizer._target_=ragen_pl.modules.muon.MuonAdamW", "~optimizer.betas", "~optimizer.eps",
    ),
}  # fmt: skip
_ALL_ENVIRONMENTS = ENVIRONMENTS | FURTHER_ENVIRONMENTS
_ALL_SAMPLED = "algorithm.masks.advantage._target_=ragen_pl.algorithms.masks.sampled"
_ALL_ONE = tuple(
    f"algorithm.estimator.{name}=1.0"
    for name in ("gamma_turn", "lam_turn", "gamma_token", "lam_token")
)
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "starpo": ("algorithm=starpo",),
    "starpo_s": ("algorithm=starpo_s",),
    "grpo": ("algorithm=grpo",),
    "rico": ("algorithm=rico",),
    "trico": ("algorithm=trico",),
    "trico, masks only": ("algorithm=trico", *_ALL_ONE),
    "trico, credit only": ("algorithm=trico", _ALL_SAMPLED),
}


# gamma and lambda of trico's turns
_TURN_PPO = ("algorithm=turn_ppo", "algorithm.estimator.gamma=0.9", "algorithm.estimator.lam=0.7")
# Only run if named by --algorithms.
FURTHER: dict[str, tuple[str, ...]] = {
    "trico_published": ("algorithm=trico_published",),
    "hygae": (*_TURN_PPO, "algorithm.estimator.value_at=last_token"),
    "turn_ppo": _TURN_PPO,
    "trico_adaptive": ("algorithm=trico_adaptive",),
    "trico_importance": ("algorithm=trico_importance",),
    "trico, a quarter of patches left out": (
        "algorithm=trico", "context.leave_out.patches=0.25",
    ),
}  # fmt: skip
_UNLIMITED = 1000
_WHOLE_EPISODES = ("rico",)
# RICO's warm start (16 episodes per step) has about as many demonstrated turns as the others' (64 turns per step).
_STEPS_OF_EPISODES = {"frozenlake_visual": 300, "sokoban_visual": 450}


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Warm start shared by several runs."""

    environment: str
    whole_episodes: bool
    seed: int

    def folder(self, out: Path) -> Path:
        """Return the folder of its run."""
        layout = "episodes" if self.whole_episodes else "turns"
        return out / self.environment / f"warm_start_of_{layout}" / str(self.seed)

    def weights(self, out: Path) -> Path:
        """Return the file with its weights."""
        return self.folder(out) / "warm_start.pt"

    def overrides(self, args: argparse.Namespace) -> list[str]:
        """Return the overrides of a run of the warm start without RL."""
        own = ["algorithm=trico"]
        if self.whole_episodes:
            own = ["algorithm=rico", f"warm_start.steps={_STEPS_OF_EPISODES[self.environment]}"]
        return [
            *_ALL_ENVIRONMENTS[self.environment], *own, f"seed={self.seed}", "logger=none", "callbacks.progress=null",
            "trainer.max_epochs=0", f"validation.episodes={args.validation_episodes}", "validation.blank=false",
            *args.overrides,
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the comparison."""

    environment: str
    algorithm: str
    seed: int

    def folder(self, out: Path) -> Path:
        """Return the run's folder."""
        return (
            out
            / self.environment
            / self.algorithm.replace(", ", "_").replace(" ", "_")
            / str(self.seed)
        )

    @property
    def warm_start(self) -> WarmStart:
        """Warm start of the run."""
        return WarmStart(
            environment=self.environment,
            whole_episodes=self.algorithm in _WHOLE_EPISODES,
            seed=self.seed,
        )

    def overrides(self, out: Path, args: argparse.Namespace) -> list[str]:
        """Return the overrides of the run."""
        return [
            *_ALL_ENVIRONMENTS[self.environment], *(ALGORITHMS | FURTHER)[self.algorithm], f"seed={self.seed}",
            "logger=csv", "callbacks.progress=null", "callbacks.trajectories=null",
            f"validation.episodes={args.validation_episodes}", "validation.blank=false",
            f"warm_start.weights={self.warm_start.weights(out)}",
            # The learning rate is constant because the number of iterations is not known in advance.
            "learning_rate_end=1.0", f"optimizer.lr={args.lr}", f"trainer.max_epochs={args.iterations}",
            f"trainer.check_val_every_n_epoch={args.every}",
            "+callbacks.timer._target_=lightning.pytorch.callbacks.Timer",
            f"+callbacks.timer.duration.seconds={round(60 * args.minutes)}",
            "+callbacks.timer.interval=epoch",
            *args.overrides,
        ]  # fmt: skip


def cells(args: argparse.Namespace, algorithms: Sequence[str]) -> list[Cell]:
    """Return the runs in order: all algorithms of a seed before the next seed."""
    return [
        Cell(environment=environment, algorithm=algorithm, seed=seed)
        for environment in args.environments
        for seed in range(args.seeds)
        for algorithm in algorithms
    ]


def main() -> None:
    """Run the comparison or write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "comparison")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--minutes", type=float, default=4.0, help="minutes of RL per run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--environments",
        nargs="+",
        default=tuple(ENVIRONMENTS),
        choices=_ALL_ENVIRONMENTS,
    )
    parser.add_argument(
        "--algorithms", nargs="+", default=tuple(ALGORITHMS), choices=(*ALGORITHMS, *FURTHER)
    )
    parser.add_argument("--validation-episodes", type=int, default=256)
    parser.add_argument("--every", type=int, default=10, help="iterations between validations")
    parser.add_argument("--iterations", type=int, default=_UNLIMITED, help="maximum number")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    parser.add_argument("--overrides", nargs="+", default=(), help="further overrides of every run")
    args = parser.parse_args()
    out = args.out.absolute()
    if args.action == "run":
        selected = cells(args, args.algorithms)
        warm_starts = dict.fromkeys(cell.warm_start for cell in selected)
        with ThreadPoolExecutor(args.jobs) as pool:
            list(
                pool.map(lambda start: fit(start.folder(out), *start.overrides(args)), warm_starts)
            )
            list(pool.map(lambda cell: fit(cell.folder(out), *cell.overrides(out, args)), selected))
    all_cells = cells(args, (*ALGORITHMS, *FURTHER))
    write_report(
        {
            (cell.environment, cell.algorithm, cell.seed): cell.folder(out)
            for cell in all_cells
            if (cell.folder(out) / "metrics.json").exists()
        },
        page=args.page,
        budget=f"{args.iterations} iterations"
        if args.iterations < _UNLIMITED
        else f"{args.minutes:g} minutes of RL, two runs at once",
    )


if __name__ == "__main__":
    main()
