"""Responses of a rollout engine are checked before they are used."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from support.episodes.trajectories import roll_out, starts

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.generation_check import (
    GenerationCheck,
    InvalidGeneration,
    MalformedGeneration,
    finished_responses,
)
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import Generation, GenerationRequest, Prompt, generate
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_agreement
from ragen_pl.rollout.proxy import AgentProxy

END = 9
CHECK = GenerationCheck(allowed=np.array([False, *[True] * 9]), ends=np.array([False] * 9 + [True]))
REQUEST = GenerationRequest(
    session=0,
    prompt=Prompt(ids=np.array([1]), unexpanded_ids=np.array([1])),
    max_tokens=4,
    temperature=1.0,
    seed=0,
)


def response(ids, logprobs=None, *, at_limit=False) -> Generation:
    ids = np.asarray(ids)
    logprobs = np.full(len(ids), -0.5) if logprobs is None else np.asarray(logprobs)
    return Generation(
        ids=ids,
        logprobs=logprobs.astype(np.float32),
        entropy=None,
        hit_length_limit=at_limit,
        version=0,
    )


def altered(**fields) -> Generation:
    return dataclasses.replace(response([5, END]), **fields)


def check(*responses: Generation) -> None:
    CHECK([REQUEST] * len(responses), responses)


def test_possible_responses_are_accepted() -> None:
    check(
        response([5, END]),
        response([5, 6, 7, END]),
        response([5, 6, 7, 8], at_limit=True),
        # a token of probability 1, rounded up
        response([END], [5e-5]),
        # a uniform distribution over the nine ids
        altered(entropy=math.log(9)),
    )
    check()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (response([5, END], [-1.0, math.nan]), r"not finite \(nan at token 2 of 2\)"),
        (response([5, END], [-math.inf, -1.0]), r"not finite \(-inf at token 1 of 2\)"),
        (response([5, END], [0.1, -1.0]), "log-probs above 0"),
        (response([5, END], [-9999.0, -1.0]), r"ids that are not drawn \(-9999.0 at token 1 of 2"),
        (response([5, END], [-1.0]), "2 ids and 1 log-probs"),
        (response([5, 10, END]), r"outside the vocabulary \(10 at token 2 of 3\)"),
        (response([-1, END]), "outside the vocabulary"),
        (response([0, END]), r"ids that are never sampled \(0 at token 1 of 2\)"),
        (altered(entropy=math.nan), r"an entropy that is not finite \(nan\)"),
        (altered(entropy=math.inf), r"an entropy that is not finite \(inf\)"),
        (altered(entropy=-0.5), r"an entropy below 0 \(-0.5\)"),
        (altered(entropy=1e300), r"an entropy above that of a uniform .* \(1e\+300\)"),
        (altered(entropy=np.float32(2.3)), "an entropy above that of a uniform"),
        (altered(values=np.array([0.5, math.nan])), r"values that are not finite \(nan\)"),
        (altered(values=np.array([-math.inf, 0.5])), "values that are not finite"),
        (altered(kept_ids=np.array([5, 10, 9]), kept_counts=np.array([2, 1])), "kept ids outside"),
        (altered(kept_ids=np.array([5, -1, 9]), kept_counts=np.array([2, 1])), "kept ids outside"),
        (response([5.0, END]), "ids of type float64"),
        (response(np.array([True, False])), "ids of type bool"),
        (response(np.zeros(0, int)), "no tokens"),
        (response([5, 6, 7, 8, END]), r"more tokens than requested \(5\)"),
        (response([5, 6]), "an end without an end-of-turn token"),
        (response([5, 6], at_limit=True), "a length limit that it has not reached"),
        (response([5, 6, 7, END], at_limit=True), "a length limit that it has not reached"),
        (response([5, END, 6, END]), r"tokens after an end-of-turn token \(9 at token 2 of 4\)"),
    ],
)
def test_an_impossible_response_is_refused_among_others(wrong, message) -> None:
    fine = response([5, 6, END])
    with pytest.raises(InvalidGeneration, match=message):
        check(fine, wrong, fine)


MALFORMED = [
    (altered(ids=[5, END]), r"ids=\[5, 9\] \(list\), expected an array int64 \[response\]"),
    (altered(ids=None), r"ids=None \(NoneType\)"),
    (altered(ids=torch.tensor([5, END])), r"ids=tensor\(\[5, 9\]\) \(Tensor\)"),
    (altered(ids="59"), r"ids='59' \(str\)"),
    (altered(ids=np.array([[5, END]])), r"ids of shape \[1, 2\], expected int64"),
    (altered(ids=np.array(5)), r"ids of shape \[\]"),
    (altered(ids=np.array([5, None])), "ids of type object"),
    (altered(ids=np.array([5, END], np.uint64)), "ids of type uint64, expected int64"),
    (altered(ids=np.array([5, END], ">i8")), "ids of type >i8, expected int64"),
    (altered(ids=np.ma.array([5, END], mask=[0, 1])), r"\(MaskedArray\), expected an array"),
    (altered(entropy=10**400), "entropy=1000.*, expected a number or None"),
    (altered(version=10**400), "version=1000.*, expected a whole number"),
    (altered(logprobs=[-0.5, -0.5]), r"logprobs=\[-0.5, -0.5\] \(list\)"),
    (altered(logprobs=np.full((2, 1), -0.5)), r"logprobs of shape \[2, 1\]"),
    (altered(logprobs=np.array([-1, -1])), "logprobs of type int64"),
    (altered(entropy="0.5"), "entropy='0.5', expected a number or None"),
    (altered(entropy=True), "entropy=True"),
    (altered(entropy=np.array([0.5])), r"entropy=array\(\[0.5\]\)"),
    (altered(hit_length_limit=None), "hit_length_limit=None, expected true or false"),
    (altered(version="1"), "version='1', expected a whole number"),
    (altered(kept_ids=np.array([5, 6, 9]), kept_counts=np.array([2])), "kept_counts of length 1"),
    (altered(kept_ids=np.array([5, 6]), kept_counts=np.array([2, 1])), "kept_ids of length 2, expected 3"),
    (altered(kept_ids=np.array([5, 6, 8]), kept_counts=np.array([2, 1])), "without the id 9 that was sampled"),
    (altered(kept_ids=None, kept_counts=np.array([1, 1])), r"kept_ids=None"),
    (altered(kept_ids=np.array([5, 9]), kept_counts=np.array([3, -1])), "kept_counts with -1"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), MALFORMED, ids=[text for _, text in MALFORMED])
def test_a_response_of_other_types_is_named_with_field_and_value(wrong, message) -> None:
    for refuse in (check, lambda one: finished_responses([(0, response([5, END])), (1, one)])):
        with pytest.raises(MalformedGeneration, match=message) as caught:
            refuse(wrong)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"None of collect\(\), expected a list of pairs"),
        ({0: response([5, END])}, "expected a list of pairs"),
        ([response([5, END])], r"expected a pair \(session, Generation\)"),
        ([("0", response([5, END]))], r"expected a pair \(session, Generation\)"),
        ([(0, None)], "None for session 0, expected a Generation"),
        ([(0, "text")], "'text' for session 0, expected a Generation"),
    ],
)
def test_an_answer_without_responses_is_refused(answer, message) -> None:
    with pytest.raises(MalformedGeneration, match=message):
        finished_responses(answer)


def test_responses_with_numbers_of_numpy_are_accepted() -> None:
    fine = altered(
        entropy=np.float32(-1e-7), hit_length_limit=np.bool_(False), version=np.int64(3),
        kept_ids=np.array([5, 6], np.int32), kept_counts=np.array([2, 0], np.int32),
    )  # fmt: skip
    check(fine)
    assert finished_responses(((np.int64(0), fine),)) == [(0, fine)]


class Careless(TransformersEngine):
    """Returns lists of ids."""

    def collect(self, *, wait=True):
        return [
            (session, dataclasses.replace(one, ids=one.ids.tolist()))
            for session, one in super().collect(wait=wait)
        ]


def test_a_run_names_the_engine_that_returns_other_types(lm) -> None:
    line = r"rollout.engine=Careless: .* a response with ids=\[.*\] \(list\), expected .*; correct the engine"
    with pytest.raises(RolloutError, match=line):
        play(lm, engine=Careless)
    with pytest.raises(RolloutError, match=line):
        generate(Careless(PolicyModule(lm)), [REQUEST], keep=False)


def engine_with(change):
    """Return a class of engines whose responses are changed by a function."""

    class Own(TransformersEngine):
        def collect(self, *, wait=True):
            return change(super().collect(wait=wait))

    return Own


def play(bundle, *, engine=TransformersEngine):
    proxy = AgentProxy(
        environments=EnvironmentManager(target="ragen/FrozenLake-v0", max_turns=2),
        context=ContextManager(bundle, max_tokens=512),
        max_response_tokens=6,
    )
    return roll_out(proxy, engine(PolicyModule(bundle)), starts(1, 3))


def test_a_rollout_with_weights_that_are_not_finite_ends_with_one_line(fresh_lm) -> None:
    assert len(play(fresh_lm)) == 3
    with torch.no_grad():
        next(fresh_lm.model.parameters())[:] = math.nan
    with pytest.raises(RolloutError, match=r"TransformersEngine: .* not finite \(nan at") as caught:
        play(fresh_lm)
    assert "\n" not in str(caught.value) and "lower optimizer.lr" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: 2 * pairs, "session 0 that was not requested"),
        (lambda pairs: [(session + 7, one) for session, one in pairs], "session 7 that was not re"),
        (lambda pairs: [(-1, one) for _, one in pairs], "session -1 that was not requested"),
        (lambda pairs: pairs[:-1], "no response to 1 of the requests; correct the engine"),
        (lambda pairs: [], "no response to 3 of the requests; correct the engine"),
    ],
    ids=["twice", "of others", "of nobody", "too few", "none"],
)
def test_responses_that_are_missing_or_not_requested_end_the_rollout(lm, change, message) -> None:
    engine = engine_with(change)
    requests = [dataclasses.replace(REQUEST, session=number) for number in range(3)]
    for collected in (
        lambda: play(lm, engine=engine),
        lambda: generate(engine(PolicyModule(lm)), requests, keep=False),
    ):
        with pytest.raises(RolloutError, match=rf"^rollout\.engine=Own: .*{message}"):
            collected()


def test_the_comparison_at_the_start_checks_responses_too(lm) -> None:
    context = ContextManager(lm, max_tokens=512)
    wrong = engine_with(
        lambda pairs: [
            (session, dataclasses.replace(one, ids=one.ids + 10**6)) for session, one in pairs
        ]
    )
    with pytest.raises(RolloutError, match=r"rollout\.engine=Own: .* ids outside the vocabulary"):
        check_agreement(context, wrong(PolicyModule(lm)), image_size=None, alone=True)
