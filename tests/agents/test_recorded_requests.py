"""Requests that SDKs made, sent again over HTTP. `record.py` renews them."""

from __future__ import annotations

import sys

import pytest
from support.episodes.agent_cases import CASES, PROGRAMS, REQUESTS
from support.episodes.agent_programs import check_record


@pytest.mark.parametrize("name", CASES)
def test_requests_of_an_sdk_are_recorded_exactly(name):
    case = CASES[name]
    replay = [sys.executable, "-S", str(PROGRAMS / "replay.py"), str(REQUESTS / f"{name}.json")]
    trajectory, engine = case.play(replay)
    check_record(trajectory, engine, samples=case.samples, stopped=case.stopped)
    assert len(trajectory.turns) == len(case.says)
    assert len(trajectory.turns[-1].prompt_images) == case.images
