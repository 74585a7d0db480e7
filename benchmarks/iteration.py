"""Time iterations (rollout, preparation, update) of the default run and their components.

Run `python benchmarks/iteration.py`; with `env=support_desk` for another environment. `--prototype FOLDER` also times
a plain PyTorch prototype, iteration by iteration in alternation, with the same model size, vocabulary, number of
episodes, minibatches and threads.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from timing import CLOCKS, Clock, StepTimer, Stopwatch, use_threads, warm_started

from ragen_pl.assembly.build import build_agent, build_datamodule
from ragen_pl.data import datamodule as datamodule_file
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.modules.agent import AgentModule

TARGET_RATIO = 1.2
RECIPE = (
    "conv=2 deps=0.85 mind=2 demos=4096 sft_bs=64 sft_lr=1e-3 sft_steps=400 sft_val=1 fmt=avoid lt=0.7 "
    "badend=1 klref=0.5 lr=7e-4 vcoef=1 gt=0.9 evaln=32 evalev=1000000 budget=1000000000 lanes=128"
)


class Prototype:
    """Prototype in a separate process that waits before each iteration."""

    def __init__(self, folder: str, args: argparse.Namespace, *, vocabulary: int) -> None:
        recipe = [*RECIPE.split(), f"threads={args.threads}"]
        if args.cache:
            weights = Path(args.cache).resolve() / f"prototype_{vocabulary}.pt"
            weights.parent.mkdir(parents=True, exist_ok=True)
            recipe.append(f"load={weights}" if weights.exists() else f"save={weights}")
        command = [sys.executable, __file__, "--worker", str(Path(folder).resolve()), args.clock]
        self.process = subprocess.Popen(
            [*command, str(vocabulary), *recipe],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.last = self._read()

    def iterate(self) -> dict[str, float]:
        """Run one iteration. Return its seconds and sampled tokens."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        before, self.last = self.last, self._read()
        change = {name: self.last[name] - before[name] for name in ("tokens", "rollout", "update")}
        return change | {name: self.last[name] for name in ("iteration", "turns")}

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                report: dict[str, float] = json.loads(line)
                return report
        raise RuntimeError("the prototype has stopped; run it alone to see its error")


def prototype_worker(folder: str, clock: Clock, vocabulary: int, recipe: list[str]) -> None:
    """Run the prototype's script and wait for a line on stdin before each iteration."""
    sys.path.insert(0, folder)
    sys.argv = ["train.py", *recipe]
    import env  # type: ignore[import-not-found]

    env.V = vocabulary
    env.WORDS += [f"<unused{number}>" for number in range(len(env.WORDS), vocabulary)]
    make_maps, began = env.make_maps, 0.0

    def stopping(count: int, rng: object, split: str, **settings: Any) -> Any:
        nonlocal began
        caller = sys._getframe(1)
        if split == "train" and caller.f_code.co_name == "<module>":
            tick = caller.f_globals["tick"]
            turns = caller.f_globals.get("M", 0)  # turns of the finished iteration
            report = {"tokens": tick["ntok"], "rollout": tick["roll"], "update": tick["upd"]}
            report["turns"] = turns
            print(json.dumps(report | {"iteration": clock() - began}), flush=True)
            sys.stdin.readline()
            began = clock()
            # The script has read its clock before the wait.
            caller.f_globals["t0"] = clock()
        return make_maps(count, rng, split, **settings)

    env.make_maps = stopping
    time.time = clock
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        Path("logs").mkdir()
        runpy.run_path(str(Path(folder) / "train.py"), run_name="__main__")


class IterationTimer(RolloutCallback):
    """Record the seconds of each iteration, and run an iteration of the prototype before it."""

    def __init__(self, watch: Stopwatch, prototype: Prototype | None) -> None:
        self.watch, self.prototype = watch, prototype
        self.ours: list[dict[str, float]] = []
        self.theirs: list[dict[str, float]] = []
        self._began = 0.0
        self._counts: dict[str, float] = {}

    def on_rollout_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        """Stop the time of the last iteration, run the prototype, start the time of this iteration."""
        if trainer.current_epoch:
            self._end()
        else:
            engine = cast(AgentModule, module).rollout_engine()
            self.watch.wrap(engine, "collect", part="rollout: engine")
        if self.prototype is not None:
            self.theirs.append(self.prototype.iterate())
        self.watch.take()
        self._began = self.watch.clock()

    def on_rollout_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, trajectories: Any
    ) -> None:
        """Count the sampled tokens and turns."""
        responses = [turn.response_ids for trajectory in trajectories for turn in trajectory.turns]
        self._counts = {"tokens": sum(map(len, responses)), "turns": len(responses)}

    def on_train_end(self, *_: Any) -> None:
        """Stop the time of the last iteration."""
        self._end()

    def _end(self) -> None:
        seconds = self.watch.clock() - self._began
        self.ours.append(self.watch.take() | {"iteration": seconds} | self._counts)


def run_ours(args: argparse.Namespace) -> IterationTimer:
    """Run iterations of the default run or of another environment's, alternating with the prototype."""
    default = [] if any(o.startswith("env=") for o in args.overrides) else ["env=frozenlake_visual"]
    parts = warm_started([*default, "curriculum=null", *args.overrides], cache=args.cache)
    clock = CLOCKS[args.clock]
    watch = Stopwatch(clock)
    agent, datamodule = build_agent(parts), build_datamodule(parts)
    watch.wrap(parts.proxy.environments, "open", part="rollout: environments")
    watch.wrap(parts.proxy.environments, "start", part="rollout: environments")
    watch.wrap(parts.proxy.environments, "finished", part="rollout: environments")
    watch.wrap(agent, "prepare", part="prepare")
    watch.wrap(datamodule_file, "collate", part="collate")
    watch.wrap(datamodule, "collect", part="collect")
    prototype = None
    if args.prototype:
        vocabulary = len(parts.bundle.tokenizer)
        prototype = Prototype(args.prototype, args, vocabulary=vocabulary)
    timer = IterationTimer(watch, prototype)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=args.iterations, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        limit_val_batches=0, callbacks=[RolloutUpdate(validate_first=False), timer, StepTimer(watch)],
    )  # fmt: skip
    trainer.fit(agent, datamodule=datamodule)
    if prototype is not None:
        prototype.close()
    return timer


def split(record: dict[str, float]) -> dict[str, float]:
    """Return the seconds of the components of an iteration. They sum to its total."""
    rollout = record["collect"] - record["prepare"] - record["collate"]
    inside = ("rollout: engine", "rollout: environments")
    parts = {name: record[name] for name in inside}
    parts["rollout: loop, context, parsing"] = rollout - sum(parts.values())
    parts |= {name: record[name] for name in ("collate", "prepare")}
    parts |= {f"update: {name}": record[name] for name in ("forward", "backward", "optimizer")}
    parts["update: data, Lightning, logging"] = record["iteration"] - sum(parts.values())
    return parts


def median(records: list[dict[str, float]], name: str) -> float:
    return statistics.median(record[name] for record in records)


def main() -> None:
    """Print the tables."""
    if sys.argv[1:2] == ["--worker"]:
        folder, clock, vocabulary, *recipe = sys.argv[2:]
        prototype_worker(folder, CLOCKS[clock], int(vocabulary), recipe)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=10, help="the first one is not counted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu for a busy machine")
    parser.add_argument("--prototype", help="folder of the prototype's train.py")
    parser.add_argument("--cache", help="folder that caches the warm-started weights")
    parser.add_argument("overrides", nargs="*", help="config overrides, such as rollout.groups=64")
    args = parser.parse_args()
    use_threads(args.threads)
    timer = run_ours(args)
    ours, theirs = timer.ours[1:], timer.theirs[1:]
    whole, tokens = median(ours, "iteration"), median(ours, "tokens")
    print(f"\n{args.clock} seconds, {args.threads} threads, median of {len(ours)} iterations\n")
    shares = [split(record) for record in ours]
    for name in shares[0]:
        seconds = median(shares, name)
        print(f"{name:<36}{seconds * 1e3:>9.1f} ms{seconds / whole:>8.1%}")
    print(f"{'iteration':<36}{whole * 1e3:>9.1f} ms, {tokens:,.0f} sampled tokens")
    if theirs:
        compare(ours, theirs)


def compare(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    """Print a comparison with the prototype."""
    for record in ours:
        record["rollout"] = record["collect"] - record["prepare"] - record["collate"]
        record["update"] = record["iteration"] - record["rollout"]
    print(f"\n{'':<28}{'ours':>12}{'prototype':>12}{'ratio':>8}")

    def row(name: str, mine: float, other: float, *, judged: bool = False) -> None:
        verdict = "met" if mine / other <= TARGET_RATIO else "missed"
        text = f"{name:<28}{mine:>12,.1f}{other:>12,.1f}{mine / other:>8.2f}"
        print(text + (f"  target {TARGET_RATIO}: {verdict}" if judged else ""))

    for name in ("turns", "tokens"):
        row(f"{name} per iteration", median(ours, name), median(theirs, name))
    for name in ("rollout", "update", "iteration"):
        row(f"{name}, ms", median(ours, name) * 1e3, median(theirs, name) * 1e3)
    for unit in ("turns", "tokens"):
        for name in ("rollout", "update", "iteration"):
            mine, other = (total(rs, name) / total(rs, unit) * 1e6 for rs in (ours, theirs))
            row(f"{name}, us / {unit[:-1]}", mine, other, judged=name == "iteration")


def total(records: list[dict[str, float]], name: str) -> float:
    return sum(record[name] for record in records)


if __name__ == "__main__":
    main()
