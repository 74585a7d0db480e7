"""A metric of named sums, the base of the project's statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from ragen_pl.base.distributed import gather_states
from ragen_pl.base.finite import largest


class NamedSums(Metric):
    """Float64 sums by name and, for some names, maxima; subclasses turn them into metrics.

    The ranks synchronize one vector of all sums.

    Args:
        names: Names of the sums.
        maxima: Names of the maxima.
        over_ranks: Whether `compute` adds up the sums of all ranks, or returns those of this process alone.
    """

    full_state_update = False
    sums: Tensor
    maxima: Tensor

    def __init__(
        self, names: Sequence[str], *, maxima: Sequence[str] = (), over_ranks: bool = True
    ) -> None:
        super().__init__(sync_on_compute=over_ranks, dist_sync_fn=gather_states)
        self.names, self.maximum_names = tuple(names), tuple(maxima)
        self.add_state(
            "sums", torch.zeros(len(self.names), dtype=torch.float64), dist_reduce_fx="sum"
        )
        if maxima:
            self.add_state(
                "maxima",
                torch.zeros(len(self.maximum_names), dtype=torch.float64),
                dist_reduce_fx="max",
            )

    def update(self, values: Mapping[str, float | Tensor]) -> None:
        """Add to the named sums and raise the named maxima."""
        unknown = set(values) - set(self.names) - set(self.maximum_names)
        if unknown:
            raise KeyError(
                f"{type(self).__name__} has no sums named {sorted(unknown)}; it has {self.names}"
            )
        numbers = _numbers(values)
        for number, name in enumerate(self.names):
            if name in numbers:
                self.sums[number] += numbers[name]
        for number, name in enumerate(self.maximum_names):
            if name in numbers:
                # NaN stays NaN
                self.maxima[number] = largest(float(self.maxima[number]), numbers[name])

    def totals(self) -> dict[str, float]:
        """Return sums and maxima by name."""
        totals = dict(zip(self.names, self.sums.tolist(), strict=True))
        if self.maximum_names:
            totals |= dict(zip(self.maximum_names, self.maxima.tolist(), strict=True))
        return totals

    def compute(self) -> dict[str, float]:
        """Return the metrics; subclasses divide the sums."""
        return self.totals()

    def export_state(self) -> list[float]:
        """Return the unreduced state, for a checkpoint."""
        return self.sums.tolist() + (self.maxima.tolist() if self.maximum_names else [])

    def import_state(self, state: Sequence[float]) -> None:
        """Restore the state of `export_state`. One with other names, of another release, is left out."""
        self.reset()
        if len(state) != len(self.names) + len(self.maximum_names):
            return
        self._update_count = 1
        self.sums += torch.tensor(
            state[: len(self.names)], dtype=torch.float64, device=self.sums.device
        )
        if self.maximum_names:
            self.maxima += torch.tensor(
                state[len(self.names) :], dtype=torch.float64, device=self.maxima.device
            )


def _numbers(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Return scalars as numbers, with one wait for each device that some are on."""
    numbers: dict[str, float] = {}
    on_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, value in values.items():
        if isinstance(value, Tensor):
            on_device[value.device][name] = value.detach().double().reshape(())
        else:
            numbers[name] = float(value)
    for tensors in on_device.values():
        numbers |= zip(tensors, torch.stack([*tensors.values()]).tolist(), strict=True)
    return numbers


def ratio(total: float, count: float) -> float:
    """Return total / count, NaN if the count is 0."""
    return total / count if count else float("nan")
