"""The benchmark of memory: peaks of known allocations, and two ways that give the same step."""

import argparse
import sys
from pathlib import Path

import pytest
import torch
from rich.table import Table

from ragen_pl.models.distribution import log_distribution

FOLDER = Path(__file__).parents[2] / "benchmarks"
MIB = 2**20


@pytest.fixture(scope="module")
def memory():
    sys.path.insert(0, str(FOLDER))
    try:
        import memory
    finally:
        sys.path.remove(str(FOLDER))
    return memory


def allocate():
    kept = torch.zeros(10 * MIB)
    freed = torch.ones(5 * MIB)
    # two tensors of 20 MiB at a time, and then one
    total = float((freed + 1).sum())
    del freed
    later = torch.zeros(3 * MIB)
    return kept, later, total


def test_peak_is_that_of_known_allocations(memory):
    (kept, later, total), peak = memory.peak_bytes(allocate)
    assert (len(kept), len(later), total) == (10 * MIB, 3 * MIB, 10.0 * MIB)
    assert peak == pytest.approx(80 * MIB, rel=1e-3)


def test_peak_includes_the_backward_pass(memory):
    weight = torch.zeros(1000, 1000, requires_grad=True)
    # the result, which is kept, and the gradient
    _, peak = memory.peak_bytes(lambda: weight.exp().sum().backward())
    assert peak == pytest.approx(2 * weight.nbytes, rel=0.01)


def resident(name: str) -> int:
    """Return a figure of the process's resident set in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_agrees_with_the_operating_system(memory):
    def run():
        return log_distribution(torch.zeros(64, 400_000), temperature=0.7)

    _, peak = memory.peak_bytes(run)
    # the highest resident set starts anew
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run()
    assert resident("VmHWM") - before == pytest.approx(peak, rel=0.1)


def test_trainers_step_takes_less_memory_and_is_the_same(memory):
    args = argparse.Namespace(logits_mib=1.0, tokens_per_microbatch=128)
    table = Table(*"abcdefg")
    size = memory.Size(rows=8, length=64, vocabulary=20_000)
    assert memory.compare(size, args, table, "small") > 2.5
    steps = memory.Steps(size, logits_mib=1.0, tokens_per_microbatch=128)
    plain, lean = steps.plain(), steps.lean()
    loss, gradient = memory.difference(plain, lean)
    assert abs(plain.loss) > 1e-3 and loss < 1e-6 and gradient < 1e-5
    steps.loss.kl.coefficient = 0.2
    assert memory.difference(plain, steps.lean())[1] > 1e-3


def test_all_tables_are_printed(memory, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory.py", "--only-first", "--vocabulary", "1000"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    memory.main()
    printed = capsys.readouterr().out
    assert "8 rows of 256, vocabulary 1,000" in printed and "times less memory" in printed
    # four layers of two heads of 16, keys and values
    rows = [line.replace(" ", "").strip("│").split("│") for line in printed.splitlines()]
    assert ["torch.float32", "1,024", "1,024"] in rows
    assert ["torch.bfloat16", "512", "512"] in rows
