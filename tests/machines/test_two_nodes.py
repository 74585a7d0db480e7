"""Runs over two machines, which are network namespaces of this one: `make test-nodes`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from machine_runs import MACHINES, SETTINGS, SKIP, fault, final_weights, on_two_nodes

LIMIT_S = 3600
STRATEGIES = ("ddp", "fsdp2")
# Moment and rank of each kill. An iteration is eight optimizer steps.
PHASES = {
    "warm_start": ("warm_start-30", 1),
    "rollout": ("rollout-1-2", 0),
    "update": ("step-10", 1),
    "checkpoint": ("saving-16", 0),
    "validation": ("validation-1", 1),
    "preparation": ("preparing-2", 0),
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
    folder.mkdir(exist_ok=True)
    run = f"paths.run_dir={folder / 'run'}"
    command = [str(MACHINES / "torchrun.sh"), "-m", "ragen_pl.fit", *SETTINGS, run, *overrides]
    return on_two_nodes(command, folder=folder, limit_s=LIMIT_S, **variables)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_killed_in_every_phase_change_no_weight(strategy, tmp_path):
    """One run, in which a rank is killed in one phase after the other, and one without."""
    code, output = torchrun(tmp_path / "whole", f"trainer.strategy={strategy}")
    assert code == 0, output[-5000:]
    faults = [
        override
        for name, (moment, rank) in PHASES.items()
        for override in fault(moment, rank=rank, name=f"kill_in_{name}")
    ]
    code, output = torchrun(
        tmp_path / "killed",
        f"trainer.strategy={strategy}",
        # most of these kills come at the same step
        "trainer.max_starts=null",
        *faults,
        RESTARTS=str(len(PHASES)),
    )
    run = tmp_path / "killed" / "run"
    assert code == 0, output[-5000:]
    assert {file.name for file in run.glob("killed_*")} == {
        f"killed_{moment}" for moment, _ in PHASES.values()
    }
    # a start that failed for another reason would be one more
    starts = (run / "starts.jsonl").read_text()
    assert starts.count('"begins"') == len(PHASES) + 1, starts
    assert final_weights(run) == final_weights(tmp_path / "whole" / "run")


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
