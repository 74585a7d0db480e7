"""Text of a run that ends early: what is saved, and the command that resumes it."""

from __future__ import annotations

import sys

from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ragen_pl.callbacks.checkpoint import SignalStop
from ragen_pl.callbacks.summary import resume_hint, run_overrides
from ragen_pl.finite import NonFiniteError
from ragen_pl.modules.guard import SkippedStepsError
from ragen_pl.run import ranks
from ragen_pl.run.folder import Run

# 128 and the signal's number, as a shell reports it
_EXIT_CODES = {"SIGTERM": 143, "Ctrl-C": 130}


def report_stop(error: SystemExit, run: Run) -> object:
    """Print a stopped run's checkpoint and the command that resumes it; return the exit code."""
    by_hand = isinstance(error.__context__, KeyboardInterrupt)
    if not by_hand and not isinstance(error, SIGTERMException):
        return error.code
    ranks.leave()
    if rank_zero_only.rank:  # type: ignore[attr-defined]
        # the first rank reports, and would be killed by another rank's exit code
        return 0
    name = error.name if isinstance(error, SignalStop) else "SIGTERM"
    signal = "Ctrl-C" if by_hand else name
    sys.stderr.write(f"ragen_pl: stopped by {signal}; {how_to_go_on(run)}\n")
    return _EXIT_CODES["Ctrl-C" if by_hand else "SIGTERM"]


def end_of_non_finite(error: NonFiniteError, run: Run) -> str:
    """Return the error's line, with the command that repeats a recorded step and the run's checkpoint."""
    parts = [str(error)]
    if isinstance(error, SkippedStepsError) and error.record is not None:
        parts.append(f"repeat it with: python -m ragen_pl.replay batch={error.record}")
    return "; ".join([*parts, how_to_go_on(run)])


def how_to_go_on(run: Run) -> str:
    """Return the checkpoint of a run that has ended early, and the command that resumes it."""
    arguments = run_overrides()
    if run.last.exists():
        saved, checkpoint = f"the last checkpoint is {run.last}", str(run.last)
    else:
        saved, checkpoint = f"{_saved_of_warm_start(run)}, no checkpoint yet", "last"
        if not any(argument.startswith("paths.run_dir=") for argument in arguments):
            arguments.append(f"paths.run_dir={run.folder}")
    return f"{saved}; resume with: {resume_hint(arguments, checkpoint=checkpoint)}"


def _saved_of_warm_start(run: Run) -> str:
    if run.warm_start.exists():
        return "the warm start was saved"
    return (
        "part of the warm start was saved"
        if run.warm_start_checkpoint.exists()
        else "nothing was saved"
    )
