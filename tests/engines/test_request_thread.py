"""Requests that a thread sends: some at once, their results by key, an error as a result."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest

from ragen_pl.engines.request_thread import RequestThread


class Service:
    """Answers requests once it is open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.answering = self.most = self.cancelled = 0

    async def answer(self, number: int) -> int:
        self.answering += 1
        self.most = max(self.most, self.answering)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.answering -= 1
        if number == 3:
            raise ValueError("no answer to 3")
        return number * 10

    async def begin(self) -> None:
        self.open.set()


@pytest.fixture
def thread() -> Iterator[RequestThread[str, int]]:
    made: RequestThread[str, int] = RequestThread(2)
    yield made
    made.close()


def collect_all(thread: RequestThread[str, int]) -> dict[str, int | Exception]:
    results: dict[str, int | Exception] = {}
    while found := thread.collect(wait=True):
        results |= dict(found)
    return results


def test_results_come_by_key_and_errors_are_results(thread):
    service = Service()
    for number in range(5):
        thread.submit(f"request {number}", partial(service.answer, number))
    assert thread.collect(wait=False) == []
    thread.call(service.begin())
    results = collect_all(thread)
    error = results.pop("request 3")
    assert results == {f"request {number}": number * 10 for number in (0, 1, 2, 4)}
    assert isinstance(error, ValueError) and str(error) == "no answer to 3"
    assert service.most == 2


def test_cancelled_requests_have_no_result(thread):
    service = Service()
    for number in range(3):
        thread.submit("old", partial(service.answer, number))
    thread.call(asyncio.sleep(0))
    thread.cancel()
    # nothing is under way
    assert thread.collect(wait=True) == []
    thread.call(service.begin())
    thread.submit("new", partial(service.answer, 7))
    assert collect_all(thread) == {"new": 70}
    assert (service.cancelled, service.answering) == (2, 0)


def test_results_that_nobody_collected_are_forgotten(thread):
    service = Service()
    thread.call(service.begin())
    thread.submit("old", partial(service.answer, 1))
    thread.call(asyncio.sleep(0.05))
    thread.cancel()
    thread.submit("new", partial(service.answer, 2))
    assert collect_all(thread) == {"new": 20}


def test_requests_under_way_end_with_the_thread(thread):
    service = Service()
    ended: RequestThread[str, int] = RequestThread(1)
    for number in range(3):
        ended.submit("old", partial(service.answer, number))
    ended.close()
    assert service.answering == 0
