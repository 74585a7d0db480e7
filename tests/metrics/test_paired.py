"""Paired differences: the interval has the coverage that it claims, and knows of equal states and shared seeds."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_pl.metrics.paired import Paired, interquartile_mean, paired_difference


def one_run(
    left: np.ndarray, right: np.ndarray, *, states: range | list[int] | None = None
) -> Paired:
    count = range(len(left)) if states is None else states
    return paired_difference(
        left[None].astype(float),
        right[None].astype(float),
        states=count,
        same_seeds=False,
        resamples=2000,
    )


def width(paired: Paired) -> float:
    return paired.difference.high - paired.difference.low


def test_the_interval_covers_the_true_difference_nineteen_times_in_twenty() -> None:
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(200):
        easy = rng.random(100)
        draw = rng.random((2, 100))
        # how easy a state is counts for both, so pairs are better than two samples
        left, right = draw[0] < 0.2 + 0.7 * easy, draw[1] < 0.7 * easy
        found = paired_difference(
            left[None] * 1.0, right[None] * 1.0, states=range(100), same_seeds=False, resamples=500
        ).difference
        covered.append(found.low <= 0.2 <= found.high)
    assert 0.9 <= np.mean(covered) <= 0.99


@pytest.mark.parametrize(("gains", "losses"), [(0.02, 0.01), (0.04, 0.0)])
def test_the_interval_of_success_covers_it_where_few_states_differ(
    gains: float, losses: float
) -> None:
    rng = np.random.default_rng(4)
    covered = []
    for _ in range(200):
        draw, other = rng.random(64), rng.random(64) < 0.7
        gained, lost = draw < gains, draw > 1 - losses
        found = paired_difference(
            ((other | gained) & ~lost)[None] * 1.0,
            ((other | lost) & ~gained)[None] * 1.0,
            states=range(64), same_seeds=False, is_success=True, resamples=500,
        ).difference  # fmt: skip
        covered.append(found.low <= gains - losses <= found.high)
    assert np.mean(covered) >= 0.93


def test_the_interval_of_one_pair_is_that_of_the_mean_difference() -> None:
    rng = np.random.default_rng(1)
    left, right = rng.random(400) < 0.7, rng.random(400) < 0.5
    found = one_run(left, right)
    difference = left.astype(float) - right
    half = 1.96 * difference.std(ddof=1) / 20
    assert found.difference.value == pytest.approx(difference.mean())
    assert found.difference.low == pytest.approx(difference.mean() - half, abs=0.01)
    assert found.difference.high == pytest.approx(difference.mean() + half, abs=0.01)
    assert (found.left.value, found.right.value) == (left.mean(), right.mean())


def test_episodes_from_equal_states_are_drawn_together() -> None:
    rng = np.random.default_rng(2)
    left, right = np.repeat(rng.random(50) < 0.7, 8), np.repeat(rng.random(50) < 0.5, 8)
    apart = one_run(left, right)
    together = one_run(left, right, states=list(np.repeat(range(50), 8)))
    assert together.difference.value == apart.difference.value
    assert width(together) == pytest.approx(np.sqrt(8) * width(apart), rel=0.15)


def test_runs_of_the_same_seeds_are_pairs() -> None:
    rng = np.random.default_rng(3)
    of_seed = rng.normal(size=(5, 1))
    left, right = of_seed + 0.1 + np.zeros((5, 30)), of_seed + np.zeros((5, 30))
    paired = paired_difference(left, right, states=range(30), same_seeds=True)
    apart = paired_difference(left, right, states=range(30), same_seeds=False)
    assert paired.difference.value == pytest.approx(0.1) == apart.difference.value
    assert width(paired) == pytest.approx(0, abs=1e-9) and width(apart) > 0.5


def test_a_lucky_run_is_left_out_of_the_interquartile_mean() -> None:
    values = np.array([[0.1, 0.2, 0.3, 0.4, 9.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert interquartile_mean(values) == pytest.approx([0.3, 1.0])
    assert interquartile_mean(np.array([0.0, 1.0, 2.0, 30.0])) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("runs", "episodes", "same", "text"),
    [((2, 2), (3, 4), False, "3 and 4 episodes"), ((2, 3), (4, 4), True, "2 and 3 runs")],
)
def test_shapes_that_do_not_fit(
    runs: tuple[int, int], episodes: tuple[int, int], same: bool, text: str
) -> None:
    sides = [np.zeros(shape) for shape in zip(runs, episodes, strict=True)]
    with pytest.raises(ValueError, match=text):
        paired_difference(*sides, states=range(4), same_seeds=same)
