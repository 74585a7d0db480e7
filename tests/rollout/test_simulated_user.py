"""A simulated user in a seat: its own rules, its errors in all trajectories of the episode, and their metrics."""

from __future__ import annotations

import sys

import pytest
from support.episodes.rollout_fixtures import TextEngine
from support.episodes.small_lakes import Module
from support.episodes.two_players import Written, answer

from envs.policies import OptimalPolicy
from envs.support_desk import CUSTOMER, SupportDesk
from envs.tools import call_text
from envs.trivial_policies import GrantAll, RefuseAll
from ragen_pl.base.records import to_record
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.failures import usable_episodes
from ragen_pl.data.opponents import Opponents
from ragen_pl.data.settings import IterationSettings
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.evaluation.report import main_rows
from ragen_pl.metrics.intervals import validation_metrics
from ragen_pl.metrics.rollout import RolloutStatistics, rollout_metrics
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.rollout.settings import FailureSettings
from ragen_pl.trajectory import EpisodeStatus

DESK = "ragen_pl.envs.support_desk.SupportDesk"
SPECS = [EpisodeSpec(group=n // 4, member=n % 4, seed=n // 4) for n in range(16)]


def proxy_of(*, target=DESK, context=None, user="seat", max_response_tokens=None, **settings):
    limit = max_response_tokens or (sys.maxsize if context is None else 40)
    return AgentProxy(
        environments=EnvironmentManager(
            target=target, max_turns=6, kwargs={"user": user, "orders": 2}, **settings
        ),
        context=context or TextContext(),
        max_response_tokens=limit,
    )


def play(policy, **settings):
    return proxy_of(**settings).rollout(
        ScriptedResponder(policy=policy), SPECS, seed_key=(0, "player")
    )


class Careless(OptimalPolicy):
    """Greets as the clerk, and answers that with another text as the customer of every second group."""

    def __init__(self, text):
        self.text = text

    def act(self, env, rng):
        desk = env.unwrapped
        if desk.steps == 1:
            return call_text("say", text="hello")
        if desk.steps == 2 and desk.np_random_seed % 2:
            return self.text
        return super().act(env, rng)


@pytest.mark.parametrize("prompt_format", ["free_think", "native"])
def test_the_scripted_user_as_a_seats_policy_has_no_errors_and_the_scripted_success(prompt_format):
    alone = rollout_metrics(play(OptimalPolicy(), user="scripted", prompt_format=prompt_format))
    played = play(OptimalPolicy(), prompt_format=prompt_format)
    metrics = rollout_metrics(played)
    assert alone["success"] == metrics["success"] == 1.0 and "user_errors" not in alone
    assert metrics["user_errors"] == 0.0
    assert metrics["without_user_errors"] == metrics["success_without_user_errors"] == 1.0
    assert [one.is_user for one in played] == [False, True] * len(SPECS)


@pytest.mark.parametrize("policy", [GrantAll(), RefuseAll()])
def test_trivial_clerks_have_the_same_success_with_a_user_in_a_seat(policy):
    alone, both = play(policy, user="scripted"), play(policy)
    assert [one.success for one in alone] == [one.success for one in both if not one.is_user]
    assert not any(one.user_erred for one in both)


def test_errors_of_the_user_are_in_both_trajectories_and_count_once():
    played = play(Careless("is that 77?"))
    assert len(played) == 2 * len(SPECS)
    for clerk, user in zip(played[::2], played[1::2], strict=True):
        assert clerk.user_errors == user.user_errors and len(user.turns) == len(user.user_errors)
        assert clerk.reward == 1.0 and clerk.success and user.success
        erred = clerk.game % 2 == 1
        assert (user.user_erred, user.reward) == (erred, -float(erred))
    turns = sum(len(one.turns) for one in played if one.is_user)
    metrics = rollout_metrics(played)
    assert metrics["user_errors"] == metrics["user_error/fact"] == pytest.approx(8 / turns)
    assert metrics["without_user_errors"] == 0.5
    # the same whoever's trajectories are there, and in parts
    assert rollout_metrics(played[1::2])["user_errors"] == metrics["user_errors"]
    statistics = RolloutStatistics(over_ranks=False)
    for start in range(0, len(played), 8):
        statistics.update(played[start : start + 8])
    assert statistics.compute() == pytest.approx(metrics)


def test_an_episode_that_the_user_has_spoilt_does_not_lower_the_success_without_errors():
    # the conversation ends before an outcome
    played = play(Careless("bye"))
    metrics = validation_metrics(played)
    assert metrics["success"] == 0.5 and metrics["success_without_user_errors"] == 1.0
    assert to_record(played[-1])["user_errors"] == [[], ["early_end"]]
    policies = {"policy": metrics, "scripted": {**metrics}}
    del policies["scripted"]["user_errors"]
    head, rows = main_rows({"held_out": {"policies": policies}})
    assert head[-3:] == ["user errors", "episodes without", "success in these"]
    assert [row[-3] for row in rows] == [f"{metrics['user_errors']:.3f}", "-"]


class Mute(OptimalPolicy):
    """Says nothing in the customer's first or second turn."""

    def __init__(self, turn):
        self.turn = turn

    def act(self, env, rng):
        desk = env.unwrapped
        if desk.to_move() == CUSTOMER and (desk.steps == 0) == (self.turn == 0):
            return ""
        return super().act(env, rng)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("invalid_ends", [True, False])
def test_a_response_without_words_is_an_error_of_form(turn, invalid_ends):
    played = play(Mute(turn), invalid_ends=invalid_ends)
    for one in (one for one in played if one.is_user):
        # asked again it says nothing again, until the limit
        own = one.user_errors[turn:]
        assert own == [["form"]] * (1 if invalid_ends else len(own)) and own
        assert one.reward == pytest.approx(-1.05 if invalid_ends else -0.05 * len(own))
    # without a turn the clerk has no trajectory, and the episode counts all the same
    assert len(played) == (16 if turn == 0 else 32)
    assert rollout_metrics(played)["without_user_errors"] == 0.0


def test_each_seat_reads_its_own_rules_and_observations(lm):
    context = ContextManager(lm, window="all", system_prompt="instructions", max_tokens=4096)
    engine = TextEngine(context, lambda session, turn: "<think>x</think><answer>refund</answer>")
    proxy_of(context=context).rollout(
        EngineResponder(engine=engine, context=context), SPECS[:1], seed_key=(0,)
    )
    (user,), (clerk,) = (
        [lm.tokenizer.decode(request.prompt.ids) for request in requests]
        for requests in engine.requests[:2]
    )
    assert "You are a customer" in user and "you are" in user and "policy:" not in user
    assert "find(item" not in user and "find(item" in clerk
    assert "You work at a support desk" in clerk and "policy: " in clerk and "you are" not in clerk


def test_a_first_prompt_that_another_seat_fills_ends_the_game_and_not_the_run(lm, caplog):
    def written(text, *, max_tokens):
        context = ContextManager(lm, window="all", max_tokens=max_tokens)
        engine = TextEngine(context, lambda session, turn: answer(text))
        return proxy_of(context=context, max_response_tokens=300).rollout(
            EngineResponder(engine=engine, context=context), SPECS[:2], seed_key=(0,)
        )

    longest = "lamp" * 60
    room = len(written("lamp", max_tokens=4096)[0].turns[0].prompt_ids) + 300
    assert [one.is_user for one in written("lamp", max_tokens=room)] == [False, True] * 2
    assert not caplog.records
    played = written(longest, max_tokens=room)
    assert [(one.is_user, one.status) for one in played] == [(True, EpisodeStatus.TRUNCATED)] * 2
    assert "2 of 2 games ended at a seat's first prompt" in caplog.text
    # the first prompt of a game is nobody's response
    with pytest.raises(RolloutError, match="the first prompt has"):
        written("lamp", max_tokens=400)


# ---- training


def test_an_untrained_model_errs_in_form(lm):
    data = RolloutDataModule(
        proxy_of(context=ContextManager(lm, max_tokens=2048)),
        iteration=IterationSettings(groups=2, group_size=2),
    )
    trajectories = data.collect(0, Module(lm))
    assert all(one.is_user for one in trajectories) and data.metrics["user_errors"] == 1.0
    assert data.metrics["user_error/form"] > 0.0


def collected(lm, *, other, fraction=1.0, **settings):
    context = ContextManager(lm, window="all", max_tokens=4096)
    data = RolloutDataModule(
        proxy_of(context=context, max_response_tokens=80),
        iteration=IterationSettings(groups=3, group_size=2, **settings),
        opponents=Opponents(fraction=fraction, seat=0),
    )
    refuse = '{"name": "say", "arguments": {"text": "refused late"}}'
    return data, data.collect(0, Written(context, own=refuse, other=other))


def test_an_opponent_as_the_user_has_its_errors_reported_and_is_not_trained_on(lm):
    data, played = collected(lm, other="hello")
    assert [(one.seat, one.is_user, one.opponent) for one in played] == [(0, False, "0")] * 6
    assert {str(one.user_errors) for one in played} == {"[['omission'], ['no_end']]"}
    assert data.metrics["user_errors"] == 1.0 and data.metrics["user_error/no_end"] == 0.5
    assert len(data.buffer.samples) == 6


def test_errors_of_an_opponent_count_where_the_policy_has_no_turn(lm):
    # in group 1 the opponent ends the conversation at once; in groups 0 and 2 the policy talks to itself
    data, played = collected(lm, other="bye", fraction=0.5)
    assert {one.game for one in played} == {0, 2}
    turns = 2 + sum(len(one.turns) for one in played if one.is_user)
    assert data.metrics["user_error/early_end"] == pytest.approx(2 / turns)


def test_nothing_to_train_on_is_refused_by_name(lm):
    with pytest.raises(RolloutError, match="the simulated user has made an error in all 6 epis"):
        collected(lm, other="hello", leave_out_user_errors=True)
    with pytest.raises(RolloutError, match="the policy had no turn in any episode"):
        collected(lm, other="bye")


def test_a_seat_that_the_environment_lacks_is_refused():
    with pytest.raises(ValueError, match=r"opponents\.seat=2: the environment has seats=2"):
        Opponents(seat=2).check(seats=2, groups=2, others={})


def test_episodes_of_a_user_that_erred_can_be_left_out_of_the_agents_training():
    played = play(Careless("bye"))
    every = usable_episodes(played, FailureSettings())
    usable = usable_episodes(played, FailureSettings(), leave_out_user_errors=True)
    assert (every.count, every.left_out, usable.left_out, usable.failed) == (32, 0, 8, 0)
    # the user's own turns are trained on
    assert [(one.is_user, one.user_erred) for one in usable.trajectories] == [
        (one.is_user, one.user_erred) for one in played if one.is_user or not one.user_erred
    ]
    assert usable.is_enough(FailureSettings()) and usable.fraction == 1.0
    assert (every + usable).left_out == 8


# ---- protocol


class Unnamed(SupportDesk):
    def step(self, action):
        *rest, info = super().step(action)
        return *rest, info | {"user_errors": "reveal"}


class Elsewhere(SupportDesk):
    user_seat = 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unnamed", "returned info['user_errors']='reveal'; expected a list of the names"),
        ("Elsewhere", "found user_seat=2, expected None or a seat from 0 to 1"),
    ],
)
def test_errors_without_names_and_a_seat_that_is_none_fail_the_episode(name, message):
    played = play(OptimalPolicy(), target=f"{__name__}.{name}")
    assert {one.status for one in played} == {EpisodeStatus.FAILED}
    assert message in played[0].error
