"""Bytes that a rank receives in the collectives of an iteration, by the kernel: they do not grow with the ranks."""

import sys
from pathlib import Path

import pytest
from support.runs.module_process import start_server

FOLDER = Path(__file__).parents[2] / "benchmarks"
RANKS = (2, 8)
NAMES = {
    "samples", "gradients", "rollout ahead", "groups that move", "one group kept", "first thoughts",
    "highest entropies",
}  # fmt: skip
# of the names and digests of a rank in tables, and of gloo's messages
TABLES = 2_000
# four tables of 256 counts of 8 bytes; a sum over ranks passes each up to twice
COUNTS = 4 * 2 * 256 * 8


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark's module, which its processes find too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import many_ranks

        yield many_ranks
    del sys.modules["many_ranks"]


@pytest.fixture(scope="module")
def load(benchmark):
    return benchmark.Load(groups=2, gradients=25_000, entropies=25_000, thoughts=4)


@pytest.fixture(scope="module")
def measured(benchmark, load):
    """Bytes and values that each rank has received, by the number of ranks."""
    method = start_server()
    return {ranks: benchmark.measure(ranks, load, start_method=method) for ranks in RANKS}


@pytest.fixture(scope="module")
def played(benchmark, load):
    """The episodes of all ranks, played in this process."""
    specs = [
        benchmark.EpisodeSpec(group=group, member=member, seed=group)
        for group in range(max(RANKS) * load.groups)
        for member in range(load.group_size)
    ]
    return benchmark.build_proxy().rollout(benchmark.scripted(), specs, seed_key=(0,))


@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_gathered_is_counted_in_full(measured, ranks):
    for name in measured[ranks][0]["gathered"]:
        largest = max(one["values"][name] for one in measured[ranks])
        for one in measured[ranks]:
            assert one["gathered"][name] > 0.95 * (ranks - 1) * largest, name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_rank_receives_what_it_needs(measured, load, name, ranks):
    assert measured[ranks][0]["received"].keys() == NAMES
    largest = max(one["values"][name] for one in measured[ranks])
    match name:
        case "groups that move" | "one group kept":
            # half of the groups of a rank, or one episode
            needed = largest
        case "first thoughts":
            needed = load.thoughts * largest / load.groups
        case "highest entropies":
            needed = COUNTS
        case _:
            needed = 0
    limit = 1.1 * needed + TABLES * ranks
    assert max(one["received"][name] for one in measured[ranks]) <= limit
    if ranks == max(RANKS):
        # else a rank that gathers everything would pass
        assert min(one["gathered"][name] for one in measured[ranks]) > 2 * limit


@pytest.mark.parametrize("ranks", RANKS)
def test_groups_that_move_arrive_whole(benchmark, measured, played, load, ranks):
    of_ranks = [one["groups that move"] for one in measured[ranks]]
    assert not any(one["is_dummy"] for one in of_ranks)
    sizes = {len(one["episodes"]) for one in of_ranks}
    assert sizes == {load.groups * load.group_size // 2}
    kept = [one for one in played if one.group < ranks * load.groups and one.group % 2 == 0]
    expected = [[one.group, one.member, benchmark.digest(one)] for one in kept]
    assert sorted(episode for one in of_ranks for episode in one["episodes"]) == expected
    moved = [
        episode[0] % ranks != number
        for number, one in enumerate(of_ranks)
        for episode in one["episodes"]
    ]
    assert sum(moved) == len(moved) // 2


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_without_a_group_get_one_episode_of_another(benchmark, measured, played, ranks):
    group = [[one.group, one.member, benchmark.digest(one)] for one in played if one.group == 0]
    first, *others = [one["one group kept"] for one in measured[ranks]]
    assert first == {"is_dummy": False, "episodes": group}
    assert all(other == {"is_dummy": True, "episodes": group[:1]} for other in others)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_first_thoughts_are_those_of_one_process(benchmark, measured, played, load, ranks):
    own = [one for one in played if one.group < ranks * load.groups]
    expected = [thought.group for thought in benchmark.first_thoughts(own, count=load.thoughts)]
    assert len(expected) == load.thoughts
    for one in measured[ranks]:
        assert one["first thoughts"] == expected
