"""Success and tokens per turn by the share of patches or earlier turns that is left out of the context.

Run `python benchmarks/leave_out.py RUN` with the folder of a training run. Its last weights play the held-out
validation set greedily for each share, with selection by occlusion scores and with random selection. The tokens do
not include the cost of the occlusion scores, which read the whole context once more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
from omegaconf import DictConfig, OmegaConf
from timing import use_threads

from ragen_pl.assembly.build import assemble
from ragen_pl.assembly.start_check import engine_factory
from ragen_pl.assembly.weights import load_weights
from ragen_pl.engines import occlusion
from ragen_pl.engines.protocol import Prompt
from ragen_pl.metrics.proportions import wilson
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.leave_out import LeaveOut
from ragen_pl.run.train import quieten
from ragen_pl.trajectory import Trajectory

Scores = Callable[..., list[np.ndarray]]
HEAD = "| removed | selection | success | prompt tokens per turn | response tokens per turn |\n|---|---|---|---|---|"


def play(
    cfg: DictConfig, weights: Path, rule: LeaveOut, *, scores: Scores | None
) -> list[Trajectory]:
    """Play the validation set greedily with the given scores, or with occlusion scores."""
    parts = assemble(cfg)
    load_weights(parts.bundle, weights)
    parts.bundle.model.eval()
    validation_set, context = parts.validation_sets[0], parts.proxy.context
    validation_set.proxy.context = ContextManager(
        parts.bundle, window=context.window, system_prompt=context.system_prompt,
        turn_template=context.turn_template, max_tokens=context.max_tokens, leave_out=rule,
    )  # fmt: skip
    engine = engine_factory(cfg.rollout.engine)(parts.policy)
    engine.load_weights(0)
    with mock.patch.object(occlusion, "occlusion_scores", scores or occlusion.occlusion_scores):
        return validation_set.play(engine, version=0)


def random_scores() -> Scores:
    """Return a function that draws random scores."""
    rng = np.random.default_rng(0)

    def draw(
        bundle: object,
        engine: object,
        prompts: Sequence[Prompt],
        parts: Sequence[Sequence[np.ndarray]],
        *,
        max_tokens: Sequence[int],
    ) -> list[np.ndarray]:
        return [rng.random(len(candidates)) for candidates in parts]

    return draw


def line(trajectories: Sequence[Trajectory], *, removed: str, selection: str) -> str:
    """Return a row of the table."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    success = float(np.mean([trajectory.success for trajectory in trajectories]))
    half_width = wilson(success, count=len(trajectories)).half_width
    prompt = np.mean([len(turn.prompt_ids) for turn in turns])
    response = np.mean([len(turn.response_ids) for turn in turns])
    return f"| {removed} | {selection} | {success:.3f} ± {half_width:.3f} | {prompt:.1f} | {response:.1f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("run", type=Path, help="folder of a training run")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--patches", type=float, nargs="*", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--turns", type=float, nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    use_threads(args.threads)
    quieten()
    cfg = OmegaConf.load(args.run / "config.yaml")
    assert isinstance(cfg, DictConfig)
    cfg.validation.episodes = args.episodes
    weights = args.run / "checkpoints" / "last.ckpt"
    print(HEAD)
    print(
        line(play(cfg, weights, LeaveOut(), scores=None), removed="nothing", selection="-"),
        flush=True,
    )
    rules = [(f"{share:.0%} of patches", LeaveOut(patches=share)) for share in args.patches]
    rules += [(f"{share:.0%} of earlier turns", LeaveOut(turns=share)) for share in args.turns]
    for removed, rule in rules:
        for selection, scores in (("occlusion scores", None), ("random", random_scores())):
            print(
                line(play(cfg, weights, rule, scores=scores), removed=removed, selection=selection),
                flush=True,
            )


if __name__ == "__main__":
    main()
