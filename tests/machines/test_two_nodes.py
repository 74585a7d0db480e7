"""Runs over two machines, which are network namespaces of this one: `make test-nodes`."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from machine_runs import MACHINES, SETTINGS, SKIP, fault, final_weights, on_two_nodes

LIMIT_S = 600
STRATEGIES = ("ddp", "fsdp2")
# an iteration is eight optimizer steps
PHASES = {
    "warm start": ("warm_start-30", 1),
    "rollout": ("rollout-1-2", 0),
    "preparation": ("preparing-1", 1),
    "update": ("step-10", 0),
    "validation": ("validation-1", 1),
    "checkpoint": ("saving-16", 0),
}
pytestmark = pytest.mark.machines


@pytest.fixture(scope="session", autouse=True)
def _permitted(tmp_path_factory):
    code, output = on_two_nodes(["true"], folder=tmp_path_factory.mktemp("try"), limit_s=60)
    if code == SKIP:
        pytest.skip(output.strip())
    assert code == 0, output


def torchrun(folder: Path, *overrides: str, **variables: str) -> tuple[int, str]:
    """Run a job by torchrun on both machines."""
    run = f"paths.run_dir={folder / 'run'}"
    command = [str(MACHINES / "torchrun.sh"), "-m", "ragen_pl.fit", *SETTINGS, run, *overrides]
    return on_two_nodes(command, folder=folder, limit_s=LIMIT_S, **variables)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Callable[[str], str]:
    """Return a function that gives the final weights of a strategy's run without a fault."""

    @functools.cache
    def weights(strategy: str) -> str:
        folder = tmp_path_factory.mktemp("reference")
        code, output = torchrun(folder, f"trainer.strategy={strategy}")
        assert code == 0, output[-3000:]
        return final_weights(folder / "run")

    return weights


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_in_any_phase_changes_no_weight(phase, strategy, uninterrupted, tmp_path):
    moment, rank = PHASES[phase]
    code, output = torchrun(tmp_path, f"trainer.strategy={strategy}", *fault(moment, rank=rank))
    assert (tmp_path / "run" / "killed").exists() and code == 0, output[-5000:]
    # a restart that failed for another reason would be a second one
    assert (tmp_path / "run" / "starts.jsonl").read_text().count('"begins"') == 2, output[-5000:]
    assert final_weights(tmp_path / "run") == uninterrupted(strategy)


def test_a_folder_that_is_not_shared_is_one_line(tmp_path):
    """The second machine has a disk of its own there."""
    run = tmp_path / "run"
    run.mkdir()
    own = 'if [ $NODE = 1 ]; then mount -t tmpfs own "$RUN"; fi; exec "$@"'
    start = [str(MACHINES / "torchrun.sh"), "-m", "ragen_pl.fit", *SETTINGS]
    # ip has given each machine mounts of its own
    code, output = on_two_nodes(
        ["bash", "-c", own, "-", *start, f"paths.run_dir={run}", "trainer.shared_folder_s=2"],
        folder=tmp_path,
        limit_s=LIMIT_S,
        RUN=str(run),
        RESTARTS="0",
    )
    assert code == 1, output[-3000:]
    assert f"paths.run_dir={run}: not the same folder on" in output, output[-3000:]
    assert "building the model" not in output


def test_a_frozen_rank_is_named(tmp_path):
    start = time.monotonic()
    code, output = torchrun(
        tmp_path,
        "trainer.timeout_s=20",
        "warm_start.enabled=false",
        *fault("rollout-0-2", rank=1, signal="SIGSTOP"),
        RESTARTS="0",
    )
    assert code == 1, output[-3000:]
    assert "iteration 1, end of the rollout: no answer from rank 1 (" in output, output[-5000:]
    assert time.monotonic() - start < 20 + 90
    shutil.rmtree(tmp_path / "run")
