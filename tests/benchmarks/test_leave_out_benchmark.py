"""Rows of the table of left-out patches and turns."""

import sys
from pathlib import Path

import numpy as np
from support.episodes.trajectories import make_trajectory, make_turn

from ragen_pl.engines.protocol import Prompt
from ragen_pl.trajectory import Trajectory

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import leave_out

sys.path.pop(0)


def episode(*prompts: int, success: bool) -> Trajectory:
    turns = (make_turn(prompt_ids=np.zeros(length, np.int64)) for length in prompts)
    return make_trajectory(*turns, success=success)


def test_row_contains_success_and_tokens_per_turn() -> None:
    row = leave_out.line(
        [episode(10, 20, success=True), episode(30, success=False)],
        removed="half",
        selection="random",
    )
    assert row.startswith("| half | random | 0.500 ± ") and row.endswith("| 20.0 | 3.0 |")


def test_random_scores_are_reproducible() -> None:
    prompts = [Prompt(ids=np.zeros(5, np.int64), unexpanded_ids=np.zeros(5, np.int64))] * 2
    parts = [[np.array([1])] * 3, []]
    first, again = (
        leave_out.random_scores()(None, None, prompts, parts, max_tokens=4) for _ in range(2)
    )
    assert [len(scores) for scores in first] == [3, 0]
    assert first[0].tolist() == again[0].tolist()
