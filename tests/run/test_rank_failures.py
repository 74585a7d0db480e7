"""An error on one rank, in any phase, ends all ranks with that error in one line."""

from __future__ import annotations

import signal
import socket

import pytest
from support.runs.small_runs import SMALL, Ended, run_ranks

from ragen_pl.base import distributed
from ragen_pl.base.distributed import StopRequestedError, all_ranks_do, errors_told
from ragen_pl.config.ending import Ending
from ragen_pl.ranks.rank_watch import RankWatch

QUICK = (
    *SMALL,
    "trainer.devices=2",
    "trainer.strategy=ddp",
    "trainer.max_epochs=1",
    "warm_start.steps=2",
    "warm_start.episodes=4",
    "validation.baselines=null",
    # a rank that waited in a collective would be found by the time limit of the test
    "trainer.timeout_s=1000",
)
NO_WARM_START = ("warm_start.enabled=false",)


def fail(tmp_path, moment, *overrides, rank, error="KeyError") -> tuple[Ended, Ended]:
    """Return how the rank that fails and the other one end."""
    raising = [
        "+callbacks.fail._target_=support.runs.killing.RaiseAt",
        f"+callbacks.fail.moment={moment}",
        f"+callbacks.fail.rank={rank}",
        f"+callbacks.fail.error={error}",
    ]
    if moment == "reward":
        raising = [
            "+algorithm.rewards.failing._target_=support.runs.killing.FailingReward",
            f"+algorithm.rewards.failing.rank={rank}",
        ]
    settings = (*QUICK, *raising, f"paths.run_dir={tmp_path / 'run'}", *overrides)
    ended = run_ranks(tmp_path, settings)
    return ended[rank], ended[1 - rank]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "rank", "overrides"),
    [
        pytest.param("step-1", 1, NO_WARM_START, id="update"),
        pytest.param("warm_start-1", 0, (), id="warm start", marks=pytest.mark.soak),
        pytest.param("begin-0", 0, NO_WARM_START, id="callback", marks=pytest.mark.soak),
        pytest.param("validation-0", 0, NO_WARM_START, id="validation", marks=pytest.mark.soak),
        pytest.param("saving", 1, NO_WARM_START, id="checkpoint", marks=pytest.mark.soak),
        pytest.param("reward", 1, NO_WARM_START, id="reward", marks=pytest.mark.soak),
    ],
)
def test_an_error_in_any_phase_ends_both_ranks(tmp_path, moment, rank, overrides):
    failed, other = fail(tmp_path, moment, *overrides, rank=rank)
    assert (failed.code, other.code) == (1, 1), failed.output + other.output
    assert failed.output.count("Traceback") == 1
    assert failed.line.startswith("ragen_pl: KeyError: 'raised by a test'; ")
    assert "resume with: python -m ragen_pl.fit env=frozenlake" in failed.line
    assert "Traceback" not in other.output
    assert other.line.startswith(f"ragen_pl: rank {rank} (")
    assert "failed: KeyError: 'raised by a test'" in other.line


@pytest.mark.slow
def test_an_error_of_a_rollout_stays_one_line(tmp_path):
    settings = ("rollout.num_envs=2", *NO_WARM_START)
    failed, other = fail(tmp_path, "rollout-0-1", *settings, rank=1, error="RolloutError")
    assert (failed.code, other.code) == (2, 2), failed.output + other.output
    assert failed.line == "ragen_pl: raised by a test"
    assert other.line.startswith("ragen_pl: rank 1 (")
    assert other.line.endswith("failed: raised by a test")
    assert "Traceback" not in failed.output + other.output


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_is_killed_ends_the_other(tmp_path, rank):
    killing = [
        "+callbacks.kill._target_=support.runs.killing.KillAt",
        "+callbacks.kill.moment=rollout-0-1",
        f"+callbacks.kill.rank={rank}",
    ]
    settings = (*QUICK, *NO_WARM_START, *killing, f"paths.run_dir={tmp_path / 'run'}")
    ended = run_ranks(tmp_path, settings)
    assert ended[rank].code == -signal.SIGKILL and ended[1 - rank].code == 1
    assert "Traceback" not in ended[1 - rank].output
    line = ended[1 - rank].line
    assert line.startswith(f"ragen_pl: rank {rank} (") and "may have been killed" in line


@pytest.mark.slow
@pytest.mark.parametrize("ends_others", [False, True], ids=["", "as srun does it"])
def test_a_rank_that_is_refused_at_its_start_ends_the_other(tmp_path, ends_others):
    """Code 2 of all: srun's code is the highest one, and a job that ends with 143 is started again."""
    settings = (*QUICK, *NO_WARM_START, f"paths.run_dir={tmp_path / 'run'}")
    refused = {1: ["rollout.groups=oops"]}
    first, second = run_ranks(tmp_path, settings, only=refused, ends_others=ends_others)
    assert (first.code, second.code) == (2, 2), first.output + second.output
    assert second.line == "ragen_pl: rollout.groups=oops: expected a whole number, at least 1"
    assert "failed: exit code 2; see its output" in first.line


@pytest.mark.soak
def test_a_launched_rank_that_fails_ends_the_one_that_has_launched_it(job):
    run = job()
    output = run.run(
        *QUICK[len(SMALL) :],
        *NO_WARM_START,
        "+callbacks.fail._target_=support.runs.killing.RaiseAt",
        "+callbacks.fail.moment=step-1",
        "+callbacks.fail.rank=1",
        codes=(1,),
        signaled=True,
    )
    assert output.count("Traceback") == 1
    assert "failed: KeyError: 'raised by a test'" in output


def test_an_error_is_told_before_the_other_ranks_are_met(monkeypatch):
    """They may be busy with a long rollout."""
    told: list[str] = []

    def meet(value: object) -> list[object]:
        told.append("met")
        return [None, value]

    monkeypatch.setattr(distributed, "gather_over_ranks", meet)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    with errors_told(lambda error: told.append(str(error))):
        with pytest.raises(KeyError, match="first"):
            all_ranks_do(lambda: {}["first"])
        with pytest.raises(StopRequestedError):
            all_ranks_do(stop)
        assert all_ranks_do(lambda: 3) == 3
    assert told == ["'first'", "met", "met", "met"]


def stop() -> None:
    raise StopRequestedError


def test_an_error_goes_before_the_wish_to_stop(monkeypatch):
    others = [StopRequestedError(), None, KeyError("second"), None]
    monkeypatch.setattr(distributed, "gather_over_ranks", lambda value: [*others[:3], value])
    monkeypatch.setattr(distributed, "rank", lambda: 3)
    with pytest.raises(KeyError, match="second"):
        all_ranks_do(stop)
    others[2] = None
    with pytest.raises(StopRequestedError):
        all_ranks_do(lambda: 3)


def test_an_error_stays_its_own_where_the_other_ranks_have_ended(monkeypatch):
    def closed(value: object) -> list[object]:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(distributed, "gather_over_ranks", closed)
    with pytest.raises(KeyError):
        all_ranks_do(lambda: {}["own"])
    with pytest.raises(RuntimeError, match="closed"):
        all_ranks_do(lambda: 3)


def concluded(watch: RankWatch, text: str) -> bool:
    return watch.conclude(Ending(text))


def test_the_first_error_ends_all_and_later_ones_are_not_shown(watches, capsys):
    first, second, third = watches(3)
    assert concluded(second, "seed=x: wrong")
    assert not concluded(third, "connection closed")
    assert not concluded(first, "seed=x: wrong")
    assert first.failure == second.failure == third.failure
    assert first.failure is not None and (first.failure.rank, first.failure.code) == (1, 2)
    # the machine's second rank with the same error says nothing, and the failing one prints its own elsewhere
    assert capsys.readouterr().err.splitlines() == [
        f"ragen_pl: rank 1 ({first.host}) failed: seed=x: wrong"
    ]


def test_a_launched_rank_leaves_it_to_the_first_one_to_print_its_error(watches, capsys):
    (first,) = watches(1)
    _, launched = watches(1, first=1, address=first.address, launched=True)
    assert concluded(first, "seed=x: wrong")
    # it may have no error of its own yet, or another one
    assert not concluded(launched, "connection closed")
    assert launched.failure is not None and launched.failure.rank == 0
    assert capsys.readouterr().err == ""


def test_the_cause_goes_before_its_consequence(watches):
    first, second = watches(2)
    # an unexpected error waits for what may have caused it
    first.report(Ending("connection closed", code=1, traceback="Traceback"))
    assert concluded(second, "the cause")
    assert not concluded(first, "connection closed")


def test_a_launched_rank_notices_that_the_first_one_is_gone(watches):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (orphan,) = watches(1, first=1, address=f"127.0.0.1:{port}:token")
    assert not concluded(orphan, "no process group")
    assert orphan.failure is not None and orphan.failure.rank == 0


def test_a_rank_that_has_left_is_not_missed(watches):
    first, second = watches(2)
    second.leave()
    second.close()
    assert concluded(first, "its own") and first.failure is not None
    assert first.failure.rank == 0
