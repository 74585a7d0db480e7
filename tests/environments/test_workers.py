"""Jobs of environments: in their own threads, in time, and apart from each other."""

import threading

import pytest

from ragen_pl.environments.workers import EnvironmentWorkers


def raising():
    raise ValueError("broken environment")


@pytest.mark.parametrize(("count", "timeout_s"), [(1, None), (1, 60.0), (3, None), (3, 60.0)])
def test_outcomes_are_in_order_with_errors_in_place(count, timeout_s):
    workers = EnvironmentWorkers(count, timeout_s=timeout_s)
    outcomes = workers.run([(0, lambda: 1), (1, raising), (2, lambda: 3), (3, lambda: 4)])
    assert [outcomes[0], *outcomes[2:]] == [1, 3, 4]
    assert isinstance(outcomes[1], ValueError)


@pytest.mark.parametrize("count", [1, 2])
def test_a_hanging_job_is_abandoned_and_the_rest_continues(count):
    release = threading.Event()
    workers = EnvironmentWorkers(count, timeout_s=2.0)
    jobs = [lambda: 1, release.wait, lambda: 3, release.wait, lambda: 5]
    outcomes = workers.run([(0, job) for job in jobs])
    release.set()
    assert [outcomes[0], outcomes[2], outcomes[4]] == [1, 3, 5]
    assert isinstance(outcomes[1], TimeoutError) and isinstance(outcomes[3], TimeoutError)


@pytest.mark.parametrize(("wait_s", "ends"), [(1.5, True), (60.0, False)])
def test_factor_extends_the_time_limit(wait_s, ends):
    release = threading.Event()
    workers = EnvironmentWorkers(1, timeout_s=1.0)
    jobs = [(0, lambda: release.wait(wait_s)), (0, lambda: 2)]
    first, second = workers.run(jobs, time_limit_factor=60 if ends else 2)
    release.set()
    assert second == 2
    assert first is False if ends else "longer than 2 s" in str(first)


def test_jobs_behind_a_hanging_one_of_an_earlier_call_are_run():
    release = threading.Event()
    workers = EnvironmentWorkers(1, timeout_s=2.0)
    (late,) = workers.submit([(0, release.wait)])
    (other,) = workers.submit([(0, lambda: 7)])
    outcomes = {}
    while len(outcomes) < 2:
        outcomes.update(workers.collect())
    release.set()
    assert isinstance(outcomes[late], TimeoutError) and outcomes[other] == 7


def test_an_environment_stays_in_its_thread():
    workers = EnvironmentWorkers(2, timeout_s=60.0)
    places = [(thread, threading.get_ident) for thread in (0, 1, 2, 3)]
    first, again = workers.run(places), workers.run(places)
    assert first == again
    assert first[0] == first[2] != first[1] == first[3]
    assert threading.get_ident() not in first


def test_threads_work_side_by_side():
    barrier = threading.Barrier(2, timeout=60.0)
    outcomes = EnvironmentWorkers(2, timeout_s=None).run([(0, barrier.wait), (1, barrier.wait)])
    # both have waited for each other
    assert sorted(outcomes) == [0, 1]


def test_what_has_not_ended_is_not_waited_for():
    release = threading.Event()
    workers = EnvironmentWorkers(2, timeout_s=None)
    slow, fast = workers.submit([(0, release.wait), (1, lambda: 2)])
    assert workers.collect() == [(fast, 2)]
    assert workers.collect(wait_s=0.01) == []
    release.set()
    assert workers.collect() == [(slow, True)]


def test_outcomes_of_jobs_that_nobody_waits_for_do_not_get_into_a_later_call():
    workers = EnvironmentWorkers(1, timeout_s=60.0)
    workers.submit([(0, lambda: "earlier")])
    assert workers.run([(0, lambda: "later")]) == ["later"]


def test_threads_end_with_their_owner():
    before = set(threading.enumerate())
    workers = EnvironmentWorkers(2, timeout_s=60.0)
    workers.run([(0, lambda: 1), (1, lambda: 2)])
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del workers
    for thread in started:
        thread.join(60.0)
        assert not thread.is_alive()
