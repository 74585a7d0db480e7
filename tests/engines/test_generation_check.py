"""Responses of a rollout engine are checked before they are used."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from trajectories import roll_out, starts

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.generation_check import GenerationCheck, InvalidGeneration
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import Generation, GenerationRequest, Prompt
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
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


def check(*responses: Generation) -> None:
    CHECK([REQUEST] * len(responses), responses)


def test_possible_responses_are_accepted() -> None:
    check(
        response([5, END]),
        response([5, 6, 7, END]),
        response([5, 6, 7, 8], at_limit=True),
        # a token of probability 1, rounded up
        response([END], [5e-5]),
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


class Repeating(TransformersEngine):
    """Returns each response twice."""

    def collect(self, *, wait=True):
        return 2 * super().collect(wait=wait)


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


def test_a_response_that_was_not_requested_ends_the_rollout(lm) -> None:
    with pytest.raises(RolloutError, match=r"Repeating: .* session 0 that was not requested"):
        play(lm, engine=Repeating)
