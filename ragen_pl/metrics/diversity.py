"""Diversity of responses: distinct responses, distinct thoughts and the distribution of actions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torchmetrics import Metric

from ragen_pl.base.distributed import gather_over_ranks, gather_states
from ragen_pl.trajectory import Trajectory

DIAGNOSTICS: Final = (
    "think_blocks",
    "distinct_responses",
    "distinct_thoughts",
    "action_entropy",
    "top_action",
    "action/*",
)
"""Names of the metrics, which `Diagnostics` reads. The config reads this constant without importing the module."""

MAX_ACTIONS = 8
"""Largest number of actions each of which has a metric of its own."""


class ResponseDiversity(Metric):
    """Counts of distinct responses, thoughts and actions, from digests: ranks need not exchange texts.

    Args:
        over_ranks: Whether `compute` counts the responses of all ranks, or of this process alone.
    """

    full_state_update = False
    responses: list[Tensor]
    thoughts: list[Tensor]
    actions: list[Tensor]

    def __init__(self, *, over_ranks: bool = True) -> None:
        super().__init__(sync_on_compute=over_ranks, dist_sync_fn=gather_states)
        self.over_ranks = over_ranks
        # Names of actions by digest.
        self.action_names: dict[int, str] = {}
        for name in ("responses", "thoughts", "actions"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Count these trajectories' turns."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        actions = [action for turn in turns for action in turn.actions]
        self.action_names |= {_digest(action): action for action in set(actions)}
        # Digests start with a 0 that is not counted: an empty list can't be gathered over ranks.
        self.responses.append(_digests([turn.response_text for turn in turns]))
        self.thoughts.append(_digests([turn.think for turn in turns if turn.think is not None]))
        self.actions.append(_digests(actions))

    def compute(self) -> dict[str, float]:
        """Return the metrics; those with nothing to count are left out.

        `think_blocks`: fraction of responses with a valid think block; `distinct_responses`, `distinct_thoughts`:
        number of different ones divided by the number of all; `action_entropy`: entropy of the distribution of
        actions, in nats; `top_action`: fraction of the most frequent action; `action/<name>`: fraction of each action,
        for up to eight actions.
        """
        responses, thoughts, actions = map(_joined, (self.responses, self.thoughts, self.actions))
        metrics: dict[str, float] = {}
        if len(responses):
            metrics["think_blocks"] = len(thoughts) / len(responses)
            metrics["distinct_responses"] = len(responses.unique()) / len(responses)
        if len(thoughts):
            metrics["distinct_thoughts"] = len(thoughts.unique()) / len(thoughts)
        if len(actions):
            metrics |= self._action_metrics(actions)
        return metrics

    def _action_metrics(self, actions: Tensor) -> dict[str, float]:
        names: dict[int, str] = {}
        for own in gather_over_ranks(self.action_names) if self.over_ranks else [self.action_names]:
            names |= own
        kinds, counts = actions.unique(return_counts=True)
        fractions = {
            names[kind]: count / len(actions)
            for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)
        }
        metrics = {
            "action_entropy": sum(
                -fraction * math.log(fraction) for fraction in fractions.values()
            ),
            "top_action": max(fractions.values()),
        }
        if len(fractions) <= MAX_ACTIONS:
            metrics |= {f"action/{name}": fractions[name] for name in sorted(fractions)}
        return metrics


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def _digests(texts: Sequence[str]) -> Tensor:
    return torch.tensor([0, *(_digest(text) for text in texts)], dtype=torch.int64)


def _joined(state: list[Tensor] | Tensor) -> Tensor:
    """Return all digests of a state, which is one tensor if torchmetrics gathered it over ranks."""
    digests = state if isinstance(state, Tensor) else torch.cat([torch.zeros(0).long(), *state])
    return digests[digests != 0]
