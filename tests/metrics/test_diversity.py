"""Distinct responses and the distribution of actions, by hand."""

import math
from types import SimpleNamespace

import pytest

from ragen_pl.metrics.diversity import ResponseDiversity


def episode(*turns):
    return SimpleNamespace(
        turns=[SimpleNamespace(response_text=r, think=t, actions=a) for r, t, a in turns]
    )


def test_by_hand():
    metric = ResponseDiversity()
    metric.update([episode(("a", "x", ["Up"]), ("a", "x", ["Up"]), ("b", None, []))])
    metric.update([episode(("c\udc80", "y", ["Up", "Left"]))])
    figures = metric.compute()
    assert figures["think_blocks"] == 3 / 4
    assert figures["distinct_responses"] == 3 / 4 and figures["distinct_thoughts"] == 2 / 3
    assert (
        figures["action/Up"] == figures["top_action"] == 3 / 4 and figures["action/Left"] == 1 / 4
    )
    assert figures["action_entropy"] == pytest.approx(
        -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    )


def test_nothing_counted_gives_no_figure():
    metric = ResponseDiversity()
    metric.update([episode()])
    assert metric.compute() == {}


def test_many_actions_are_not_told_one_by_one():
    metric = ResponseDiversity()
    metric.update([episode(*((str(n), "x", [str(n)]) for n in range(9)))])
    assert not any(name.startswith("action/") for name in metric.compute())
    assert metric.compute()["action_entropy"] == pytest.approx(math.log(9))
