"""Success and tokens a turn against the share of patches or old turns left out before each response.

Run as `python benchmarks/leave_out.py RUN`, RUN being a training run's folder. The run's last weights play its
held-out validation set greedily with each share left out: what matters least to the policy's own look, and, to compare,
as much drawn at random. What the look itself costs is not in the tokens: it reads the whole context once more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
from omegaconf import DictConfig, OmegaConf
from timing import use_threads

from ragen_pl.metrics.intervals import wilson
from ragen_pl.rollout import proxy as turn_loop
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.engine import Prompt
from ragen_pl.rollout.leave_out import LeaveOut
from ragen_pl.run.build import assemble, engine_factory
from ragen_pl.run.train import quieten
from ragen_pl.run.weights import load_weights
from ragen_pl.trajectory import Trajectory

Scores = Callable[..., list[np.ndarray]]
HEAD = "| left out | chosen by | success | prompt tokens a turn | response tokens a turn |\n|---|---|---|---|---|"


def play(
    cfg: DictConfig, weights: Path, rule: LeaveOut, *, scores: Scores | None
) -> list[Trajectory]:
    """Play the validation set greedily, with what to leave out chosen by `scores`, or by the policy's own."""
    parts = assemble(cfg)
    load_weights(parts.bundle, weights)
    parts.bundle.model.eval()
    validation_set, context = parts.validation_sets[0], parts.proxy.context
    validation_set.proxy.context = ContextManager(
        parts.bundle, window=context.window, system_prompt=context.system_prompt,
        turn_template=context.turn_template, max_tokens=context.max_tokens, leave_out=rule,
    )  # fmt: skip
    engine = engine_factory(cfg)(parts.policy)
    engine.load_weights(0)
    with mock.patch.object(turn_loop, "occlusion_scores", scores or turn_loop.occlusion_scores):
        return validation_set.proxy.rollout(
            engine, validation_set.starts, seed_key=("panel",), greedy=True
        )


def at_random() -> Scores:
    """Return a look that draws its scores."""
    rng = np.random.default_rng(0)

    def draw(
        bundle: object,
        engine: object,
        prompts: Sequence[Prompt],
        parts: Sequence[Sequence[np.ndarray]],
        *,
        max_tokens: int,
    ) -> list[np.ndarray]:
        return [rng.random(len(each)) for each in parts]

    return draw


def line(trajectories: Sequence[Trajectory], *, what: str, how: str) -> str:
    """Return a row of the table."""
    turns = [turn for one in trajectories for turn in one.turns]
    won = float(np.mean([one.success for one in trajectories]))
    success = wilson(won, count=len(trajectories))
    shown = np.mean([len(turn.prompt_ids) for turn in turns])
    said = np.mean([len(turn.response_ids) for turn in turns])
    return f"| {what} | {how} | {won:.3f} ± {success.half_width:.3f} | {shown:.1f} | {said:.1f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("run", type=Path, help="folder of a training run")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--patches", type=float, nargs="*", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--turns", type=float, nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    use_threads(given.threads)
    quieten()
    cfg = OmegaConf.load(given.run / "config.yaml")
    assert isinstance(cfg, DictConfig)
    cfg.validation.episodes = given.episodes
    weights = given.run / "checkpoints" / "last.ckpt"
    print(HEAD)
    print(line(play(cfg, weights, LeaveOut(), scores=None), what="nothing", how="-"), flush=True)
    rules = [(f"{share:.0%} of patches", LeaveOut(patches=share)) for share in given.patches]
    rules += [(f"{share:.0%} of old turns", LeaveOut(turns=share)) for share in given.turns]
    for what, rule in rules:
        for how, scores in (("the policy", None), ("chance", at_random())):
            print(line(play(cfg, weights, rule, scores=scores), what=what, how=how), flush=True)


if __name__ == "__main__":
    main()
