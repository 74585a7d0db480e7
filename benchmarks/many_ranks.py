"""Bytes that a rank receives in the collectives of an iteration, on 2, 4, 8 and 16 ranks with the same load each.

    python benchmarks/many_ranks.py

Ranks are processes of this machine that meet by gloo. Each has the same number of groups of FrozenLake with images,
played by the optimal policy. The kernel counts the bytes that a process has received by TCP. The table has the largest
number among the ranks: the trainer's way, and the same values gathered on every rank.

- **samples, gradients, rollout ahead**: a checkpoint inside an update. Each rank writes its own.
- **groups that move**: the filter keeps the groups of every other rank, so half of them move to another rank.
- **one group kept**: ranks without a group get one episode that does not count.
- **first thoughts**: the probe of reasoning chooses the same number of thoughts on any number of ranks.
- **highest entropies**: a fifth of the tokens. A sum over ranks passes a value up to twice.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from received_bytes import received_in
from rich.console import Console
from rich.table import Table

import ragen_pl.visual_envs  # noqa: F401
from ragen_pl.algorithms.group_filter import AboveDeviation, GroupFilter
from ragen_pl.base.distributed import gather_over_ranks, packed_on_host
from ragen_pl.callbacks.reasoning_probe import first_thoughts
from ragen_pl.checkpoints.rank_states import rank_states_in, save_rank_states
from ragen_pl.data.ahead import RolloutAhead
from ragen_pl.data.collate import collate
from ragen_pl.data.group_selection import GroupSelection, select_groups
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.envs.policies import OptimalPolicy
from ragen_pl.models.build import build_small_vlm
from ragen_pl.modules.masking import TokenMasks, keep_top_entropy
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.background import BackgroundRollout
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.trajectory import Trajectory

RANKS = (2, 4, 8, 16)
FRACTION = 0.2


@dataclass(frozen=True, kw_only=True)
class Load:
    """Numbers of groups, episodes and thoughts of a rank."""

    groups: int = 4
    group_size: int = 2
    gradients: int = 50_000
    """Numbers of float32."""
    entropies: int = 20_000
    thoughts: int = 8
    """Of all ranks."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of an iteration: the trainer's way, and the values that a rank would give to be gathered."""

    run: Callable[[], Any]
    values: Any


def measure(ranks: int, load: Load, *, start_method: str) -> list[dict[str, Any]]:
    """Return the bytes that each rank has received (`received`, `gathered`, `values`) and the values it ends with.

    Args:
        ranks: Number of ranks.
        load: What each has.
        start_method: Of Python's multiprocessing.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = (ranks, load, folder)
        mp.start_processes(_measure_rank, args=settings, nprocs=ranks, start_method=start_method)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _measure_rank(rank: int, ranks: int, load: Load, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    found: dict[str, Any] = {"received": {}, "gathered": {}, "values": {}}
    results = {}
    with rank_states_in(Path(folder, "checkpoint")):
        for name, collective in collectives(rank, ranks, load).items():
            results[name], found["received"][name] = received_in(collective.run)
            gather = partial(gather_over_ranks, collective.values)
            _, found["gathered"][name] = received_in(gather)
            found["values"][name] = len(packed_on_host(collective.values))
    for name in ("groups that move", "one group kept"):
        found[name] = contents(results[name])
    found["first thoughts"] = [thought.group for thought in results["first thoughts"]]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def collectives(rank: int, ranks: int, load: Load) -> dict[str, Collective]:
    """Return the collectives by name, with this rank's values."""
    proxy = build_proxy()
    specs = [
        EpisodeSpec(group=group, member=member, seed=group)
        for group in range(rank, ranks * load.groups, ranks)
        for member in range(load.group_size)
    ]
    played = proxy.rollout(scripted(), specs, seed_key=(0,))
    samples = collate(played, proxy.context.bundle).state_dict()
    gradients = {"weight": torch.full((load.gradients,), float(rank))}
    ahead = RolloutAhead(1, lambda trajectories: None)
    ahead.begin(1, BackgroundRollout(proxy, scripted(), specs, seed_key=(1,)), weights_of=0)
    kept = [one for one in played if is_kept(one, ranks)]
    # of two neighbors one has groups to give
    moving = [one for one in kept if one.group // ranks >= load.groups // 2]
    entropy = torch.rand(1, load.entropies, generator=torch.Generator().manual_seed(rank))
    masks = TokenMasks(
        loss_weight=torch.ones_like(entropy), advantage=torch.ones_like(entropy).bool(), kl=None
    )
    first_turns = [one.turns[0] for one in played if one.member == 0]
    thoughts = [(one.prompt_ids, one.prompt_images, one.response_ids) for one in first_turns]
    return {
        "samples": Collective(partial(save_rank_states, samples, name="samples"), samples),
        "gradients": Collective(partial(save_rank_states, gradients, name="gradients"), gradients),
        "rollout ahead": Collective(ahead.state_dict, played),
        "groups that move": Collective(
            partial(select, played, returns=lambda one: float(is_kept(one, ranks) * one.member)),
            moving,
        ),
        "one group kept": Collective(
            partial(select, played, returns=lambda one: float((one.group == 0) * one.member)),
            played[:1] if rank == 0 else [],
        ),
        "first thoughts": Collective(
            partial(first_thoughts, played, count=load.thoughts), thoughts
        ),
        "highest entropies": Collective(
            partial(keep_top_entropy, masks, entropy, fraction=FRACTION), entropy
        ),
    }


@functools.cache
def build_proxy() -> AgentProxy[ContextManager]:
    """Return the proxy that plays FrozenLake with images."""
    environments = EnvironmentManager(
        target="ragen/FrozenLakeVisual-v0", max_turns=2, kwargs={"min_distance": 2}
    )
    return AgentProxy(
        environments=environments, context=ContextManager(build_small_vlm(), system_prompt=None)
    )


def scripted() -> ScriptedResponder:
    """Return the responder of the optimal policy."""
    return ScriptedResponder(policy=OptimalPolicy())


def is_kept(trajectory: Trajectory, ranks: int) -> bool:
    """Return whether the filter keeps a group: those of every other rank."""
    return trajectory.group % ranks % 2 == 0


def select(
    played: Sequence[Trajectory], *, returns: Callable[[Trajectory], float]
) -> GroupSelection:
    """Return this rank's part of the groups whose returns differ."""
    return select_groups(played, GroupFilter(keep=AboveDeviation()), returns=returns)


def contents(selection: GroupSelection) -> dict[str, Any]:
    """Return group, member and a digest of each trajectory of a selection."""
    return {
        "is_dummy": selection.is_dummy,
        "episodes": [(one.group, one.member, digest(one)) for one in selection.trajectories],
    }


def digest(trajectory: Trajectory) -> str:
    """Return a digest of a trajectory's responses and images."""
    content = hashlib.blake2b(digest_size=8)
    for turn in trajectory.turns:
        for part in (turn.prompt_ids, turn.response_ids, *turn.prompt_images):
            content.update(part.tobytes())
    return content.hexdigest()


def report(found: Mapping[int, Sequence[Mapping[str, Any]]]) -> Table:
    """Return the table of the largest number of received kilobytes among the ranks, by the number of ranks."""
    table = Table(title="kB that a rank receives, at most (gathered on all ranks)")
    table.add_column("collective", no_wrap=True)
    for ranks in found:
        table.add_column(f"{ranks} ranks", justify="right")
    for name in next(iter(found.values()))[0]["received"]:
        cells = []
        for of_ranks in found.values():
            received, gathered = (
                max(one[kind][name] for one in of_ranks) for kind in ("received", "gathered")
            )
            cells.append(f"{received / 1000:,.1f} ({gathered / 1000:,.1f})")
        table.add_row(name, *cells)
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    arguments = parser.parse_args()
    # ranks are forks of this process, which must have one thread
    torch.set_num_threads(1)
    build_proxy()
    found = {ranks: measure(ranks, Load(), start_method="fork") for ranks in arguments.ranks}
    Console(width=120).print(report(found))


if __name__ == "__main__":
    main()
