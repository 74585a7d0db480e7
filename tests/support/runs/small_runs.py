"""Overrides of a run of seconds, and runs of two ranks that were started from outside, as torchrun does it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from support.runs.module_process import start_module

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
# runs of seconds on an idle machine; the limit is for one that hangs
LIMIT_S = 1200
SMALL = (
    "env=frozenlake",
    "model=small_lm",
    "++model.build.text.hidden_size=32",
    "++model.build.text.intermediate_size=64",
    "++model.build.text.num_attention_heads=2",
    "++model.build.text.num_key_value_heads=2",
    "env.invalid_ends=false",
    "env.max_turns=3",
    "env.kwargs.min_distance=1",
    "curriculum=null",
    "rollout.groups=8",
    "rollout.max_response_tokens=16",
    "validation.episodes=16",
    "warm_start.steps=12",
    "warm_start.episodes=16",
    "warm_start.optimizer.lr=1e-2",
    "trainer.max_epochs=3",
    "trainer.check_val_every_n_epoch=1",
    "logger=none",
    "callbacks.progress=null",
    "callbacks.trajectories=null",
    "callbacks.plots=null",
)
# variables of a job of two ranks, as srun sets them
JOB = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
}


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, negative for a signal, and all that it printed."""

    code: int | None
    output: str

    @property
    def line(self) -> str:
        """The last line that it printed."""
        return self.output.rstrip().splitlines()[-1]


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_ranks(
    folder: Path,
    overrides: Sequence[str],
    *,
    only: dict[int, Sequence[str]] | None = None,
    environment: dict[str, str] | None = None,
    ends_others: bool = False,
) -> list[Ended]:
    """Run `python -m ragen_pl.fit` on two ranks until both have ended.

    Args:
        folder: working folder.
        overrides: of both ranks.
        only: further overrides of one rank.
        environment: variables of both, in place of torch's.
        ends_others: whether the end of one with an error ends the other by SIGTERM, as srun does it.
    """
    port = str(free_port())
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | (
        {"WORLD_SIZE": "2"} if environment is None else environment
    )
    processes, outputs = [], [folder / f"output_{number}.txt" for number in range(2)]
    for number, output in enumerate(outputs):
        names = ("RANK", "LOCAL_RANK") if environment is None else ("SLURM_PROCID", "SLURM_LOCALID")
        processes.append(
            start_module(
                "ragen_pl.fit",
                [*overrides, *(only or {}).get(number, ())],
                folder=folder,
                output=output,
                paths=(TESTS, ROOT),
                environment=shared | dict.fromkeys(names, str(number)),
            )
        )
    try:
        if ends_others:
            wait([process.sentinel for process in processes], LIMIT_S)
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.terminate()
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [
        Ended(process.exitcode, output.read_text(errors="replace"))
        for process, output in zip(processes, outputs, strict=True)
    ]
