"""Group filters: the groups that are trained on, and their weights.

A rule takes the returns and groups of all trajectories of the iteration, all ranks included, and returns the
trajectories to keep. Groups are kept or dropped whole. `GroupFilter` adds loss rescaling, reweighting and
further rollouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.group import group_std
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, CountOrZero, NonNegative, PositiveFraction
from ragen_pl.base.run_facts import RunFacts


class Filter(Protocol):
    """Rule that selects groups.

    Attributes:
        judges_alone: The rule judges each group by its own returns only.
        needs_groups: The rule compares the returns inside a group.
    """

    judges_alone: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = True

    def __call__(self, returns: Tensor, group: Tensor) -> Tensor:
        """Return the trajectories to keep, bool `[trajectories]`.

        Args:
            returns: `[trajectories]`.
            group: int64 `[trajectories]`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class KeepAll(Filter):
    """Keep every group (StarPO)."""

    needs_trust = ()

    needs_groups: ClassVar[bool] = False

    def __call__(self, returns: Tensor, group: Tensor) -> Tensor:
        """Return True for every trajectory."""
        return torch.ones_like(group, dtype=torch.bool)


@checked
@dataclass(frozen=True, kw_only=True)
class TopFraction(Filter):
    """Keep this fraction of the groups, and at least `minimum`, by highest deviation (StarPO-S)."""

    needs_trust = ()

    fraction: PositiveFraction = 0.25
    minimum: Count = 1

    def __call__(self, returns: Tensor, group: Tensor) -> Tensor:
        """Return the trajectories of the first groups in the ranking."""
        ranked, _ = rank_groups(returns, group)
        # Rounded up, less the noise of a product such as 0.1 * 30 = 3.0000000000000004.
        count = math.ceil(self.fraction * len(ranked) - 1e-9)
        return torch.isin(group, ranked[: max(count, self.minimum)])


@checked
@dataclass(frozen=True, kw_only=True)
class TopCount(Filter):
    """Keep `count` groups, those with the highest deviation."""

    needs_trust = ()

    count: Count

    def __call__(self, returns: Tensor, group: Tensor) -> Tensor:
        """Return the trajectories of the first groups in the ranking."""
        return torch.isin(group, rank_groups(returns, group)[0][: self.count])


@checked
@dataclass(frozen=True, kw_only=True)
class TopMass(Filter):
    """Keep the fewest groups that hold this fraction of the summed deviation (top-p), and at least `minimum`."""

    needs_trust = ()

    fraction: PositiveFraction = 0.9
    minimum: Count = 1

    def __call__(self, returns: Tensor, group: Tensor) -> Tensor:
        """Return the trajectories of the groups up to the one that reaches that fraction."""
        ranked, deviations = rank_groups(returns, group)
        mass = deviations.double().cumsum(0)
        threshold = self.fraction * mass[-1] if len(mass) else 0.0
        # The group that reaches that fraction is kept: count the groups below it and add one.
        count = int((mass < threshold - 1e-9).sum()) + 1
        return torch.isin(group, ranked[: max(count, self.minimum)])


@checked
@dataclass(frozen=True, kw_only=True)
class AboveDeviation(Filter):
    """Keep groups whose deviation exceeds a threshold; 0 is DAPO's dynamic sampling."""

    needs_trust = ()

    judges_alone: ClassVar[bool] = True
    threshold: NonNegative = 0.0

    def __call__(self, returns: Tensor, group: Tensor) -> Tensor:
        """Return the trajectories of the groups above the threshold, possibly none."""
        return group_std(returns, group) > self.threshold


def rank_groups(returns: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Order groups by falling deviation of their returns; ties by rising group index.

    Args:
        returns: `[trajectories]`.
        group: int64 `[trajectories]`.

    Returns:
        Group indices and their deviations, each `[groups]`.

    >>> rank_groups(torch.tensor([0.0, 0.0, 1.0, 3.0]), torch.tensor([4, 4, 7, 7]))
    (tensor([7, 4]), tensor([1.4142, 0.0000]))
    """
    groups = torch.unique(group, sorted=True)
    first = (group[None, :] == groups[:, None]).int().argmax(dim=1)
    deviations = group_std(returns, group)[first]
    order = deviations.argsort(descending=True, stable=True)
    return groups[order], deviations[order]


class Rescale(StrEnum):
    """Factor of the policy's loss as a function of the fraction of groups that were kept."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"

    def factor(self, fraction: float) -> float:
        """Return the factor at this fraction.

        >>> Rescale.SQRT.factor(0.25)
        0.5
        """
        return {Rescale.NONE: 1.0, Rescale.LINEAR: fraction, Rescale.SQRT: fraction**0.5}[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterResult:
    """Decision of a group filter on the trajectories of an iteration.

    Attributes:
        keep: Bool `[trajectories]`.
        weight: float32 `[trajectories]`, factor of the policy's loss; 0 where dropped.
        kept_fraction: Number of kept groups divided by the number of groups.
        deviation: Mean in-group deviation of the kept groups' returns.
    """

    keep: Tensor
    weight: Tensor
    kept_fraction: float
    deviation: float


@checked
@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Choose groups by their returns.

    Args:
        keep: Rule that selects groups.
        rescale: Factor of the policy's loss as a function of the kept fraction.
        reweight: Exponent; the loss of a kept group is multiplied by its deviation to this power, scaled to
            mean 1 over the kept groups. 0 treats them alike.
        resample: Maximum number of further rollouts to fill the batch with groups that pass (DAPO, Yu et
            al., 2025); for rules that judge each group by itself.

    Raises:
        ValueError: `rescale` with a rule that keeps all groups, or `resample` with a rule that ranks groups
            against each other.
    """

    needs_trust = ()

    keep: Filter = field(default_factory=KeepAll)
    rescale: Rescale = Rescale.NONE
    reweight: NonNegative = 0.0
    resample: CountOrZero = 0

    def __post_init__(self) -> None:
        if self.rescale is not Rescale.NONE and not self.keep.needs_groups:
            raise ValueError(
                f"algorithm.filter.rescale={self.rescale}: all groups are kept, and the fraction of kept groups is 1; "
                "set rescale=none, or another rule to keep groups by"
            )
        if self.resample and not self.keep.judges_alone:
            raise ValueError(
                f"algorithm.filter.resample={self.resample}: {type(self.keep).__name__} does not judge each "
                "group by itself, and no number of rollouts fills a batch; set resample=0 or keep AboveDeviation"
            )

    @property
    def needs_groups(self) -> bool:
        """Whether the filter compares the returns inside a group."""
        return self.keep.needs_groups or self.reweight > 0

    def check_run(self, facts: RunFacts) -> None:
        """Check that a group has several episodes, if the filter compares them, and groups one scale of rewards.

        Raises:
            ValueError: They have not.
        """
        if self.needs_groups:
            facts.require_groups(self, key="algorithm.filter")
        ranks = self.keep.needs_groups and not self.keep.judges_alone
        if facts.environments > 1 and (ranks or self.reweight):
            raise ValueError(
                f"algorithm.filter: {type(self.keep).__name__} with reweight={self.reweight:g} compares the deviations "
                "of groups, and the environments of a mixture have rewards of different scales; set reweight=0 and "
                "KeepAll or AboveDeviation"
            )

    def __call__(self, returns: Tensor, group: Tensor, *, limit: int | None = None) -> FilterResult:
        """Judge the trajectories of an iteration, all ranks included.

        Args:
            returns: `[trajectories]`.
            group: int64 `[trajectories]`.
            limit: Maximum number of groups to keep, the first of those that pass; `kept_fraction` is of all that pass.

        >>> group_filter = GroupFilter(reweight=1.0)
        >>> group_filter(torch.tensor([0.0, 2.0, 0.0, 6.0]), torch.tensor([0, 0, 1, 1])).weight
        tensor([0.5000, 0.5000, 1.5000, 1.5000])
        """
        keep = self.keep(returns, group)
        groups, kept = len(torch.unique(group)), len(torch.unique(group[keep]))
        fraction = kept / groups if groups else 1.0
        if limit is not None:
            keep = keep & torch.isin(group, torch.unique(group[keep])[:limit])
        deviation = group_std(returns, group)
        weight = self._deviation_weight(deviation, keep, group) * self.rescale.factor(fraction)
        return FilterResult(
            keep=keep,
            weight=torch.where(keep, weight, 0.0),
            kept_fraction=fraction,
            deviation=float(_per_group(deviation, group, keep).mean()) if kept else 0.0,
        )

    def _deviation_weight(self, deviation: Tensor, keep: Tensor, group: Tensor) -> Tensor:
        if not self.reweight:
            return torch.ones_like(deviation)
        powers = deviation.pow(self.reweight)
        mean = _per_group(powers, group, keep).mean()
        # where no kept group has any deviation, all weigh the same
        return powers / mean if float(mean) > 0 else torch.ones_like(deviation)


def _per_group(values: Tensor, group: Tensor, keep: Tensor) -> Tensor:
    """Return one value for each kept group, `[groups]`."""
    groups = torch.unique(group[keep])
    first = (group[None, :] == groups[:, None]).int().argmax(dim=1)
    return values[first]
