"""`python -m MODULE`, scripts and ranks in processes that skip the import of the heavy packages.

It takes longer than most runs.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.multiprocessing as mp
from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
FORKS = multiprocessing.get_context("forkserver")
# what runs import, also late
FORKS.set_forkserver_preload(
    [
        "ragen_pl.run.train",
        "ragen_pl.assembly.component_checks",
        "ragen_pl.tracking.loggers",
        "ragen_pl.tracking.mlflow_outbox",
        "ragen_pl.evaluation.evaluator",
        "ragen_pl.memory.report",
        "ragen_pl.engines.in_process.engine",
        "ragen_pl.models.small_vlm.vision",
        "ragen_pl.callbacks.collapse",
        "ragen_pl.callbacks.plots",
        "ragen_pl.callbacks.trajectories",
        # by MLflow for a local store, and for traces
        "mlflow.store.tracking.sqlalchemy_store",
        "mlflow.pyfunc.context",
        "IPython",
        # after Hydra's other users
        "support.runs.prepared_fork",
    ]
)


def start_server() -> str:
    """Start the process that is forked, if it does not run, and return the start method of its forks.

    Python up to 3.12 looks for what it imports there without the paths of this process.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before:
            os.environ["PYTHONPATH"] = before
    return FORKS.get_start_method()


def start_module(
    name: str,
    arguments: Sequence[str],
    *,
    folder: Path,
    output: Path,
    paths: Sequence[Path] = (ROOT,),
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start `python -m NAME` or `python NAME.py` in a fork of a process that has imported the heavy packages.

    Args:
        name: of the module, or path of the script.
        arguments: of the command line.
        folder: working folder.
        output: file for all that is written to stdout and stderr.
        paths: put in front of `sys.path`.
        environment: further environment variables.
    """
    start_server()
    settings = (name, list(arguments), folder, output, paths, dict(environment or {}))
    process = FORKS.Process(target=_become, args=settings)
    process.start()
    return process


def run_module(
    name: str,
    arguments: Sequence[str],
    *,
    folder: Path,
    output: Path | None = None,
    paths: Sequence[Path] = (ROOT,),
    environment: Mapping[str, str] | None = None,
    timeout: float,
) -> tuple[int | None, str]:
    """Run `python -m NAME` or `python NAME.py` in a fork of a process that has imported the heavy packages.

    Args:
        name: of the module, or path of the script.
        arguments: of the command line.
        folder: working folder.
        output: file for all that is written; default `output.txt` in the working folder.
        paths: put in front of `sys.path`.
        environment: further environment variables.
        timeout: seconds after which the process is killed.

    Returns:
        The exit code, negative for a signal, and all that was written to stdout and stderr.
    """
    output = output or folder / "output.txt"
    process = start_module(
        name, arguments, folder=folder, output=output, paths=paths, environment=environment
    )
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, output.read_text(errors="replace")


def run_two_ranks(function: Callable[..., None], *arguments: object) -> None:
    """Call `function(rank, *arguments)` in a fork for each of two ranks, and raise what one of them raises."""
    run_ranks(2, function, *arguments)


def run_ranks(count: int, function: Callable[..., None], *arguments: object) -> None:
    """Call `function(rank, *arguments)` in a fork for each rank, and raise what one of them raises."""
    mp.start_processes(function, args=arguments, nprocs=count, start_method=start_server())


def _become(
    name: str,
    arguments: list[str],
    folder: Path,
    output: Path,
    paths: Sequence[Path],
    environment: Mapping[str, str],
) -> None:
    # Python says nothing where an import of the server fails
    assert "support.runs.prepared_fork" in sys.modules
    os.environ |= environment
    # which the tests' own shell may have it ignore
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Lightning read it from the environment of the process that this is a fork of
    rank_zero_only.rank = _get_rank() or 0  # type: ignore[attr-defined]
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    sys.path[:0] = [str(folder), *map(str, paths)]
    sys.argv[1:] = arguments
    if name.endswith(".py"):
        script = folder / name
        sys.argv[0], sys.path[0] = name, str(script.parent)
        runpy.run_path(str(script), run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
