"""Runs over two machines, which are network namespaces of this one: `make test-nodes`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.machines.machine_runs import (
    MACHINES,
    SETTINGS,
    SKIP,
    fault,
    final_weights,
    on_two_nodes,
)

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


@pytest.fixture(scope="session")
def undisturbed(_permitted, tmp_path_factory) -> Callable[[str], str]:
    """Return a function that gives the final weights of a run without a fault by its strategy."""

    @functools.cache
    def weights(strategy: str) -> str:
        folder = tmp_path_factory.mktemp(f"undisturbed_{strategy}")
        code, output = torchrun(folder, f"trainer.strategy={strategy}")
        assert code == 0, output[-5000:]
        return final_weights(folder / "run")

    return weights


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_killed_in_every_phase_change_no_weight(strategy, undisturbed, tmp_path):
    """A rank is killed in one phase after the other."""
    faults = [
        override
        for name, (moment, rank) in PHASES.items()
        for override in fault(moment, rank=rank, name=f"kill_in_{name}")
    ]
    code, output = torchrun(
        tmp_path,
        f"trainer.strategy={strategy}",
        # most of these kills come at the same step
        "trainer.max_starts=null",
        *faults,
        RESTARTS=str(len(PHASES)),
    )
    run = tmp_path / "run"
    assert code == 0, output[-5000:]
    assert {file.name for file in run.glob("killed_*")} == {
        f"killed_{moment}" for moment, _ in PHASES.values()
    }
    # a start that failed for another reason would be one more
    starts = (run / "starts.jsonl").read_text()
    assert starts.count('"begins"') == len(PHASES) + 1, starts
    assert final_weights(run) == undisturbed(strategy)


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


# Moment at which a rank is frozen, and what the other one says.
FROZEN = {
    "rollout": ("rollout-1-2", "iteration 2, end of the rollout: no answer from rank 1 ("),
    "update": ("step-10", "iteration 2, minibatch 3: no answer from rank 1 ("),
}


@pytest.mark.parametrize("phase", FROZEN)
def test_a_frozen_rank_is_named_and_the_next_start_goes_on(phase, undisturbed, tmp_path):
    moment, line = FROZEN[phase]
    code, output = torchrun(
        tmp_path, "trainer.timeout_s=120", *fault(moment, rank=1, signal="SIGSTOP"), RESTARTS="1"
    )
    assert code == 0, output[-5000:]
    assert line in output, output[-5000:]
    assert final_weights(tmp_path / "run") == undisturbed("ddp")


def cut(moment: str, *, seconds: str) -> tuple[str, ...]:
    """Return overrides of a run in which the second machine's cable is cut."""
    return (
        "+callbacks.cut._target_=faults.CutCable",
        f"+callbacks.cut.moment={moment}",
        "+callbacks.cut.rank=1",
        f"+callbacks.cut.seconds={seconds}",
    )


@pytest.mark.parametrize("moment", ["rollout-1-2", "step-10"])
def test_a_cable_that_is_cut_for_ten_seconds_is_no_loss(moment, undisturbed, tmp_path):
    code, output = torchrun(tmp_path, *cut(moment, seconds="10"), RESTARTS="0")
    run = tmp_path / "run"
    assert code == 0, output[-5000:]
    assert (run / f"killed_{moment}").exists()
    assert (run / "starts.jsonl").read_text().count('"begins"') == 1
    assert final_weights(run) == undisturbed("ddp")


def test_a_cable_that_stays_cut_ends_the_run_with_one_line(tmp_path):
    """The agents end too: torchrun's on the second machine waits for the first one's until TCP gives up."""
    code, output = torchrun(
        tmp_path, "warm_start.enabled=false", *cut("rollout-0-2", seconds="null"), RESTARTS="0"
    )
    assert code == 1, output[-3000:]
    # the connection between the ranks is given up long before trainer.timeout_s, on both machines
    for rank in (0, 1):
        assert re.search(rf"rank {rank} \(.*\) failed: no error message", output), output[-5000:]
