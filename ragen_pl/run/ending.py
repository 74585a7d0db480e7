"""Text of a run that ends early: what is saved, and the command that resumes it."""

from __future__ import annotations

import shlex

from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ragen_pl.base.constraints import path_override
from ragen_pl.base.finite import NonFiniteError
from ragen_pl.base.stop_signals import Stopped, report
from ragen_pl.callbacks.summary import resume_hint, run_overrides
from ragen_pl.checkpoints.folder import Run
from ragen_pl.modules.guard import SkippedStepsError
from ragen_pl.ranks import ranks


def report_stop(error: SystemExit, run: Run) -> object:
    """Print a stopped run's checkpoint and the command that resumes it; return the exit code."""
    by_hand = isinstance(error.__context__, KeyboardInterrupt)
    if not by_hand and not isinstance(error, SIGTERMException | Stopped):
        return error.code
    # others are Lightning's
    stop = error if isinstance(error, Stopped) else Stopped("SIGINT" if by_hand else "SIGTERM")
    if by_hand or isinstance(error, SIGTERMException):
        # all ranks have agreed on it
        ranks.leave()
        if rank_zero_only.rank:  # type: ignore[attr-defined]
            # the first rank reports, and would be killed by another rank's exit code
            return 0
    report(f"{stop}; {how_to_go_on(run)}")
    return stop.code


def end_of_non_finite(error: NonFiniteError, run: Run) -> str:
    """Return the error's line, with the command that repeats a recorded step and the run's checkpoint."""
    parts = [str(error)]
    if isinstance(error, SkippedStepsError) and error.record is not None:
        batch = shlex.quote(path_override("batch", error.record))
        parts.append(f"repeat it with: python -m ragen_pl.replay {batch}")
    return "; ".join([*parts, how_to_go_on(run)])


def how_to_go_on(run: Run) -> str:
    """Return the checkpoint of a run that has ended early, and the command that resumes it."""
    arguments = run_overrides()
    if run.last.exists():
        saved, checkpoint = f"the last checkpoint is {run.last}", str(run.last)
    else:
        saved, checkpoint = f"{_saved_of_warm_start(run)}, no checkpoint yet", "last"
        if not any(argument.startswith("paths.run_dir=") for argument in arguments):
            arguments.append(path_override("paths.run_dir", run.folder))
    return f"{saved}; resume with: {resume_hint(arguments, checkpoint=checkpoint)}"


def _saved_of_warm_start(run: Run) -> str:
    if run.warm_start.exists():
        return "the warm start was saved"
    return (
        "part of the warm start was saved"
        if run.warm_start_checkpoint.exists()
        else "nothing was saved"
    )
