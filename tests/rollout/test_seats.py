"""Games of several seats in the turn loop: one trajectory for each seat, groups, rewards, seeds and attempts."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch
from support.episodes.rollout_fixtures import TextEngine
from support.episodes.small_lakes import Module
from support.episodes.two_players import agent_of, fitted
from support.models.tiny_models import TEXT

from envs.kuhn_poker import PASS, KuhnPoker
from envs.policies import OptimalPolicy, RandomPolicy
from envs.trivial_policies import Constant, NoAnswer
from ragen_pl.algorithms.advantages.group import LeaveOneOut
from ragen_pl.base.records import write_episodes
from ragen_pl.data.ahead import RolloutAhead
from ragen_pl.data.batch import CreditLayout
from ragen_pl.data.collate import collate
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.failures import seats_without_turn, usable_episodes
from ragen_pl.data.recorded_episodes import read_episodes
from ragen_pl.data.settings import IterationSettings, RecordSettings, UpdateSettings
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.credit import assign_credit
from ragen_pl.modules.masking import Masks, compute_token_masks
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout import attempts as attempts_module
from ragen_pl.rollout.background import BackgroundRollout
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.rollout.settings import FailureSettings
from ragen_pl.trajectory import EpisodeStatus

TIC_TAC_TOE, KUHN = "ragen_pl.envs.tic_tac_toe.TicTacToe", "ragen_pl.envs.kuhn_poker.KuhnPoker"
NEGOTIATION = "ragen_pl.envs.negotiation.Negotiation"
SPECS = [EpisodeSpec(group=n // 3, member=n % 3, seed=n // 3) for n in range(12)]


def proxy_of(target, *, context=None, max_turns=5, num_envs=512, failures=None, **settings):
    return AgentProxy(
        environments=EnvironmentManager(target=target, max_turns=max_turns, **settings),
        context=context or TextContext(),
        max_response_tokens=sys.maxsize if context is None else 32,
        num_envs=num_envs,
        failures=failures or FailureSettings(),
    )


def play(target, policy, **settings):
    proxy = proxy_of(target, **settings)
    return proxy.rollout(ScriptedResponder(policy=policy), SPECS, seed_key=(0, "player"))


def environment_reward(trajectory):
    return sum(turn.reward_terms.get("environment", 0.0) for turn in trajectory.turns)


@pytest.mark.parametrize("target", [TIC_TAC_TOE, KUHN])
def test_a_game_gives_a_trajectory_for_each_seat(target):
    played = play(target, RandomPolicy())
    assert [(one.group, one.member, one.seat) for one in played] == [
        (2 * spec.group + seat, spec.member, seat) for spec in SPECS for seat in (0, 1)
    ]
    for first, second in zip(played[::2], played[1::2], strict=True):
        assert environment_reward(first) + environment_reward(second) == 0.0
        assert {first.status, second.status} == {EpisodeStatus.TERMINATED}
        assert 0 <= len(first.turns) - len(second.turns) <= 1
        assert (first.reward > 0, second.reward > 0) == (first.success, second.success)
        # the reward is in the last turn, the other seat's too
        for one in (first, second):
            assert [turn.reward for turn in one.turns[:-1]] == [0.0] * (len(one.turns) - 1)
    assert any(one.reward for one in played)


def test_the_seats_of_a_game_have_its_initial_state():
    played = play(KUHN, RandomPolicy(), record_states=True)
    keys = {one.seed: one.initial_state_key for one in played}
    assert all(one.initial_state_key == keys[one.seed] for one in played)
    assert all(one.turns[0].state_key == keys[one.seed] for one in played if one.seat == 0)


def test_records_of_one_of_several_seats_are_not_learned_from(tmp_path):
    settings = RecordSettings(path=str(tmp_path))
    write_episodes(play(TIC_TAC_TOE, RandomPolicy()), tmp_path)
    with pytest.raises(ValueError, match="line 1: is an episode of one of several seats"):
        read_episodes(settings)
    write_episodes(play(TIC_TAC_TOE, RandomPolicy(), kwargs={"opponent": "random"}), tmp_path)
    assert len(read_episodes(settings)) == len(SPECS)


def test_a_seat_sees_its_own_observations_only():
    for one in play(KUHN, RandomPolicy()):
        name = ("first", "second")[one.seat]
        assert all(turn.observation.text.startswith(f"you {name} with") for turn in one.turns)


def test_a_negotiation_pays_each_seat_its_own_value_in_its_last_turn():
    played = play(NEGOTIATION, RandomPolicy(), max_turns=4)
    agreed = 0
    for first, second in zip(played[::2], played[1::2], strict=True):
        ended = [
            one.turns[-1].info["metrics"]
            for one in (first, second)
            if "metrics" in one.turns[-1].info
        ]
        (metrics,) = ended
        total = environment_reward(first) + environment_reward(second)
        assert total == pytest.approx(metrics.get("joint_value", 0.0))
        agreed += metrics["agreement"]
        for one in (first, second):
            assert one.success == (environment_reward(one) >= 0.5)
            assert [turn.reward for turn in one.turns[:-1]] == [0.0] * (len(one.turns) - 1)
            # its own values, at first only
            texts = [turn.observation.text for turn in one.turns]
            assert ["worth" in text for text in texts] == [True] + [False] * (len(texts) - 1)
    assert agreed


class Negotiators(TextEngine):
    """Speak, propose what the seed says, and accept, as the prompt asks for; in place of a trained model."""

    exact = False

    def __init__(self, context):
        super().__init__(context, lambda session, turn: "")
        self.version = 0

    def load_weights(self, version):
        self.version = version

    def sleep(self):
        """Nothing to free."""

    def _response(self, request):
        heard = self.context.bundle.tokenizer.decode(request.prompt.ids).rpartition("worth")[2]
        number = request.seed % 2
        said = (
            f"propose {number} hats" if "says" in heard else f"fine {end_of(self.context)} accept"
        )
        answer = "accept" if "offers" in heard else said
        self.write = lambda session, turn: f"<think>x</think><answer>{answer}</answer>"
        return replace(super()._response(request), version=self.version)


def end_of(context):
    """Return the name of the token that ends a turn."""
    bundle = context.bundle
    return bundle.tokenizer.convert_ids_to_tokens(bundle.end_of_turn_id)


def test_a_negotiation_is_trained_by_self_play():
    """What a seat writes is text to the other one, a control token's name too."""
    bundle = build_small_lm(seed=0, text=TEXT)
    context = ContextManager(bundle, window="all")
    agent = agent_of(bundle, engine=lambda policy, **settings: Negotiators(context), lr=1e-3)
    data = RolloutDataModule(
        proxy_of(NEGOTIATION, context=context, max_turns=4),
        iteration=IterationSettings(groups=2, group_size=4),
        update=UpdateSettings(epochs=1, minibatches=1),
        held_out=False,
    )
    played = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            played.append((dict(data.metrics), data.buffer))

    before = {name: weight.clone() for name, weight in agent.trained_weights().items()}
    fitted(agent, data, Watch(), iterations=2)
    assert len(played) == 2
    for metrics, buffer in played:
        assert metrics["metrics/agreement"] == 1.0 and metrics["turns"] == 1.5
        assert metrics["metrics/joint_value"] == pytest.approx(2 * metrics["return"])
        # the first seat has two responses, the second one; what one wrote is no end
        ends = (buffer.samples.input_ids == bundle.end_of_turn_id).sum(1).tolist()
        assert sorted(ends) == [1] * 8 + [2] * 8
    moved = agent.trained_weights()
    assert any(not torch.equal(moved[name], before[name]) for name in moved)


def test_an_illegal_move_loses_or_is_asked_again():
    lost = play(TIC_TAC_TOE, Constant(action=0))
    first, second = lost[0], lost[1]
    assert (first.success, environment_reward(first)) == (True, 1.0)
    assert second.turns[-1].reward_terms == {"environment": -1.0, "format": -0.05}
    asked = play(TIC_TAC_TOE, Constant(action=0), invalid_ends=False)
    # o answers the same cell until the limit of both seats ends the game, for whom nobody wins
    assert [len(one.turns) for one in asked[:2]] == [1, 9]
    assert {one.status for one in asked} == {EpisodeStatus.TURN_LIMIT}
    assert {environment_reward(one) for one in asked} == {0.0}


def test_a_seat_without_a_turn_has_no_trajectory_and_is_counted(lm):
    played = play(TIC_TAC_TOE, NoAnswer())
    assert [one.seat for one in played] == [0] * len(SPECS)
    context = ContextManager(lm)
    data = RolloutDataModule(
        proxy_of(TIC_TAC_TOE, context=context), iteration=IterationSettings(groups=2, group_size=3)
    )
    # the untrained model ends hardly a response in time
    trajectories = data.collect(0, Module(lm))
    silent = 12 - len(trajectories)
    assert silent > 0 and data.metrics["seats_without_turn"] == silent
    assert data.metrics["failed"] == 0.0 and data.metrics["dropped_groups"] == 0.0


def test_a_group_in_which_some_seats_had_no_turn_is_not_dropped():
    played = [one for one in play(KUHN, RandomPolicy()) if one.group != 1 or one.member == 2]
    assert sum(one.group == 1 for one in played) == 1
    usable = usable_episodes(played, FailureSettings())
    assert (usable.count, usable.dropped_groups) == (len(played), 0)
    assert seats_without_turn(played) == 2


class Paid(KuhnPoker):
    """Pays the second seat before its first turn, and both at each further move."""

    def step(self, action):
        seen, _, ended, truncated, info = super().step(action)
        mover = 0 if self.steps % 2 else 1
        info["seat_rewards"] = [
            one + 10.0 ** (self.steps + n) for n, one in enumerate(info["seat_rewards"])
        ]
        return seen, info["seat_rewards"][mover], ended, truncated, info


def test_a_reward_before_a_seats_first_turn_comes_with_that_turn(monkeypatch):
    played = play(f"{__name__}.Paid", Constant(action="Bet"))
    first, second = played[0], played[1]
    stake = second.turns[0].reward_terms["environment"] - 1100
    assert len(second.turns) == 1 and abs(stake) == 2
    assert environment_reward(first) == 10 + 100 - stake


class Skipping(KuhnPoker):
    """Passes the turn on after Bet, which its rules do not allow."""

    def _play(self, action):
        legal = action == PASS
        if legal:
            self._move(action)
        else:
            self.mover = 1 - self.mover
        return legal


def test_an_invalid_action_that_passes_the_turn_on_loses_for_who_made_it():
    (one, *_) = play(f"{__name__}.Skipping", Constant(action="Bet"))
    assert (one.seat, one.seat_success) == (0, [False, True])
    assert one.turns[-1].reward_terms == {"environment": -1.0, "format": -0.05}


class SeededEngine(TextEngine):
    """Writes what seed and prompt decide, as sampling does."""

    def __init__(self, context):
        super().__init__(context, lambda session, turn: "", shuffled=True)
        self.seeds = []

    def _response(self, request):
        self.seeds.append(request.seed)
        number = (request.seed + int(request.prompt.ids.sum())) % 997
        self.write = lambda session, turn: (
            f"<think>{number}</think><answer>{'Bet' if number % 3 else 'Pass'}</answer>"
        )
        return super()._response(request)


def sampled(lm, *, target=KUHN, **settings):
    context = ContextManager(lm, window="all")
    engine = SeededEngine(context)
    proxy = proxy_of(target, context=context, **settings)
    responder = EngineResponder(engine=engine, context=context)
    return proxy.rollout(responder, SPECS, seed_key=(0, "test")), engine


def contents(trajectories):
    return [
        (one.group, one.member, one.seat, one.reward, [turn.response_text for turn in one.turns])
        for one in trajectories
    ]


class Fragile(KuhnPoker):
    """Loses its connection in the second move of some games, once."""

    broken: ClassVar[set[int]] = set()

    def reset(self, *, seed=None, options=None):
        self.number = seed
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.steps == 1 and self.number not in self.broken:
            self.broken.add(self.number)
            raise ConnectionResetError("gone")
        return super().step(action)


def test_seats_have_their_own_seeds_and_a_retried_game_repeats_itself(lm, monkeypatch):
    played, engine = sampled(lm)
    assert len(set(engine.seeds)) == len(engine.seeds) == sum(len(one.turns) for one in played)
    assert contents(sampled(lm, num_envs=2)[0]) == contents(played)
    monkeypatch.setattr(attempts_module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(Fragile, "broken", set())
    again, other = sampled(lm, target=f"{__name__}.Fragile")
    assert contents(again) == contents(played) and len(other.seeds) == len(engine.seeds)
    failed = [one for one in again if one.failed_after]
    assert len(failed) == 4 and {one.failed_after for one in failed} == {(2,)}
    assert {one.replayed_turns for one in failed} == {2}


def test_a_game_whose_environment_fails_fails_for_both_seats(monkeypatch):
    monkeypatch.setattr(Fragile, "broken", set())
    played = play(f"{__name__}.Fragile", RandomPolicy(), failures=FailureSettings(attempts=1))
    failed = [one for one in played if one.status is EpisodeStatus.FAILED]
    assert len(played) == 2 * len(SPECS) and Counter(one.seat for one in failed) == {0: 4, 1: 4}
    assert all("gone" in one.error for one in failed)


class Unplayable(KuhnPoker):
    """Has no cards for the games of a group."""

    def reset(self, *, seed=None, options=None):
        if seed == 1:
            raise ValueError("no cards")
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("num_envs", [512, 3, 1])
def test_a_game_that_cannot_begin_has_its_seats_whichever_games_are_open_beside_it(num_envs):
    played = play(
        f"{__name__}.Unplayable",
        RandomPolicy(),
        failures=FailureSettings(attempts=1),
        num_envs=num_envs,
    )
    failed = [one for one in played if one.status is EpisodeStatus.FAILED]
    assert [(one.group, one.seat, one.member) for one in failed] == [
        (2 + seat, seat, member) for member in range(3) for seat in (0, 1)
    ]
    usable = usable_episodes(played, FailureSettings())
    assert (usable.count, usable.failed, usable.dropped_groups) == (18, 6, 2)


def test_a_cut_game_has_no_winner_and_keeps_the_last_prompt_of_each_seat(lm):
    context = ContextManager(lm)
    played = proxy_of(
        TIC_TAC_TOE, context=context, max_turns=1, turn_limit_bootstraps=True
    ).rollout(ScriptedResponder(policy=OptimalPolicy()), SPECS[:1], seed_key=(0,))
    assert [(one.status, one.reward, len(one.turns)) for one in played] == [
        (EpisodeStatus.TRUNCATED, 0.0, 1)
    ] * 2
    for one in played:
        text = lm.tokenizer.decode(one.final_prompt_ids)
        assert f"you {'xo'[one.seat]}" in text and "x" in text and "o" in text


@pytest.mark.parametrize("window", [1, "all"])
def test_leave_one_out_compares_games_of_the_same_seat(lm, window):
    proxy = proxy_of(KUHN, context=ContextManager(lm, window=window))
    played = proxy.rollout(ScriptedResponder(policy=RandomPolicy()), SPECS, seed_key=(0, "player"))
    batch = collate(played, lm)
    batch.samples.values = torch.zeros_like(batch.samples.input_ids, dtype=torch.float32)
    layout = CreditLayout.of(batch)
    masks = compute_token_masks(batch, layout, Masks(), kl=None)
    credit = assign_credit(batch, layout, masks, LeaveOneOut(), whiten_advantages=False)
    for number, one in enumerate(played):
        others = [other for other in played if other.group == one.group and other is not one]
        assert {other.seat for other in others} == {one.seat} and len(others) == 2
        expected = one.reward - sum(other.reward for other in others) / 2
        own = credit.advantages[number][masks.loss[number]]
        assert own.tolist() == pytest.approx([expected] * len(own), abs=1e-6) and len(own)


def test_a_rollout_ahead_is_shared_out_by_game(lm, monkeypatch):
    context = ContextManager(lm)
    rollout = BackgroundRollout(
        proxy_of(KUHN, context=context),
        ScriptedResponder(policy=RandomPolicy()),
        SPECS,
        seed_key=(0, "player"),
    )
    ahead = RolloutAhead(1, lambda trajectories: None)
    ahead.begin(1, rollout, weights_of=0)
    (whole,) = ahead.state_dict()
    keys = [(one.group, one.member) for one in ahead.played(1).trajectories]
    monkeypatch.setattr("ragen_pl.data.ahead.world_size", lambda: 2)
    parts = []
    for rank in range(2):
        monkeypatch.setattr("ragen_pl.data.ahead.rank", lambda rank=rank: rank)
        ahead.load_state_dict([whole])
        own = ahead.played(1).trajectories
        assert {one.game % 2 for one in own} == {rank} and {one.seat for one in own} == {0, 1}
        parts.append([(one.group, one.member) for one in own])
    # in the order of the rollout, which an exact resume depends on
    assert parts == [[key for key in keys if key[0] // 2 % 2 == rank] for rank in range(2)]


class Changing(KuhnPoker):
    """Has two seats in some games, and one in others."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options={"held_out": bool(seed % 2)})


@pytest.mark.parametrize("num_envs", [512, 1])
def test_games_with_different_numbers_of_seats_are_refused(num_envs):
    with pytest.raises(RolloutError, match="environments of one rollout have 1 and 2 seats"):
        play(f"{__name__}.Changing", RandomPolicy(), num_envs=num_envs)


class Unequal(KuhnPoker):
    def step(self, action):
        seen, reward, *rest = super().step(action)
        return seen, reward + 1.0, *rest


class Silent(KuhnPoker):
    def step(self, action):
        *rest, info = super().step(action)
        del info["seat_rewards"]
        return *rest, info


class Lost(KuhnPoker):
    def to_move(self):
        return 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unequal", r"returned reward 1 and info\['seat_rewards'\]\[0\]=0 for the seat that moved"),
        ("Silent", r"info\['seat_rewards'\]=None; expected one value for each of its seats=2"),
        ("Lost", r"to_move\(\) returned 2, expected a seat from 0 to 1"),
    ],
)
def test_a_game_that_breaks_the_protocol_names_what_it_returned(name, message):
    played = play(f"{__name__}.{name}", Constant(action="Pass"))
    assert played[0].status is EpisodeStatus.FAILED
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(played[0].error)
