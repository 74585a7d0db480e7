"""Ranks that share an engine; threads stand for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.vllm.lockstep import Lockstep

WAIT_S = 20


class Ranks:
    """Ranks that gather in memory."""

    def __init__(self, count: int) -> None:
        self.shares = [None] * count
        self.barrier = threading.Barrier(count)
        self.lockstep = [Lockstep(rank, self.gather) for rank in range(count)]

    def gather(self, share):
        self.shares[share.rank] = share
        self.barrier.wait(WAIT_S)
        shares = list(self.shares)
        self.barrier.wait(WAIT_S)
        return shares

    def all_do(self, work) -> list:
        with ThreadPoolExecutor(len(self.lockstep)) as pool:
            return list(pool.map(work, self.lockstep))


class Engine:
    """Ends each request after as many steps as its number says; notes what it was given, step by step."""

    def __init__(self, lockstep, *, offset=0):
        self.lockstep, self.left, self.given, self.offset = lockstep, {}, [], offset

    def step(self, *, is_done=False):
        step = self.lockstep.exchange(is_done=is_done)
        self.given.append((step.aborted, [name for name, _ in step.requests]))
        for name in step.aborted:
            del self.left[name]
        self.left |= dict(step.requests)
        finished = [name for name, steps in self.left.items() if steps <= 1]
        self.left = {name: steps - 1 for name, steps in self.left.items() if steps > 1}
        for name in finished:
            self.lockstep.finish(name, [len(name) + self.offset])
        return finished, step.all_done


def roll_out(lockstep, turns, *, gives_up=False, engine=None):
    """Ask for the requests of each turn at once and wait for one; return what the engine was given, and the answers."""
    engine, own, answers = engine or Engine(lockstep), {}, []
    lockstep.begin()
    for requests in turns:
        own |= lockstep.submit(requests)
        while own:
            finished, _ = engine.step()
            mine = [name for name in finished if own.pop(name, None) is not None]
            answers += mine
            if mine:
                break
    if gives_up:
        lockstep.abort(own)
        own.clear()
    while own:
        answers += [name for name in engine.step()[0] if own.pop(name, None) is not None]
    while not engine.step(is_done=True)[1]:
        pass
    assert not engine.left and not lockstep.under_way and not lockstep.active
    return engine.given, answers


LENGTHS = st.lists(st.lists(st.integers(1, 6), max_size=3), max_size=4)


@settings(max_examples=25)
@given(turns=st.lists(LENGTHS, min_size=2, max_size=3), gives_up=st.integers(0, 2))
def test_all_ranks_are_given_the_same_and_each_gets_its_own(turns, gives_up):
    ranks = Ranks(len(turns))
    for _ in range(2):  # a second rollout follows
        found = ranks.all_do(
            lambda one: roll_out(one, turns[one.rank], gives_up=one.rank == gives_up)
        )
        assert all(given == found[0][0] for given, _ in found)
        for rank, (_, answers) in enumerate(found):
            assert {name.split(".")[0] for name in answers} <= {str(rank)}
            count = sum(map(len, turns[rank]))
            assert len(answers) == len(set(answers)) <= count
            assert rank == gives_up or len(answers) == count


@pytest.mark.parametrize("error", [LookupError("no key"), KeyboardInterrupt()])
def test_what_ends_one_rank_ends_all(error):
    def work(lockstep):
        lockstep.begin()
        try:
            if lockstep.rank == 1:
                raise error
            return roll_out(lockstep, [[50]])
        except BaseException as caught:
            lockstep.fail(caught)
            assert not lockstep.under_way
            return caught

    first, second, third = Ranks(3).all_do(work)
    assert type(first) is type(third) is type(error) and first.args == error.args
    assert second is error


def test_ranks_that_sample_different_tokens_are_ended():
    def work(lockstep):
        engine = Engine(lockstep, offset=lockstep.rank)
        with pytest.raises(RolloutError, match=r"tensor_parallel_size: ranks .* different tokens"):
            roll_out(lockstep, [[1, 9]], engine=engine)
        assert not lockstep.under_way
        return len(engine.given)

    assert Ranks(2).all_do(work) == [1, 1]


def test_a_request_outside_a_rollout_is_refused():
    with pytest.raises(RuntimeError, match=r"inside collective_rollout\(\), which all ranks enter"):
        Ranks(1).lockstep[0].submit([1])
