"""Time the update phase: trained tokens per second, shares of its time, and the share of padding.

Run as `python benchmarks/update.py`. The trajectories are those of the demonstrations' noisy policy in
`env=frozenlake_visual`, with one turn in a sample (`context.window=1`) and the whole history (`context.window=all`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from timing import CLOCKS, StepTimer, Stopwatch, build_components, use_threads
from torch import Tensor

from ragen_pl.assembly.build import RunComponents, build_agent, build_datamodule, build_environments
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.microbatches import default_buckets, split_by_length
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedPolicy, ScriptedResponder
from ragen_pl.rollout.settings import FailureSettings
from ragen_pl.trajectory import Trajectory

TARGET_PADDING = 0.10
BUCKETS = (1, 2, 3, 4, 6, 8)

# no engine samples the trajectories, so their log-probs are none of the policy's
DEMONSTRATED = ("env=frozenlake_visual", "curriculum=null", "update.max_mismatch=null")


class UpdateTimer(pl.Callback):
    """Keep the seconds of each update phase, from its first minibatch to its last."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.phases: list[dict[str, float]] = []
        self._began = 0.0

    def on_train_epoch_start(self, *_: Any) -> None:
        """Begin."""
        self.watch.take()
        self._began = self.watch.clock()

    def on_train_epoch_end(self, *_: Any) -> None:
        """End."""
        whole = self.watch.clock() - self._began
        self.phases.append(self.watch.take() | {"whole": whole})


@dataclass
class Played:
    """Stands where the DataModule has its proxy: the warm start's noisy policy plays, not the model."""

    environments: EnvironmentManager
    context: ContextManager
    failures: FailureSettings
    proxy: AgentProxy[ContextManager]
    policy: ScriptedPolicy
    hint: None = None

    @classmethod
    def of(cls, parts: RunComponents) -> Played:
        """Return that of a run's components."""
        return cls(
            environments=parts.proxy.environments,
            context=parts.proxy.context,
            failures=parts.proxy.failures,
            proxy=replace(parts.proxy, environments=build_environments(parts.cfg.env)),
            policy=instantiate(parts.cfg.warm_start.demonstrator),
        )

    def rollout(
        self,
        responder: object,
        episode_specs: Sequence[EpisodeSpec],
        *,
        seed_key: Sequence[int | str],
        progress: object = None,
    ) -> list[Trajectory]:
        """Play the episodes."""
        return self.proxy.rollout(
            ScriptedResponder(policy=self.policy), episode_specs, seed_key=seed_key
        )


def run(window: str, args: argparse.Namespace) -> None:
    """Print the metrics of one window."""
    parts = build_components([*DEMONSTRATED, f"context.window={window}", *args.overrides])
    watch = Stopwatch(CLOCKS[args.clock])
    agent, datamodule = build_agent(parts), build_datamodule(parts)
    datamodule.proxy = Played.of(parts)  # type: ignore[assignment]
    lengths: list[Tensor] = []
    trained = 0

    def minibatch(loader: MinibatchLoader, number: int) -> Any:
        nonlocal trained
        began = watch.clock()
        result = original(loader, number)
        watch.seconds["data"] += watch.clock() - began
        lengths.append(result.samples.length)
        trained += int(result.samples.loss_mask.sum())
        return result

    original = MinibatchLoader.minibatch
    MinibatchLoader.minibatch = minibatch  # type: ignore[method-assign]
    timer = UpdateTimer(watch)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=args.iterations, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, limit_val_batches=0,
        callbacks=[RolloutUpdate(validate_first=False), timer, StepTimer(watch)],
    )  # fmt: skip
    trainer.fit(agent, datamodule=datamodule)
    MinibatchLoader.minibatch = original  # type: ignore[method-assign]
    report(
        window,
        timer.phases[1:],
        trained / args.iterations,
        lengths,
        datamodule.update.length_buckets or default_buckets(agent.device),
    )


def report(
    window: str, phases: list[dict[str, float]], tokens: float, lengths: list[Tensor], buckets: int
) -> None:
    """Print times and padding."""
    whole = statistics.median(phase["whole"] for phase in phases)
    print(
        f"\ncontext.window={window}: {tokens / whole:,.0f} trained tokens/s, {whole:.3f} s a phase"
    )
    shares = {
        name: statistics.median(phase[name] / phase["whole"] for phase in phases)
        for name in ("data", "forward", "backward", "optimizer")
    }
    shares["rest"] = 1.0 - sum(shares.values())
    print("  time     " + "".join(f"  {name} {share:.1%}" for name, share in shares.items()))
    row = "".join(f"  {number}: {padding(lengths, number):.1%}" for number in BUCKETS)
    print(f"  padding by update.length_buckets {row}")
    now = padding(lengths, buckets)
    verdict = "met" if now < TARGET_PADDING else "missed"
    print(f"  as configured ({buckets}): {now:.1%}, target under {TARGET_PADDING:.0%}: {verdict}")


def padding(lengths: Sequence[Tensor], buckets: int) -> float:
    """Return the share of computed positions that are padding, over all minibatches."""
    computed = sum(
        len(rows) * int(minibatch[rows].max())
        for minibatch in lengths
        for rows in split_by_length(minibatch, buckets)
    )
    return 1.0 - sum(int(minibatch.sum()) for minibatch in lengths) / computed


def main() -> None:
    """Print the metrics of both windows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=5, help="the first is not timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine")
    parser.add_argument("overrides", nargs="*", help="of the config, such as rollout.groups=64")
    args = parser.parse_args()
    use_threads(args.threads)
    torch.manual_seed(0)
    for window in ("1", "all"):
        run(window, args)


if __name__ == "__main__":
    main()
