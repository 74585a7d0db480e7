"""Blocking functions in a thread, awaited by an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ragen_pl.ranks.rank_hub import RETRY_S


async def until_done(work: Callable[[], Any]) -> Any:
    """Return the result of a function that is called again while it raises an OSError."""
    while True:
        with suppress(OSError):
            return await in_thread(work)
        await asyncio.sleep(RETRY_S)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Return the result of a function that blocks. Unlike an executor's, its thread does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_settle, future, result, error)

    threading.Thread(target=run, name="ranks meet", daemon=True).start()
    return await future


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
