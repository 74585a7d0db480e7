"""Compare a step of training, rollout and update, with one of TRL's GRPOTrainer on the same multi-turn task and model.

Run `python benchmarks/trl_grpo.py`; other arguments are config overrides of both sides, such as `env.max_turns=5`.
TRL has to be installed (`pip install trl`).

Both sides play text FrozenLake with its rules and the whole history in the prompt, as a pretrained model would read it.
They start from the same weights: the small model after a warm start, which TRL reads from the folder that
`save_pretrained` wrote. They have the same initial states, episodes, groups, turn limit, longest response, number of
optimizer steps, loss (GRPO without a reference model), learning rate, clipping, type and threads, and AdamW. The
learning rate is tiny, so that both policies remain alike. Each side is a process of its own. The first steps are not
counted, then the sides take their steps in turn. A ratio is the median over pairs of steps; `a token` divides the
seconds of all steps by their sampled tokens. `context.system_prompt=null warm_start.steps=300` leaves the rules out.

TRL's own loop of turns needs a model that calls tools, so its `rollout_func` plays the episodes: with this project's
environments and prompts, which cost the same on both sides, and with TRL's generation. What differs:

- TRL samples with transformers' `generate`, which computes the whole history in every turn.
- TRL pads the episodes of a rollout to the longest one. Its forward and backward passes have `--trl-micro-batch`
  episodes; 8 and 16 are the fastest of 8, 16, 32 and 64 for 256 episodes. Here passes have 4,096 positions of episodes
  of like length, the fastest of 1,536, 4,096, 12,288 and 32,768.
- TRL draws other random numbers, so the responses differ. The second table has the sampled tokens and turns of both.
- TRL takes the log-probabilities of the policy that sampled from the update, or from another forward pass where a
  rollout has several optimizer steps. Here they are the engine's.
- Our `rollout` in the table ends with the advantages, TRL's with the episodes.
- Each side computes its own metrics. Logging, checkpoints and validation are off.
"""

# not named trl.py, which the scripts of this folder would import in place of the package

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import trl_side
from alternation import Meter, Record, Side
from timing import CLOCKS, use_threads, warm_started

from ragen_pl.assembly.build import RunComponents, build_agent, build_datamodule
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.loops.rollout_update import RolloutUpdate

OURS, TRL = SIDES = ("ragen_pl", "TRL")
PACKAGES = ("trl", "datasets")
TARGETS = {32: 3.0, 256: 5.0}
"""Least seconds of TRL's step relative to ours, by episodes of a step."""
SETTINGS = (
    "env=frozenlake", "algorithm=grpo", "algorithm.loss.kl.coefficient=0", "curriculum=null", "context.window=all",
    "update.epochs=1", "update.minibatches=1",
    "optimizer._target_=torch.optim.AdamW", "optimizer.lr=1e-6", "learning_rate_end=1.0",
    "context.system_prompt=instructions", "update.tokens_per_microbatch=4096", "update.tokens_per_forward=4096",
    "warm_start.steps=600", "warm_start.batch_size=16", "warm_start.episodes=1024", "validation.held_out=false",
)  # fmt: skip

Records = dict[str, list[Record]]
"""The counted steps of each side."""


# ---- this project's side


class Steps(RolloutCallback):
    """Wait before each iteration."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_rollout_start(self, *_: Any) -> None:
        """End the time of an iteration and wait for the next."""
        self.meter.pause()

    def on_rollout_end(self, trainer: pl.Trainer, module: Any, trajectories: Any) -> None:
        """Count what was sampled."""
        self.meter.note(trajectories)


def train_ours(parts: RunComponents) -> None:
    """Train with this project until the process is ended."""
    meter, agent, datamodule = Meter(), build_agent(parts), build_datamodule(parts)
    for watch in meter.watches.values():
        watch.wrap(datamodule, "collect", part="rollout")
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=parts.cfg.trainer.gradient_clip_val, limit_val_batches=0,
        callbacks=[RolloutUpdate(validate_first=False), Steps(meter)],
    )  # fmt: skip
    trainer.fit(agent, datamodule=datamodule)


# ---- both sides


def components(args: argparse.Namespace, *, episodes: int) -> RunComponents:
    """Build and warm-start the components of a step's number of episodes."""
    size = args.group_size
    rollout = (f"rollout.groups={episodes // size}", f"rollout.group_size={size}")
    return warm_started([*SETTINGS, *rollout, *args.overrides], cache=args.cache)


def command(side: str, args: argparse.Namespace, *, episodes: int) -> list[str]:
    """Return the arguments of Python that train a side."""
    options = ("group_size", "threads", "cache", "trl_micro_batch")
    flags = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in options]
    return [__file__, f"--side={side}", f"--episodes={episodes}", *flags, *args.overrides]


def alternate(args: argparse.Namespace, *, episodes: int) -> Records:
    """Return the counted steps of each side, which take turns."""
    sides = {side: Side(side, command(side, args, episodes=episodes)) for side in SIDES}
    records: Records = {side: [] for side in SIDES}
    try:
        for number in range(args.warm_up + args.steps):
            for name, side in sides.items():
                record = side.step()
                if number >= args.warm_up:
                    records[name].append(record)
    finally:
        for side in sides.values():
            side.close()
    return records


# ---- tables


def total(records: list[Record], name: str) -> float:
    return sum(record[name] for record in records)


def median(records: list[Record], name: str) -> float:
    return statistics.median(record[name] for record in records)


def ratios(records: Records, clock: str) -> tuple[float, float]:
    """Return TRL's seconds relative to ours: of a step, the median over pairs, and of a sampled token."""
    pairs = zip(records[TRL], records[OURS], strict=True)
    theirs, ours = (
        total(records[side], clock) / total(records[side], "tokens") for side in (TRL, OURS)
    )
    return statistics.median(other[clock] / mine[clock] for other, mine in pairs), theirs / ours


def print_rows(records: Records, *, episodes: int) -> None:
    """Print a row for each clock: seconds of a step and of its rollout, tokens per second, ratios."""
    for clock in CLOCKS:
        row = f"{episodes:>8}  {clock:<5}"
        for steps in records.values():
            speed = total(steps, "tokens") / total(steps, clock)
            seconds, rollout = median(steps, clock), median(steps, f"rollout, {clock}")
            row += f"{seconds:>10.3f}{rollout:>9.3f}{speed:>10,.0f}"
        of_step, of_token = ratios(records, clock)
        row += f"{of_step:>8.2f}{of_token:>9.2f}"
        if (target := TARGETS.get(episodes)) is not None:
            row += f"{target:>8.0f}  {'met' if of_step >= target else 'missed'}"
        print(row, flush=True)


def print_counts(counted: dict[int, Records]) -> None:
    """Print the mean sampled tokens and turns of a step."""
    print(f"\n{'':>8}{'tokens a step':>24}{'turns a step':>24}")
    print(f"{'episodes':>8}" + 2 * f"{OURS:>14}{TRL:>10}")
    for episodes, records in counted.items():
        means = [
            total(steps, name) / len(steps)
            for name in ("tokens", "turns")
            for steps in records.values()
        ]
        print(f"{episodes:>8}" + "{:>14,.0f}{:>10,.0f}{:>14,.0f}{:>10,.0f}".format(*means))


def compare(args: argparse.Namespace) -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as folder:
        args.cache = args.cache or folder
        parts = components(args, episodes=args.episodes[0])
        update, rollout = parts.cfg["update"], parts.cfg.rollout
        for odd in (number for number in args.episodes if number % update.minibatches):
            raise SystemExit(f"--episodes {odd}: give a multiple of {update.minibatches=}")
        packages = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch"))
        print(f"{packages}, {args.threads} threads, {args.steps} steps of each side")
        print(
            f"{parts.bundle.parameter_count() / 1e6:.1f}M parameters, groups of {rollout.group_size}, at most "
            f"{parts.cfg.env.max_turns} turns of {rollout.max_response_tokens} tokens, optimizer steps of a step: "
            f"{update.epochs * update.minibatches}\n"
        )
        side = f"{'s/step':>10}{'rollout':>9}{'tokens/s':>10}"
        print(f"{'':>15}{OURS:>29}{TRL:>29}{'TRL / ' + OURS:>17}")
        print(f"{'episodes':>8}  {'clock':<5}{side}{side}{'a step':>8}{'a token':>9}{'target':>8}")
        counted = {}
        for episodes in args.episodes:
            counted[episodes] = alternate(args, episodes=episodes)
            print_rows(counted[episodes], episodes=episodes)
        print_counts(counted)


def main() -> None:
    """Print the tables, or train one side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, nargs="+", default=list(TARGETS), help="of a step")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of a group")
    parser.add_argument("--steps", type=int, default=8, help="of each side")
    parser.add_argument("--warm-up", type=int, default=2, help="first steps that are not counted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--trl-micro-batch", type=int, default=8, help="episodes of a forward pass of TRL's update"
    )
    parser.add_argument("--cache", help="folder that caches the warm-started weights")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="config overrides, such as env.max_turns=5")
    args = parser.parse_args()
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise SystemExit(f"not installed: {', '.join(missing)}; run `pip install trl`")
    for odd in (number for number in args.episodes if number < 1 or number % args.group_size):
        raise SystemExit(f"--episodes {odd}: give a multiple of --group-size {args.group_size}")
    use_threads(args.threads)
    warnings.filterwarnings("ignore")
    if args.side is None:
        compare(args)
    elif args.side == OURS:
        train_ours(components(args, episodes=args.episodes[0]))
    else:
        parts = components(args, episodes=args.episodes[0])
        trl_side.train(parts, micro_batch=args.trl_micro_batch)


if __name__ == "__main__":
    main()
