"""Requests that a thread of their own sends, some at a time."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")
KeyT = TypeVar("KeyT")
ResultT = TypeVar("ResultT")


class RequestThread(Generic[KeyT, ResultT]):
    """An event loop in a thread of its own, and the requests under way in it.

    All methods are called by one other thread.

    Args:
        concurrency: Requests that are sent at once; others wait for their turn.
    """

    def __init__(self, concurrency: int) -> None:
        self._turns = asyncio.Semaphore(concurrency)
        self._results: queue.SimpleQueue[tuple[int, KeyT, ResultT | Exception]] = (
            queue.SimpleQueue()
        )
        self._count = 0
        self._under_way: dict[int, Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that runs in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def submit(self, key: KeyT, request: Callable[[], Coroutine[Any, Any, ResultT]]) -> None:
        """Send a request.

        Args:
            key: Key by which `collect` returns its result.
            request: Sends it and returns its result; called in the thread.
        """
        number = self._count
        self._count += 1
        sent = self._send(number, key, request)
        self._under_way[number] = asyncio.run_coroutine_threadsafe(sent, self._loop)

    def collect(self, *, wait: bool) -> list[tuple[KeyT, ResultT | Exception]]:
        """Return the results since the last call, each with its key. One that failed has its error as its result.

        Args:
            wait: Wait for at least one where any is under way.
        """
        finished: list[tuple[KeyT, ResultT | Exception]] = []
        while (wait and self._under_way and not finished) or not self._results.empty():
            number, key, result = self._results.get()
            if self._under_way.pop(number, None) is not None:
                finished.append((key, result))
        return finished

    def cancel(self) -> None:
        """Cancel the requests under way, and forget the results that were not collected."""
        if self._under_way:
            self.call(_cancel(list(self._under_way.values())))
            self._under_way.clear()
        while not self._results.empty():
            self._results.get()

    def close(self) -> None:
        """Cancel the requests under way and end the thread. It is not used again."""
        self.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _send(
        self, number: int, key: KeyT, request: Callable[[], Coroutine[Any, Any, ResultT]]
    ) -> None:
        result: ResultT | Exception
        try:
            async with self._turns:
                result = await request()
        except Exception as error:  # the caller of `collect` handles it
            result = error
        self._results.put((number, key, result))


async def _cancel(requests: Sequence[Future[None]]) -> None:
    for request in requests:
        request.cancel()
    # they are cancelled, and their connections close, in the next steps of the loop
    await asyncio.sleep(0)
