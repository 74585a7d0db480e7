"""Starts of a run, in `starts.jsonl` in its folder: one that comes no further in several of them ends."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.files import disk_errors_of
from ragen_pl.base.finite import NonFiniteError
from ragen_pl.base.stop_signals import interrupted, uninterrupted
from ragen_pl.checkpoints.checkpoint_check import number_in
from ragen_pl.checkpoints.folder import Run
from ragen_pl.config.errors import ConfigError
from ragen_pl.engines.errors import RolloutError

log = logging.getLogger(__name__)

FILE = "starts.jsonl"
# exit codes after a signal or Ctrl-C, and of another rank that has refused a setting
_STOPPED = (130, 143, 2)
# characters of a digest
_DIGEST = 10


@contextmanager
def counted_start(
    folder: Path,
    *,
    begins: str,
    config: str,
    settings: str = "config.yaml",
    max_failures: int | None,
) -> Iterator[None]:
    """Note a start of a run, and in the end of the block that it was no failure: an end, a signal, a refused setting.

    Args:
        folder: The run's folder.
        begins: The place that the run continues from, see `beginning_of`.
        config: Digest of its config, see `config_digest`. Another one is counted anew.
        settings: Name of the file that holds its config.
        max_failures: Failed starts from one place, after which there is no further one; None for any number.

    Raises:
        ConfigError: There were as many.
    """
    file, start = folder / FILE, {"begins": begins, "config": config}
    failed = failures_at_the_end(_read(file), start)
    if max_failures is not None and failed >= max_failures:
        raise ConfigError(
            f"{file}: {failed} starts from {begins} have failed without progress, and trainer.max_starts="
            f"{max_failures}; see the errors of these starts; once their cause is gone, delete the file or set "
            "trainer.max_starts=null"
        )
    # a signal comes before a start is noted, or in the block
    with uninterrupted(), _noted_end(file):
        _append(file, start | {"settings": settings, "host": socket.gethostname(), "time": _now()})
        with interrupted():
            yield


@contextmanager
def _noted_end(file: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if _is_no_failure(error):
            _append(file, {"ended": "stopped", "time": _now()})
        raise
    else:
        _append(file, {"ended": "finished", "time": _now()})


def _is_no_failure(error: BaseException) -> bool:
    """Return whether an error is the user's or the machine's wish, or a setting that is refused."""
    if isinstance(error, ConfigError):
        return is_refusal(error)
    is_stop = isinstance(error, SystemExit) and error.code in _STOPPED
    return is_stop or isinstance(error, KeyboardInterrupt)


def is_refusal(error: ConfigError) -> bool:
    """Return whether a start has refused its settings; otherwise a rollout or an update has failed."""
    return not isinstance(error.__cause__, RolloutError | NonFiniteError)


def failures_at_the_end(lines: list[dict[str, Any]], start: dict[str, str]) -> int:
    """Return the number of the last starts, all from one place with one config, that ended without a word.

    >>> here = {"begins": "step 8", "config": "a"}
    >>> failures_at_the_end([here, {"ended": "finished"}, here, here], here)
    2
    """
    count = 0
    for line in reversed(lines):
        if {name: line.get(name) for name in start} != start:
            break
        count += 1
    return count


def beginning_of(run: Run) -> str:
    """Return the place that a run continues from in words."""
    if run.checkpoint is not None:
        steps, size = number_in(run.checkpoint, "global_step"), run.checkpoint.stat().st_size
        return f"step {steps} ({run.checkpoint.name}, {size} bytes)"
    if run.has_initial_weights:
        return "the end of the warm start"
    if run.resumed and run.warm_start_checkpoint.exists():
        return f"step {number_in(run.warm_start_checkpoint, 'global_step')} of the warm start"
    return "its beginning"


def config_digest(cfg: DictConfig) -> str:
    """Return the digest of a whole config."""
    return digest(OmegaConf.to_yaml(cfg, resolve=True))


def digest(text: str) -> str:
    """Return the first characters of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]


def _read(file: Path) -> list[dict[str, Any]]:
    """Return the lines that can be read: one may have been written when the machine stopped, or be damaged."""
    lines: list[dict[str, Any]] = []
    with suppress(OSError):
        for text in file.read_bytes().splitlines():
            try:
                # a path may have bytes that are no text, and so lone surrogates
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict):
                lines.append(line)
            else:
                log.warning(
                    f"{file}: a line can't be read and is not counted; delete the file to count anew"
                )
    return lines


def _append(file: Path, line: dict[str, Any]) -> None:
    with disk_errors_of(file), file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def _now() -> str:
    return datetime.now().isoformat(sep=" ", timespec="seconds")
