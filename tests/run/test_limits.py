"""A rank that is late, or in which nothing happens, is named by all ranks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from ragen_pl.config.ending import Ending
from ragen_pl.ranks import rank_hub, rank_limits
from ragen_pl.ranks.phase_limits import PhaseLimits
from ragen_pl.ranks.rank_hub import NO_RANK
from ragen_pl.ranks.rank_limits import Arrivals, Change, StallLimit
from ragen_pl.ranks.rank_watch import RankWatch

END = Change(number=3, label="iteration 7, end of the rollout", limit_s=600, count=4)


def test_late_ranks_are_named_with_their_machines():
    arrivals = Arrivals()
    arrivals.note(0, END, now=0.0)
    arrivals.note(2, END, now=500.0)
    assert arrivals.late(now=600.0) is None
    late = arrivals.late(now=601.0)
    assert late is not None and late.ranks == (1, 3)
    line = late.line({0: "n1", 1: "n1", 2: "n2"})
    assert line == (
        "iteration 7, end of the rollout: no answer from ranks 1 (n1), 3 (never started) for 600 s"
    )


def test_a_rank_that_comes_later_or_has_ended_is_not_late():
    arrivals = Arrivals()
    for rank in (0, 1, 2):
        arrivals.note(rank, END, now=0.0)
    assert arrivals.late(now=1000.0, ended={3}) is None
    arrivals.note(3, END, now=1000.0)
    assert arrivals.late(now=10000.0) is None
    # a rank may be at a later change before all are at this one
    later = Change(number=5, label="start of the update", limit_s=600, count=4)
    arrivals.note(1, later, now=2000.0)
    arrivals.note(0, Change(4, "another", 10, 4), now=2005.0)
    late = arrivals.late(now=2100.0)
    assert late is not None and late.change.number == 4 and late.ranks == (2, 3)


def test_one_rank_of_each_machine_may_speak_for_all():
    arrivals = Arrivals()
    start = Change(number=0, label="start", limit_s=1, count=16, step=8)
    arrivals.note(0, start, now=0.0)
    late = arrivals.late(now=2.0)
    assert late is not None and late.ranks == (8,)


def arrive(watch: RankWatch, change: Change) -> None:
    watch.send({"change": asdict(change)})


def wait_for_failure(*watches: RankWatch) -> None:
    end = time.monotonic() + 60
    while any(watch.failure is None for watch in watches):
        assert time.monotonic() < end, "no failure"
        time.sleep(0.05)


def test_a_rank_that_does_not_come_ends_all_and_prints_its_stacks(watches, capfd):
    first, second = watches(2)
    change = Change(number=1, label="iteration 1, start of the update", limit_s=0.2, count=2)
    arrive(first, change)
    wait_for_failure(first, second)
    assert first.failure == second.failure
    assert first.failure is not None and first.failure.rank == NO_RANK
    line = f"iteration 1, start of the update: no answer from rank 1 ({second.host}) for 0.2 s"
    assert first.failure.line == line
    first.show()
    err = capfd.readouterr().err
    assert err.rstrip().endswith(f"ragen_pl: {line}")
    assert "most recent call first" in err and "test_limits.py" in err


def test_ranks_that_come_in_time_go_on(watches):
    first, second = watches(2)
    for number in range(3):
        change = Change(number=number, label="a phase", limit_s=60.0, count=2)
        arrive(first, change)
        arrive(second, change)
    arrive(first, Change(number=3, label="the phase after", limit_s=0.2, count=2))
    wait_for_failure(first, second)
    assert first.failure is not None and first.failure.line.startswith("the phase after: no answer")


def test_a_rank_in_which_nothing_happens_ends_all(watches, capfd):
    first, second = watches(2)
    first.stall.move("iteration 2, rollout", 1000)
    second.stall.move("iteration 2, rollout, 3 of 8 episodes done", 0.2)
    wait_for_failure(first, second)
    first.stall.stop()
    assert first.failure is not None and first.failure.rank == 1 and first.code == 1
    assert "3 of 8 episodes done: nothing has happened for 0.2 s (trainer.stall_s)" in (
        first.failure.line
    )
    assert "most recent call first" in capfd.readouterr().err


def test_a_rank_that_goes_on_does_not_stall(monkeypatch):
    now = 0.0
    monkeypatch.setattr(rank_limits, "time", SimpleNamespace(monotonic=lambda: now))
    limit = StallLimit()
    for _ in range(4):
        limit.move("update", 60.0)
        now += 50.0
        assert limit.expired is None
    now += 20.0
    assert limit.expired is not None and limit.expired.startswith("update: nothing has happened")
    limit.stop()
    now += 1000.0
    assert limit.expired is None


def test_a_longer_limit_puts_off_the_end_by_force(monkeypatch):
    """The first rank at the end of a rollout waits for the others: for longer than a turn may take."""
    now, ends = 0.0, []
    monkeypatch.setattr(rank_limits, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(
        rank_limits.faulthandler, "dump_traceback_later", lambda after_s, **_: ends.append(now + after_s)
    )  # fmt: skip
    monkeypatch.setattr(rank_limits.faulthandler, "cancel_dump_traceback_later", ends.clear)
    limit = StallLimit()
    limit.move("rollout, 8 of 8 episodes done", 60.0)
    now += 1.0
    limit.move("end of the rollout", 1860.0)
    assert ends[-1] > now + 1860.0
    # and the next ones do not cost a system call each
    for _ in range(3):
        now += 1.0
        limit.move("update", 60.0)
    assert len(ends) == 2
    now += 10.0
    limit.move("update", 60.0)
    assert now + 60.0 < ends[-1] < now + 120.0
    limit.stop()
    limit.move("rollout", 60.0)
    assert len(ends) == 1 and ends[0] > now + 60.0


@pytest.fixture
def silent_rank():
    """Return a function that connects a rank that answers nothing, as a frozen process does."""
    connections = []

    def connect(first: RankWatch, *, rank: int) -> socket.socket:
        assert first.address is not None
        host, port, token = first.address.split(":")
        connection = socket.create_connection((host, int(port)))
        connections.append(connection)
        hello = {"token": token, "rank": rank, "host": "n9"}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        with connection.makefile() as answers:
            assert "welcome" in answers.readline()
        return connection

    yield connect
    for connection in connections:
        connection.close()


TIMED_OUT = Ending("RuntimeError: Timed out waiting", code=1, traceback="Traceback\n")


def test_a_rank_that_gives_no_answer_is_named_with_the_error_of_a_collective(
    watches, silent_rank, monkeypatch, capsys
):
    monkeypatch.setattr(rank_hub, "SIGN_S", 0.5)
    (first,) = watches(1)
    silent_rank(first, rank=1)
    first.stall.move("iteration 2, minibatch 3", 1000)
    assert not first.conclude(TIMED_OUT)
    assert first.failure is not None
    assert (first.failure.rank, first.code) == (NO_RANK, 1)
    assert capsys.readouterr().err == (
        "ragen_pl: iteration 2, minibatch 3: no answer from rank 1 (n9) for 0.5 s, frozen or cut off; "
        f"rank 0 ({first.host}) failed: RuntimeError: Timed out waiting\n"
    )


def test_a_rank_that_is_gone_goes_before_the_error_of_a_collective(
    watches, silent_rank, monkeypatch
):
    """However late its end is decided."""
    monkeypatch.setattr(rank_hub, "CAUSE_S", 3.0)
    (first,) = watches(1)
    silent_rank(first, rank=1).close()
    assert not first.conclude(TIMED_OUT)
    assert first.failure is not None and first.failure.rank == 1


def test_an_error_stays_its_ranks_own_where_all_answer(watches):
    _, second = watches(2)
    assert second.conclude(TIMED_OUT)
    assert second.failure is not None and second.failure.rank == 1


def test_another_process_of_the_machine_shows_the_line(watches, capsys):
    first, second = watches(2, shows=False)
    arrive(first, Change(number=1, label="a phase", limit_s=0.1, count=2))
    wait_for_failure(first, second)
    second.show()
    assert capsys.readouterr().err.count("ragen_pl:") == 0
    assert not second.conclude(Ending("connection closed", code=1))


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with limits of a second."""
    short = (
        "from ragen_pl.ranks import rank_limits\n"
        "rank_limits._FORCED_S = rank_limits._CHANGE_S = 0.5\n"
    )
    return subprocess.run(
        [sys.executable, "-c", short + program],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_a_process_that_holds_the_interpreter_is_ended():
    """Its other threads can't run, as in a collective or a library that does not give back Python's lock."""
    program = (
        "import re\n"
        "limit = rank_limits.StallLimit()\n"
        "limit.move('update', 0.5)\n"
        "re.match(r'(a+)+$', 'a' * 60 + 'b')\n"
    )
    done = run_program(program)
    assert done.returncode == 1 and "Timeout (0:00:01.5" in done.stderr
    assert "File " in done.stderr


@pytest.mark.slow
def test_a_process_outlives_the_limits_of_a_run_that_has_ended():
    program = (
        "import time\n"
        "from ragen_pl.ranks import rank_watch\n"
        "watch = rank_watch.RankWatch(0, count=1)\n"
        "watch.stall.move('update', 0.5)\n"
        "watch.leave()\n"
        "watch.close()\n"
        "time.sleep(3)\n"
        "print('goes on')\n"
    )
    done = run_program(program)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


def test_limits_of_the_config_reach_the_callback():
    callback = PhaseLimits(timeout_s=60)
    assert (callback.timeout_s, callback.rollout_timeout_s) == (60, 60)
    assert callback.stall_s == float("inf")
    callback = PhaseLimits(timeout_s=60, rollout_timeout_s=30, stall_s=5)
    assert (callback.rollout_timeout_s, callback.stall_s) == (30, 5)
