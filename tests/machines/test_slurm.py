"""Jobs on a SLURM of two nodes on this machine, from unpacked packages: `make test-slurm`."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.machines.machine_runs import (
    MACHINES,
    SETTINGS,
    SKIP,
    environment,
    fault,
    final_weights,
)

LIMIT_S = 900
pytestmark = pytest.mark.machines


@dataclass(frozen=True)
class Slurm:
    """A running SLURM.

    Attributes:
        variables: Environment of its commands.
    """

    variables: dict[str, str]

    def command(self, *words: str) -> str:
        """Run a command, and return its output."""
        for _ in range(5):
            done = subprocess.run(
                words, env=self.variables, capture_output=True, text=True, check=False, timeout=120
            )
            # the controller of a busy machine answers late
            if "Socket timed out" not in done.stderr:
                break
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, folder: Path, *overrides: str) -> tuple[int, str]:
        """Submit a job, wait for its end, and return how often it was requeued, and its output."""
        folder.mkdir(exist_ok=True)
        answer = self.command(
            sys.executable, "-m", "ragen_pl.submit", *SETTINGS, *overrides,
            f"paths.run_dir={folder / 'run'}", "slurm.setup=export MASTER_ADDR=127.0.0.1",
        )  # fmt: skip
        number = re.search(r"Submitted batch job (\d+)", answer)
        assert number is not None, answer
        job, end = number[1], time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            state = self.command("scontrol", "show", "job", job, "--oneliner")
            if "JobState=PENDING" in state and "Reason=BeginTime" in state:
                # SLURM lets a requeued job wait for two minutes
                self.command("scontrol", "update", f"jobid={job}", "starttime=now")
            elif not re.search("JobState=(PENDING|RUNNING|COMPLETING|CONFIGURING|REQUEUED)", state):
                break
            time.sleep(1)
        else:
            self.command("scancel", job)
        output = (folder / "run" / f"slurm-{job}.txt").read_text(errors="replace")
        assert "JobState=COMPLETED" in state, state + output[-3000:]
        found = re.search(r"Restarts=(\d+)", state)
        assert found is not None
        return int(found[1]), output


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    """A SLURM of two nodes."""
    folder, script = tmp_path_factory.mktemp("slurm"), str(MACHINES / "slurm.sh")
    with (folder / "start.txt").open("w+") as output:
        # its daemons keep the output open
        code = subprocess.call([script, folder, "start"], stdout=output, stderr=subprocess.STDOUT)
        output.seek(0)
        said = output.read().strip()
    try:
        if code == SKIP:
            pytest.skip(said.splitlines()[-1])
        assert code == 0, said
        shown = subprocess.check_output([script, folder, "environment"], text=True)
        own = dict(line.partition("=")[::2] for line in shown.splitlines())
        clean = {
            name: value for name, value in environment().items() if not name.startswith("SLURM")
        }
        yield Slurm(clean | own)
    finally:
        subprocess.call([script, folder, "stop"])


@pytest.fixture(scope="session")
def uninterrupted(slurm, tmp_path_factory) -> Callable[[], str]:
    """Return a function that gives the final weights of a job without a fault."""

    @functools.cache
    def weights() -> str:
        folder = tmp_path_factory.mktemp("reference")
        restarts, output = slurm.run(folder)
        assert restarts == 0, output[-3000:]
        return final_weights(folder / "run")

    return weights


FAULTS = {
    "SIGTERM to all ranks": fault("rollout-1-2", rank=0, signal="SIGTERM", kind="SignalStep"),
    "SIGUSR1 to all ranks": fault("trained-10", rank=1, signal="SIGUSR1", kind="SignalStep"),
    "SIGTERM to one rank": fault("warm_start-30", rank=1, signal="SIGTERM"),
    "SIGKILL of a rank": fault("step-10", rank=1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_job_is_requeued_after_a_fault_and_ends_with_the_same_weights(
    name, slurm, uninterrupted, tmp_path
):
    restarts, output = slurm.run(tmp_path, *FAULTS[name])
    run = tmp_path / "run"
    assert restarts == 1 and len(list(run.glob("killed_*"))) == 1, output[-3000:]
    if "SIGKILL" in name:
        assert "rank 1 (" in output and "may have been killed" in output
    else:
        assert f"ragen_pl: stopped by {name.split()[0]}; " in output, output[-3000:]
    assert not list(run.rglob("hpc_ckpt_*"))
    assert json.loads((run / "starts.jsonl").read_text().splitlines()[-1])["ended"] == "finished"
    assert final_weights(run) == uninterrupted()


def test_a_job_that_fails_at_each_start_ends(slurm, tmp_path):
    """The error comes after the first iteration's rollout, at each start."""
    broken = (
        "+callbacks.fail._target_=support.runs.killing.RaiseAt", "+callbacks.fail.moment=step-1",
        "warm_start.enabled=false", "trainer.max_starts=2",
    )  # fmt: skip
    with pytest.raises(AssertionError, match="JobState=FAILED") as error:
        slurm.run(tmp_path, *broken)
    text = str(error.value)
    assert (
        "2 starts from its beginning have failed without progress, and trainer.max_starts=2" in text
    )
    assert "Restarts=2" in text and "ExitCode=2:0" in text
