"""Distinct responses and the distribution of actions, computed by hand."""

import math

import pytest
from support.episodes.trajectories import make_trajectory, make_turn

from ragen_pl.metrics.diversity import ResponseDiversity


def episode(*turns):
    return make_trajectory(
        *(
            make_turn(response_text=text, think=think, actions=actions)
            for text, think, actions in turns
        )
    )


def test_diversity_by_hand():
    metric = ResponseDiversity()
    metric.update([episode(("a", "x", ["Up"]), ("a", "x", ["Up"]), ("b", None, []))])
    metric.update([episode(("c\udc80", "y", ["Up", "Left"]))])
    metrics = metric.compute()
    assert metrics["think_blocks"] == 3 / 4
    assert metrics["distinct_responses"] == 3 / 4 and metrics["distinct_thoughts"] == 2 / 3
    assert (
        metrics["action/Up"] == metrics["top_action"] == 3 / 4 and metrics["action/Left"] == 1 / 4
    )
    assert metrics["action_entropy"] == pytest.approx(
        -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    )


def test_diversity_of_nothing_has_no_metrics():
    metric = ResponseDiversity()
    metric.update([episode()])
    assert metric.compute() == {}


def test_many_actions_have_no_metric_each():
    metric = ResponseDiversity()
    metric.update([episode(*((str(n), "x", [str(n)]) for n in range(9)))])
    assert not any(name.startswith("action/") for name in metric.compute())
    assert metric.compute()["action_entropy"] == pytest.approx(math.log(9))
