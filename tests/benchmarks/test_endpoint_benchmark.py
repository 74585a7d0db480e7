"""The benchmark of the endpoint plays the same task both ways."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("way", ["environment", "program"])
def test_both_ways_end_the_task(way, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("TURNS", "2")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    import endpoint

    target, kwargs = endpoint.ways_to_play(2)[way]
    options = Namespace(sessions=2, turns=2, call_ms=0.0)
    seconds, _ = endpoint.rollout_s(target, kwargs, options, together=True)
    assert seconds > 0
    sys.modules.pop("endpoint")
