"""Runs on the test machines of tests/machines, and the digest of their final weights."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from support.runs.small_runs import ROOT, SMALL, TESTS

from ragen_pl.checkpoints.sharded_checkpoint import CheckpointFiles

MACHINES = TESTS / "machines"
# exit code of a script that finds its machines not permitted
SKIP = 77
SETTINGS = (
    *SMALL,
    "trainer.max_epochs=3",
    "trainer.accelerator=cpu",
    "trainer.num_nodes=2",
    "trainer.devices=1",
    "warm_start.steps=60",
    "warm_start.checkpoint_every_n_steps=20",
    "callbacks.checkpoint.every_n_epochs=1",
    "validation.baselines=null",
    "ckpt_path=auto",
)


def environment() -> dict[str, str]:
    """Return the variables of a command on a test machine."""
    paths = (MACHINES, TESTS, ROOT)
    return os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def fault(
    moment: str, *, rank: int, signal: str = "SIGKILL", kind: str = "KillOnce", name: str = "kill"
) -> tuple[str, ...]:
    """Return overrides of a run in which a rank gets a signal once.

    Args:
        moment: As in faults.py.
        rank: Number of the rank.
        signal: Name of the signal.
        kind: Class of faults.py.
        name: Name of the callback, for several faults.
    """
    return (
        f"+callbacks.{name}._target_=faults.{kind}",
        f"+callbacks.{name}.moment={moment}",
        f"+callbacks.{name}.rank={rank}",
        f"+callbacks.{name}.signal_name={signal}",
    )


def on_two_nodes(
    command: Sequence[str], *, folder: Path, limit_s: float, **variables: str
) -> tuple[int, str]:
    """Run a command on two machines at once, and return the exit code and the output of both.

    Args:
        command: The command.
        folder: Working folder.
        limit_s: Seconds after which all of it is killed.
        variables: Further environment variables.
    """
    with subprocess.Popen(
        [MACHINES / "two_nodes.sh", *command],
        env=environment() | variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        finally:
            # the script removes its machines
            process.terminate()
    return process.returncode, output


def final_weights(run: Path) -> str:
    """Return the SHA-1 over all weights of a run's last checkpoint."""
    file = run / "checkpoints" / "last.ckpt"
    saved = CheckpointFiles().load_checkpoint(file, weights_only=True)
    digest = hashlib.sha1()
    for name, weight in sorted(saved["state_dict"].items()):
        assert isinstance(weight, torch.Tensor)
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest()
