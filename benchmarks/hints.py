"""A teacher that reads text while the policy sees images (`algorithm.loss.kl.hint`), against RL at equal episodes.

Criterion, written before the runs: the teacher helps if success of `opd` less that of `rloo` after 16 iterations of 128
episodes is at least 0.02, with an interval above 0; three seeds. The policy begins with demonstrations that ignore
holes. Its teacher has learned a solver's, on lakes that are shown as the text of `describe()`.

Further arms are compared with `opd` in the same way, with a criterion that was written before their runs: a gain is a
difference of at least 0.02 with an interval above 0, harm an interval below 0, and none is all else. `weights` weighs
the divergence by turn and by confidence (`DivergenceWeights`, factor 0.9 a turn). `reward` adds the loss of `rloo`, and
`blend` gives way to it in 12 iterations (`BlendTeacher`). `sampled` has the teacher's log-probs of the sampled tokens
alone (`TeacherRatio`).

    python benchmarks/hints.py --out /tmp/hints
    python -m ragen_pl.compare 'run=[/tmp/hints/opd/0,…]' 'with=[/tmp/hints/rloo/0,…]'
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from findings import TASKS
from runner import QUIET, ROOT, fit

from ragen_pl.envs.frozen_lake import FrozenLake

COMMON = (
    *QUIET, "callbacks.diagnostics=null", "callbacks.collapse=null", "callbacks.plots=null",
    "validation.baselines=null", "validation.blank=false", "curriculum=null", "learning_rate_end=1.0",
    "optimizer.lr=4e-4", "rollout.groups=16", "rollout.group_size=8",
)  # fmt: skip
_TEACHER = (
    "env=frozenlake", "env.target=hints.DescribedLake", "env.kwargs.plans=false", "model=small_vlm",
    "rollout.max_response_tokens=24", "warm_start.steps=300", "warm_start.stages=null",
)  # fmt: skip
_HINT = (
    "+algorithm.loss.kl.hint._target_=ragen_pl.prompts.hint.Hint", "+algorithm.loss.kl.hint.template='{state}'",
    "+algorithm.loss.kl.hint.shows_images=false",
)  # fmt: skip
_REWARD = (
    "algorithm.loss.policy_coefficient=1.0",
    "algorithm.estimator._target_=ragen_pl.algorithms.advantages.group.LeaveOneOut",
)
_ARMS = {
    "rloo": ("algorithm=rloo", "algorithm.loss.kl.coefficient=0.0", "algorithm.loss.kl.reference=null"),
    "opd": ("algorithm=opd", *_HINT),
    "weights": (
        "algorithm=opd", *_HINT,
        "algorithm.loss.kl.weights={_target_: ragen_pl.algorithms.kl.DivergenceWeights, turn_decay: 0.9}",
    ),
    "reward": ("algorithm=opd", *_HINT, *_REWARD),
    "blend": (
        "algorithm=opd", *_HINT, *_REWARD,
        "callbacks.blend={_target_: ragen_pl.callbacks.blend.BlendTeacher, iterations: 12}",
    ),
    "sampled": (
        "algorithm=opd", *_HINT, "algorithm.loss.policy_coefficient=1.0", "algorithm.loss.kl.place=reward",
        "algorithm.loss.kl.estimator=k1",
        "algorithm.estimator._target_=ragen_pl.algorithms.advantages.teacher_ratio.TeacherRatio",
    ),
}  # fmt: skip


class DescribedLake(FrozenLake):
    """A lake whose observation is the description of its state."""

    def _observe(self) -> str:
        return self.describe()


def main() -> None:
    """Run the teacher and the arms of each seed, those that have not ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/hints"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=16)
    options = parser.parse_args()
    # the runs import the lake below
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    for seed in range(options.seeds):
        own = (*COMMON, f"seed={seed}")
        teacher, start = options.out / "teacher" / str(seed), options.out / "start" / str(seed)
        fit(teacher, *_TEACHER, *own, "algorithm=rloo", "trainer.max_epochs=0")
        task = TASKS["frozenlake_visual"]
        fit(start, *task, *own, "algorithm=rloo", "trainer.max_epochs=0")
        for arm, overrides in _ARMS.items():
            given = (
                ()
                if arm == "rloo"
                else (f"algorithm.loss.kl.reference.path='{teacher / 'warm_start.pt'}'",)
            )
            fit(
                options.out / arm / str(seed), *task, *own, *overrides, *given,
                f"trainer.max_epochs={options.iterations}",
                f"trainer.check_val_every_n_epoch={options.iterations // 2}",
                f"warm_start.weights='{start / 'warm_start.pt'}'",
            )  # fmt: skip


if __name__ == "__main__":
    main()
