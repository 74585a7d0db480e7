"""Jobs that hang or raise do not affect other jobs."""

import threading
import time

import pytest

from ragen_pl.rollout.timeouts import run_guarded


def raising():
    raise ValueError("broken environment")


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_results_are_in_order_with_errors_in_place(timeout_s):
    results = run_guarded([lambda: 1, raising, lambda: 3], timeout_s=timeout_s)
    assert results[0] == 1 and results[2] == 3
    assert isinstance(results[1], ValueError)


def test_hanging_job_is_abandoned_and_the_rest_continues():
    release = threading.Event()
    began = time.monotonic()
    results = run_guarded(
        [lambda: 1, release.wait, lambda: 3, release.wait, lambda: 5], timeout_s=0.2
    )
    release.set()
    assert [results[0], results[2], results[4]] == [1, 3, 5]
    assert isinstance(results[1], TimeoutError) and isinstance(results[3], TimeoutError)
    assert time.monotonic() - began < 3
