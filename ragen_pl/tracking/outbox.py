"""Calls of a tracking server, kept in a file until they are sent, so that a run does not depend on the server.

    put -> file of calls -> thread: send, note how far it came -> next call
                              |
                              +- trouble: again after a pause, for as long as the process lives; then in the next one

Only one call is in memory. A call may be sent twice if the process is killed in between: it must not matter. The file
may be somebody else's: a line that holds no call is left out, and a sender checks what a call asks for.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ragen_pl.base.files import atomic_write
from ragen_pl.base.foreign_files import check_plain, json_object, object_in
from ragen_pl.base.lines import LinesFile, whole_lines

log = logging.getLogger(__name__)
Call = Mapping[str, Any]

_CALLS, _SENT = "calls.jsonl", "sent.json"
# characters of an error in a message
_SHOWN = 500
# seconds between attempts: it doubles from the first to the last
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 60.0


class RefusedError(Exception):
    """The server does not accept a call, and will not later on. The call is left out."""


class Sender(Protocol):
    """The way to a server. Its methods are called by one thread, and again after any error but a `RefusedError`."""

    def begin(self) -> bool:
        """Connect, at first and after trouble.

        Returns:
            Whether the server knows nothing of this run, so that all calls are sent again.
        """
        ...

    def send(self, call: Call) -> None:
        """Send a call.

        Raises:
            RefusedError: The server does not accept it.
        """


class Outbox:
    """The calls of one run, in order.

    Args:
        folder: Folder of the calls. It is made if there is none.
        sender: Sends them.

    Raises:
        ForeignFileError: The folder holds a link, or what is no plain file.
    """

    def __init__(self, folder: Path, sender: Sender) -> None:
        check_plain(folder)
        self._folder, self._sender = folder, sender
        self._file = LinesFile(folder / _CALLS)
        self._sent = _noted(folder)
        self._trouble: Exception | None = None
        self._has_warned = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        """Append a call, which is sent soon. It never waits for the server.

        Raises:
            OSError: It cannot be written, such as to a full disk. The calls before it are whole.
        """
        with self._changed:
            self._file.append(call)
            self._changed.notify_all()

    def synchronize(self) -> None:
        """Wait until the disk has all calls."""
        self._file.synchronize()

    def flush(self, *, limit_s: float) -> bool:
        """Wait until all calls are sent, but not while there is trouble; return whether they are.

        Args:
            limit_s: Longest time to wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_empty or self._trouble is not None, limit_s)
            return self._is_empty

    def close(self, *, limit_s: float) -> str | None:
        """Send the remaining records, then end.

        Returns:
            A clause that says how many calls are not sent, and why; None if all are.
        """
        with self._changed:
            # an attempt of its own, in case the trouble is over
            self._trouble = None
            self._changed.notify_all()
        done = self.flush(limit_s=limit_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if done:
            self._thread.join(limit_s)
            return None
        unsent = sum(1 for _ in whole_lines(self._folder / _CALLS, start=self._sent))
        trouble = self._trouble or f"no answer for {limit_s:g} s"
        return f"{unsent} calls are not sent ({' '.join(str(trouble).split())[:_SHOWN]})"

    @property
    def _is_empty(self) -> bool:
        return self._sent >= self._file.size

    def _run(self) -> None:
        pause, began = _FIRST_PAUSE_S, False
        while self._wait_for_call():
            try:
                if not began and self._sender.begin():
                    self._note(0)
                began = True
                self._send_next()
                pause = _FIRST_PAUSE_S
            except Exception as error:  # of any kind: the run goes on
                # the server may be another one when it answers again
                began = False
                self._note_trouble(error, pause)
                pause = min(2 * pause, _LAST_PAUSE_S)

    def _wait_for_call(self) -> bool:
        """Wait for a call to send; return whether to go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._is_empty)
            return not self._closed

    def _send_next(self) -> None:
        _, line = next(whole_lines(self._folder / _CALLS, start=self._sent))
        try:
            self._sender.send(_call(line))
        except RefusedError as error:
            log.warning(f"tracking: a call was refused and is left out: {error}")
        self._note(self._sent + len(line))

    def _note(self, sent: int) -> None:
        """Note how far the calls are sent, until a later process does."""
        if self._closed:
            return
        with atomic_write(self._folder / _SENT) as file:
            file.write_text(json.dumps({"bytes": sent}))
        with self._changed:
            self._sent, self._trouble = sent, None
            self._changed.notify_all()
        if self._has_warned:
            self._has_warned = False
            log.info("tracking: the server answers again")

    def _note_trouble(self, error: Exception, pause: float) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = " ".join(str(error).split())[:_SHOWN]
            log.warning(f"tracking: {text}; the run goes on and sends its metrics later")
        with self._changed:
            self._trouble = error
            self._changed.notify_all()
            # a close has the pause ended
            self._changed.wait_for(lambda: self._closed or self._trouble is None, pause)


def calls_in(folder: Path) -> Iterator[Call]:
    """Yield the calls in a folder, without lines that hold none."""
    for _, line in whole_lines(folder / _CALLS):
        with suppress(RefusedError):
            yield _call(line)


def _call(line: bytes) -> Call:
    """Return the call in a line.

    Raises:
        RefusedError: It holds none.
    """
    if (call := object_in(line)) is None:
        raise RefusedError(f"expected a JSON object, found {line[:60]!r}")
    return call


def _noted(folder: Path) -> int:
    """Return how many bytes of a folder's calls are sent, 0 where its note says nothing of the kind."""
    match json_object(folder / _SENT):
        case {"bytes": int(count)} if count >= 0:
            return count
    return 0
