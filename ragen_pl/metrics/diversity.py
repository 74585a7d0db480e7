"""How varied responses are: distinct ones, distinct thoughts, and how actions are spread."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from ragen_pl.distributed import gather_over_ranks, gather_states
from ragen_pl.trajectory import Trajectory

_MOST_NAMES = 8  # actions beyond so many names are not told one by one


class ResponseDiversity(Metric):
    """Digests of responses, thoughts and actions, so that counting them over ranks needs no texts.

    Args:
        over_ranks: whether `compute` counts all ranks' responses; False for one process's.
    """

    full_state_update = False
    responses: list[Tensor]
    thoughts: list[Tensor]
    actions: list[Tensor]

    def __init__(self, *, over_ranks: bool = True) -> None:
        super().__init__(sync_on_compute=over_ranks, dist_sync_fn=gather_states)
        self.over_ranks = over_ranks
        self.names: dict[int, str] = {}  # of actions, by digest
        for name in ("responses", "thoughts", "actions"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Count these trajectories' turns."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        actions = [action for turn in turns for action in turn.actions]
        self.names |= {_digest(action): action for action in set(actions)}
        # a first 0 keeps every rank's list from being empty, which can't be gathered
        self.responses.append(_digests([turn.response_text for turn in turns]))
        self.thoughts.append(_digests([turn.think for turn in turns if turn.think is not None]))
        self.actions.append(_digests(actions))

    def compute(self) -> dict[str, float]:
        """Return the metrics; those without anything to count are left out.

        `think_blocks`: share of responses with a valid think block; `distinct_responses`, `distinct_thoughts`:
        different ones as a share of all; `action_entropy`: of the actions' distribution, in nats;
        `top_action`: share of the commonest; `action/<name>`: each action's share, where they are few.
        """
        responses, thoughts, actions = map(_joined, (self.responses, self.thoughts, self.actions))
        metrics: dict[str, float] = {}
        if len(responses):
            metrics["think_blocks"] = len(thoughts) / len(responses)
            metrics["distinct_responses"] = len(responses.unique()) / len(responses)
        if len(thoughts):
            metrics["distinct_thoughts"] = len(thoughts.unique()) / len(thoughts)
        if len(actions):
            metrics |= self._spread(actions)
        return metrics

    def _spread(self, actions: Tensor) -> dict[str, float]:
        names: dict[int, str] = {}
        for of_rank in gather_over_ranks(self.names) if self.over_ranks else [self.names]:
            names |= of_rank
        kinds, counts = actions.unique(return_counts=True)
        shares = {
            names[kind]: count / len(actions)
            for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)
        }
        metrics = {
            "action_entropy": sum(-share * math.log(share) for share in shares.values()),
            "top_action": max(shares.values()),
        }
        if len(shares) <= _MOST_NAMES:
            metrics |= {f"action/{name}": shares[name] for name in sorted(shares)}
        return metrics


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def _digests(texts: Sequence[str]) -> Tensor:
    return torch.tensor([0, *(_digest(text) for text in texts)], dtype=torch.int64)


def _joined(parts: list[Tensor] | Tensor) -> Tensor:
    """Return all digests of a state, which torchmetrics has joined where it gathered ranks."""
    every = parts if isinstance(parts, Tensor) else torch.cat([torch.zeros(0).long(), *parts])
    return every[every != 0]
