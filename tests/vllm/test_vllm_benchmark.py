"""The rollout benchmark with every way to sample."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.models.vllm_models import build

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
ORDER = ("in-process engine", "vLLM", "generate", "TRL")


def test_every_way_plays_the_dialogue(tmp_path):
    build("images").save(tmp_path / "model")
    sizes = "--num-envs 4 --turns 2 --rounds 1 --waiting-envs 4 --longest 24 --step-ms 0 5"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "rollout.py", *sizes.split(), "--tables", "ways",
         "waiting", "--models", "default, text", "--path", tmp_path / "model"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert "not installed" not in done.stdout
    prefilled: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        if line.endswith("%"):
            prefilled.setdefault(line[:20].strip(), []).append(float(line.split()[-2]))
    assert set(prefilled) == set(ORDER)
    # text, then images: each way has played the same dialogue
    for in_process, vllm, whole, trl in zip(*map(prefilled.get, ORDER), strict=True):
        assert 0 < in_process < whole and 0 < vllm < whole == trl
    costs = [line.split() for line in done.stdout.splitlines() if " ms " in line]
    assert [cells[0] for cells in costs] == ["0", "5"]
    # the responses are the same, and so is their number
    assert costs[0][8:] == costs[1][8:]
    shortest, mean, longest = (float(cell.strip(",")) for cell in costs[0][-3:])
    assert shortest < mean < longest <= 24
