"""A policy as its own teacher that reads the state in words (`algorithm=opsd`), against RL at equal episodes.

Criterion, written before the runs: it helps if success of `opsd` less that of `rloo` after 16 iterations of 128
episodes is at least 0.02, with an interval above 0; three seeds. The policy begins with demonstrations on lakes that
are shown as images, of which half have the state in words too. There the demonstrations are noisy shortest paths, on
the others they ignore holes. All training and validation after that is without words; `described` validates the
start with them.

    python benchmarks/self_distillation.py --out /tmp/self
    python -m ragen_pl.compare 'run=[/tmp/self/opsd/0,…]' 'with=[/tmp/self/rloo/0,…]'
"""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from findings import TASKS
from findings_report import curve_of
from gymnasium import spaces
from hints import COMMON
from runner import ROOT, fit, run_or_report

from ragen_pl.envs.base import TEXT_CHARSET
from ragen_pl.envs.policies import BasePolicy, NoisyPolicy
from ragen_pl.visual_envs.frozen_lake import FrozenLakeVisual

_ITERATIONS = 16
_TASK = (
    *TASKS["frozenlake_visual"], *COMMON,
    "env.target=self_distillation.SometimesDescribedLake", "warm_start.steps=600", "warm_start.episodes=4096",
    "warm_start.demonstrator._target_=self_distillation.ByDescription", "~warm_start.demonstrator.noise",
    "~warm_start.demonstrator.base",
)  # fmt: skip
_ARMS = {
    "rloo": ("algorithm=rloo", "algorithm.loss.kl.coefficient=0.0", "algorithm.loss.kl.reference=null"),
    "opsd": ("algorithm=opsd", "algorithm.loss.kl.hint.template='{state}'"),
    "described": ("algorithm=rloo", "+env.kwargs.described=1.0"),
}  # fmt: skip


class SometimesDescribedLake(FrozenLakeVisual):
    """A lake whose observations have the state in words in a part of the episodes.

    Args:
        described: Probability of an episode with words.
        settings: Those of the lake.
    """

    def __init__(self, *, described: float = 0.0, **settings: Any) -> None:
        self.described, self.is_described = described, False
        super().__init__(**settings)

    def _arrive(self) -> None:
        super()._arrive()
        self.is_described = bool(self.np_random.random() < self.described)

    def _observe(self) -> Any:
        observation: Any = super()._observe()
        return observation | {"text": self.describe()} if self.is_described else observation

    def _observation_space(self) -> spaces.Space[Any]:
        seen: Any = super()._observation_space()
        text = spaces.Text(max_length=200, charset=TEXT_CHARSET)
        return spaces.Dict({"text": text, "image": seen["image"]})


class ByDescription:
    """Demonstrator that follows noisy shortest paths in episodes with words, and ignores holes in the others."""

    needs_trust = ()

    def __init__(self) -> None:
        self._with_words, self._without_words = (
            NoisyPolicy(noise=0.25, base=BasePolicy.OPTIMAL),
            NoisyPolicy(),
        )

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
        """Return an action."""
        lake: Any = env.unwrapped
        return (self._with_words if lake.is_described else self._without_words).act(env, rng)


def main() -> None:
    """Run the arms of each seed, those that have not ended, and print their success."""
    options = run_or_report(__doc__, folder="self_distillation")
    out = options.out.absolute()
    # the runs import the lake above
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    for seed in range(options.seeds) if options.action == "run" else ():
        own, start = (*_TASK, f"seed={seed}"), out / "start" / str(seed)
        fit(
            start, *own, "algorithm=rloo", "+env.kwargs.described=0.5", "trainer.max_epochs=0",
            "trainer.limit_val_batches=0",
        )  # fmt: skip
        for arm, overrides in _ARMS.items():
            fit(
                out / arm / str(seed), *own, *overrides, f"warm_start.weights='{start / 'warm_start.pt'}'",
                f"trainer.max_epochs={0 if arm == 'described' else _ITERATIONS}",
                f"trainer.check_val_every_n_epoch={_ITERATIONS // 2}",
            )  # fmt: skip
    for arm in _ARMS:
        curves = [curve_of(out / arm / str(seed)).success for seed in range(options.seeds)]
        print(f"{arm}: " + ", ".join(" ".join(f"{one:.2f}" for one in curve) for curve in curves))


if __name__ == "__main__":
    main()
