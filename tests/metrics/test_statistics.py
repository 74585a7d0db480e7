"""Metrics computed by hand, and independent of how the counted episodes are split."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.trajectories import make_trajectory, make_turn
from support.runs.module_process import run_two_ranks

from ragen_pl.metrics.proportions import Z, objective, success_interval, wilson
from ragen_pl.metrics.rollout import RolloutStatistics, rollout_metrics
from ragen_pl.metrics.sums import NamedSums
from ragen_pl.metrics.update import PreparationStatistics, UpdateStatistics
from ragen_pl.trajectory import EpisodeStatus

turn = partial(make_turn, tokens=4, thinks=1)


EPISODES = [
    make_trajectory(turn(), turn(reward=1.0, tokens=8, thinks=3, response_entropy=2.0), group=0, success=True),
    make_trajectory(
        turn(reward=-0.1, action_is_valid=False, action_is_effective=False, hit_length_limit=True), group=0,
        status=EpisodeStatus.TURN_LIMIT,
    ),
    make_trajectory(
        turn(state_description="a b", think="a b"),
        turn(action_is_effective=False, state_description="c", think="d"),
        group=1, status=EpisodeStatus.TRUNCATED,
    ),
    # what it earned before it was broken is no outcome
    make_trajectory(turn(reward=9.0), group=1, status=EpisodeStatus.FAILED),
]  # fmt: skip


def compute(*batches):
    statistics = RolloutStatistics()
    for batch in batches:
        statistics.update(batch)
    return statistics.compute()


def test_rollout_metrics_by_hand():
    expected = {
        "episodes": 3,
        "success": 1 / 3,
        **wilson(1 / 3, count=3).metrics("success"),
        "return": 0.9 / 3,
        "return_std": (1.01 / 3 - (0.9 / 3) ** 2) ** 0.5,
        # returns of the games 0.9 and 0, expected 0.6 and 0.3
        "return_low": 0.3 - Z * 0.2,
        "return_high": 0.3 + Z * 0.2,
        "turns": 5 / 3,
        "valid_actions": 4 / 5,
        "effective_actions": 3 / 5,
        "response_tokens": 24 / 5,
        "think_tokens": 7 / 5,
        "entropy": (4 * 4 + 8 * 2) / 24,
        "overlong_responses": 1 / 5,
        "failed": 1 / 4,
        "failed_episodes": 1,
        "turn_limit": 1 / 3,
        "truncated": 1 / 3,
        "think_accuracy": 1 / 2,
        "group_return_std": 1.1 / 2**0.5,
        "group_success": 1.0,
    }
    assert compute(EPISODES) == pytest.approx(expected)
    unsolved = [make_trajectory(turn(), group=5) for _ in range(2)]
    alone = make_trajectory(turn(), group=6, success=True)
    assert compute([*EPISODES, *unsolved, alone])["group_success"] == 0.5


def test_intervals_take_games_as_independent_and_not_their_episodes():
    def of_game(game, *, solved):
        return [
            make_trajectory(turn(reward=float(solved)), group=game, member=member, success=solved)
            for member in range(4)
        ]

    games = [of_game(game, solved=game < 2) for game in range(4)]
    metrics = compute(*games)
    assert metrics["success_low"] == wilson(0.5, count=4).low
    # of 4 values, half of them 1
    assert metrics["return_high"] == pytest.approx(0.5 + Z * (1 / 3) ** 0.5 / 2)
    assert success_interval(metrics).high == metrics["success_high"]
    # one environment's game 0 is not another's
    mixed = [replace(one, environment=name) for name in ("lake", "shop") for one in games[0]]
    assert compute(mixed)["success_high"] == wilson(1.0, count=2).high
    assert compute(mixed)["success_low"] == wilson(1.0, count=2).low
    for alone in ([episodes[0] for episodes in games], games[0]):
        assert "success_low" not in compute(alone)


def test_an_environment_that_says_no_success_is_measured_by_its_return():
    silent = make_trajectory(turn(reward=2.0, actions=["Up"], info={"coins": 2}))
    saying = make_trajectory(turn(actions=["Up"], success=False))
    assert compute([silent])["success_reported"] == 0.0
    assert objective(compute([silent])) == 2.0
    # an episode without a step says nothing about its environment
    for episodes in ([silent, saying], [saying], [make_trajectory(turn())]):
        assert "success_reported" not in compute(episodes)
        assert objective(compute(episodes)) == 0.0


def test_success_on_the_last_turn_is_not_a_turn_limit():
    episode = make_trajectory(turn(reward=1.0), status=EpisodeStatus.TURN_LIMIT, success=True)
    assert compute([episode])["turn_limit"] == 0


def test_metrics_of_no_episodes_are_nan_or_missing():
    metrics = compute([])
    assert metrics["episodes"] == 0
    assert np.isnan(metrics["success"]) and np.isnan(metrics["turns"])
    assert "think_accuracy" not in metrics and "group_return_std" not in metrics


def named(*terms, group=0):
    return make_trajectory(*(turn(reward_terms=own) for own in terms), group=group)


PARTS = [
    named({"environment/said": 0.5, "format": -0.1}, {"environment/said": 0.25, "bonus/said": 9.0}),
    named({"environment/found": 1.0, "environment": 4.0}, group=1),
]


def test_parts_of_the_environments_reward_are_means_over_episodes():
    metrics = compute(PARTS)
    parts = {name: value for name, value in metrics.items() if name.startswith("reward")}
    assert parts == {"reward/said": 0.75 / 2, "reward/found": 0.5}
    assert compute(*([episode] for episode in PARTS)) == metrics
    assert not any(name.startswith("reward") for name in compute(EPISODES))
    statistics = RolloutStatistics()
    statistics.update(PARTS)
    statistics.reset()
    statistics.update(EPISODES)
    assert statistics.compute() == compute(EPISODES)


def test_metrics_of_the_environment_are_means_over_the_steps_that_name_them():
    """In self-play the last turn of a game is one seat's, whose info alone has them."""
    games = [make_trajectory(turn(), turn()), make_trajectory(turn()), make_trajectory(turn())]
    games[0].turns[-1].info = {"metrics": {"agreement": 1.0, "joint_value": 1.5}}
    games[1].turns[-1].info = {"metrics": {"agreement": 0.0}}
    for metrics in (compute(games), compute(*([one] for one in games))):
        found = {name: value for name, value in metrics.items() if name.startswith("metrics")}
        assert found == {"metrics/agreement": 0.5, "metrics/joint_value": 1.5}


def count_parts(rank: int, folder: str) -> None:
    """Count one of the episodes on each rank; write the metrics."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    Path(folder, f"{rank}.json").write_text(json.dumps(compute([PARTS[rank]])))
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_with_different_parts_have_the_same_metrics(tmp_path):
    run_two_ranks(count_parts, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second == pytest.approx(compute(PARTS))


@settings(max_examples=30, derandomize=True)
@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(1, 9)), min_size=2, max_size=12), st.data())
def test_rollout_metrics_do_not_depend_on_the_split(rewards, data):
    """With groups of one: a larger group must not be split."""
    episodes = [
        make_trajectory(turn(reward=reward, tokens=tokens), group=number)
        for number, (reward, tokens) in enumerate(rewards)
    ]
    at = data.draw(st.integers(0, len(episodes)))
    order = data.draw(st.permutations(episodes))
    whole, split = compute(episodes), compute(order[:at], order[at:])
    # A standard deviation is the root of a difference, and so is its rounding error.
    spread, other = whole.pop("return_std"), split.pop("return_std")
    assert split == pytest.approx(whole, abs=1e-9) and other == pytest.approx(spread, abs=1e-6)


def test_update_metrics_by_hand():
    statistics = UpdateStatistics()
    statistics.update(
        {"tokens": 10, "entropy": 20.0, "clipped_low": 1, "approx_kl": 0.5, "loss": 0.4}
    )
    statistics.update(
        {"tokens": 30, "entropy": 20.0, "clipped_high": 3, "loss": 0.2, "kl_loss": 0.1}
    )
    metrics = statistics.metrics(steps=2)
    assert metrics["entropy"] == pytest.approx(1.0)  # over tokens, not over steps
    assert metrics["approx_kl"] == pytest.approx(0.0125)
    assert metrics["clip_fraction"] == pytest.approx(0.1)
    assert metrics["loss"] == pytest.approx(0.3) and metrics["kl_loss"] == pytest.approx(0.05)
    assert "reference_kl" not in metrics
    statistics.update({"kl": 3.0, "kl_tokens": 12})
    assert statistics.metrics(steps=2)["reference_kl"] == pytest.approx(0.25)
    statistics.update({"kl_turn_2": 3.0, "kl_tokens_turn_2": 4})
    metrics = statistics.metrics(steps=2)
    assert metrics["reference_kl_turn_2"] == 0.75 and "reference_kl_turn_1" not in metrics


def test_preparation_metrics_by_hand():
    """Returns 1, 3 and errors 0, 1: variances 1 and 1/4."""
    statistics = PreparationStatistics()
    statistics.update(
        {"tokens": 4, "mismatch": 0.2, "mismatch_max": 0.1, "mismatch_kl": 0.4, "entropy": 1.0, "trained": 2,
         "credited": 1, "returns": 1.0, "returns_square": 1.0}
    )  # fmt: skip
    statistics.update(
        {"tokens": 4, "mismatch": 0.2, "mismatch_max": 0.05, "credited": 1, "returns": 3.0,
         "returns_square": 9.0, "errors": 1.0, "errors_square": 1.0}
    )  # fmt: skip
    metrics = statistics.compute()
    assert metrics["logprob_mismatch"] == pytest.approx(0.05)
    assert metrics["logprob_mismatch_max"] == pytest.approx(0.1)
    assert metrics["logprob_mismatch_kl"] == pytest.approx(0.05)
    assert metrics["explained_variance"] == pytest.approx(0.75)
    assert metrics["policy_entropy"] == pytest.approx(0.5)


@pytest.mark.parametrize("value", [-0.05, 0.0, 3e4])
def test_equal_returns_leave_no_variance_to_explain(value: float):
    statistics = PreparationStatistics()
    for returns in np.float32([value, value * (1 + 1e-7), value]).tolist():
        statistics.update(
            {"credited": 1, "returns": returns, "returns_square": returns**2, "errors": 1.0, "errors_square": 2.0}
        )  # fmt: skip
    assert math.isnan(statistics.compute()["explained_variance"])


def test_sums_survive_export_and_import_bit_for_bit():
    sums, restored = (NamedSums(["a", "b"], maxima=["m"]) for _ in range(2))
    sums.update({"a": 0.1, "m": 3.0})
    sums.update({"a": 0.2, "b": 1e-9, "m": 2.0})
    restored.update({"a": 99.0, "m": 99.0})
    restored.import_state(sums.export_state())
    assert restored.totals() == sums.totals() == {"a": 0.1 + 0.2, "b": 1e-9, "m": 3.0}
    restored.update({"m": 4.0})
    assert restored.totals()["m"] == 4.0


def test_undeclared_name_is_rejected():
    with pytest.raises(KeyError, match=r"NamedSums has no sums named \['c'\]"):
        NamedSums(["a", "b"]).update({"c": 1.0})


@pytest.mark.parametrize(
    ("think", "right"),
    [("a", 1.0), ("a so reach 1 2", 1.0), ("a reach", 0.0), ("b so a", 0.0), (None, 0.0)],
)
def test_a_plan_after_the_description_is_no_wrong_thought(think, right):
    turn = make_turn(think=think, state_description="a")
    assert rollout_metrics([make_trajectory(turn)])["think_accuracy"] == right
