"""Group filters over several ranks: groups stay whole, none is copied or lost, ranks have equal shares."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from ragen_pl.algorithms.group_filter import AboveDeviation, GroupFilter, TopFraction
from ragen_pl.data import group_selection
from ragen_pl.data.collate import as_dummy_batch, collate
from ragen_pl.trajectory import EpisodeStatus


class Ranks:
    """Ranks as threads of one process that meet at a barrier."""

    def __init__(self, count):
        self.count, self.local = count, threading.local()
        self.barrier, self.shelf = threading.Barrier(count, timeout=300), [None] * count

    def gather(self, value):
        self.shelf[self.local.rank] = value
        self.barrier.wait()
        gathered = list(self.shelf)
        self.barrier.wait()
        return gathered

    def values_of(self, sources, value):
        gathered = self.gather(value)
        return [gathered[source] for source in sources]

    def exchanged(self, outgoing):
        return [sent[self.local.rank] for sent in self.gather(outgoing) if self.local.rank in sent]

    def run(self, function):
        results = [None] * self.count

        def work(rank):
            self.local.rank = rank
            results[rank] = function(rank)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return results


@pytest.fixture
def choices(monkeypatch, make_trajectory, lm):
    """Return what each rank is left with of groups given as {group: returns of its members}."""

    def run(ranks, groups, group_filter, **options):
        meeting = Ranks(ranks)
        monkeypatch.setattr(group_selection, "gather_over_ranks", meeting.gather)
        monkeypatch.setattr(group_selection, "values_of", meeting.values_of)
        monkeypatch.setattr(group_selection, "exchanged", meeting.exchanged)
        monkeypatch.setattr(group_selection, "world_size", lambda: ranks)
        monkeypatch.setattr(group_selection, "rank", lambda: meeting.local.rank)
        played = [
            make_trajectory(lm, [3], group=group, member=member, rewards=[value])
            for group, values in groups.items()
            for member, value in enumerate(values)
        ]
        return meeting.run(
            lambda rank: group_selection.select_groups(
                [trajectory for trajectory in played if trajectory.group % ranks == rank],
                group_filter,
                returns=lambda trajectory: trajectory.reward,
                **options,
            )
        )

    return run


def kept(choice):
    return (
        []
        if choice.is_dummy
        else [(trajectory.group, trajectory.member) for trajectory in choice.trajectories]
    )


GROUPS = {0: (0, 1), 1: (0, 0), 2: (0, 3), 3: (1, 1), 4: (0, 2), 5: (2, 2), 6: (0, 5), 7: (0, 4)}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_kept_groups_do_not_depend_on_the_number_of_ranks(choices, ranks):
    selections = choices(ranks, GROUPS, GroupFilter(keep=TopFraction(fraction=0.5)))
    everything = sorted(pair for choice in selections for pair in kept(choice))
    assert everything == [(group, member) for group in (2, 4, 6, 7) for member in (0, 1)]
    sizes = [len(kept(choice)) // 2 for choice in selections]
    assert max(sizes) - min(sizes) <= 1  # 2, 4 and 6 were all rank 0's when there are two
    for choice in selections:
        assert {group for group, _ in kept(choice)} == {
            trajectory.group for trajectory in choice.trajectories
        }
        assert choice.metrics == {
            "kept_share": 0.5,
            "kept_deviation": pytest.approx(14 / 4 / 2**0.5),
        }


def test_rank_without_groups_gets_a_dummy_batch(choices, lm):
    selections = choices(3, GROUPS, GroupFilter(keep=TopFraction(fraction=0.01)))
    assert [choice.is_dummy for choice in selections].count(True) == 2
    assert [pair for choice in selections for pair in kept(choice)] == [(6, 0), (6, 1)]
    dummy = next(choice for choice in selections if choice.is_dummy)
    batch = as_dummy_batch(collate(dummy.trajectories, lm))
    assert len(batch.samples) == 1 and float(batch.samples.weight.sum()) == 0
    assert len(batch.episodes.turns) == 0


def test_one_group_is_kept_if_none_passes(choices):
    flat = dict.fromkeys(range(4), (1, 1))
    for choice in choices(1, flat, GroupFilter(keep=AboveDeviation())):
        assert kept(choice) == [(0, 0), (0, 1)] and choice.weights == [1.0, 1.0]
        assert choice.metrics["kept_share"] == 0.0
    # the second has the higher deviation, though the first has the larger range
    unlike = {0: (0, 0, 0, 1), 1: (0, 0, 0.9, 0.9), 2: (1, 1, 1, 1)}
    [choice] = choices(1, unlike, GroupFilter(keep=AboveDeviation(threshold=1.0)))
    assert {trajectory.group for trajectory in choice.trajectories} == {1}


def test_limit_bounds_the_number_of_groups(choices):
    [choice] = choices(1, GROUPS, GroupFilter(keep=AboveDeviation()), limit=3)
    assert kept(choice) == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1)] and choice.groups == 3


def test_weights_have_the_mean_1_over_the_groups_that_are_trained_on(choices):
    groups = {number: (0, 2**number) for number in range(4)}
    group_filter = GroupFilter(keep=AboveDeviation(), reweight=1.0, resample=1)
    [choice] = choices(1, groups, group_filter, limit=2)
    assert choice.weights == pytest.approx([2 / 3, 2 / 3, 4 / 3, 4 / 3])
    assert choice.metrics["kept_share"] == 1.0


def test_failed_episodes_are_ignored(make_trajectory, lm):
    good = [make_trajectory(lm, [3], member=member, rewards=[member]) for member in range(2)]
    failed = replace(good[0], group=1, status=EpisodeStatus.FAILED)
    choice = group_selection.select_groups(
        [*good, failed], GroupFilter(), returns=lambda trajectory: trajectory.reward
    )
    assert choice.trajectories == good


def test_weights_by_kept_share_and_by_deviation():
    returns, group = torch.tensor([0.0, 2, 0, 6, 1, 1]), torch.tensor([0, 0, 1, 1, 2, 2])
    weights = {
        rescale: GroupFilter(keep=AboveDeviation(), rescale=rescale)(returns, group).weight
        for rescale in ("none", "linear", "sqrt")
    }
    for rescale, expected in (("none", 1.0), ("linear", 2 / 3), ("sqrt", (2 / 3) ** 0.5)):
        assert weights[rescale].tolist() == pytest.approx([expected] * 4 + [0.0] * 2)
    soft = GroupFilter(keep=AboveDeviation(), reweight=2.0)(returns, group).weight
    assert soft.tolist() == pytest.approx([0.2, 0.2, 1.8, 1.8, 0, 0])  # 4 and 36 over their mean


@pytest.mark.parametrize(
    "settings", [{"resample": 2}, {"resample": 1, "keep": TopFraction()}, {"reweight": -1.0}]
)
def test_meaningless_settings_are_rejected(settings):
    with pytest.raises(ValueError, match=r"algorithm\.filter|GroupFilter: reweight"):
        GroupFilter(**settings)
