"""Opponents: whose turn is whose, what is trained on, win rates, draws of the pool, and refusals."""

from __future__ import annotations

from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
from support.episodes.two_players import Written, agent_of, fitted
from support.models.tiny_models import TEXT

from envs.kuhn_poker import KuhnPoker
from ragen_pl.algorithms.group_filter import AboveDeviation, GroupFilter
from ragen_pl.assembly.component_checks import check_components
from ragen_pl.assembly.weights import trained_weights
from ragen_pl.base.records import to_record
from ragen_pl.config import ConfigError, check_config
from ragen_pl.config.composition import compose_overrides
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.opponents import Opponent, Opponents
from ragen_pl.data.settings import IterationSettings, UpdateSettings
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.calls import make_environment
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.trajectory import EpisodeStatus

KUHN = "ragen_pl.envs.kuhn_poker.KuhnPoker"
NEGOTIATION = "ragen_pl.envs.negotiation.Negotiation"
SIZES = IterationSettings(groups=4, group_size=3)


def collected(lm, opponents, *, target=KUHN, own="Bet", other="Pass", iterations=1, **kwargs):
    context = ContextManager(lm)
    proxy = AgentProxy(
        environments=EnvironmentManager(target=target, max_turns=2, kwargs=kwargs),
        context=context,
        max_response_tokens=64,
    )
    data = RolloutDataModule(proxy, iteration=SIZES, opponents=opponents)
    module = Written(context, own=own, other=other)
    played = [data.collect(iteration, module) for iteration in range(iterations)]
    return data, module, played


def test_an_opponents_turns_are_not_trained_on_and_the_policy_has_the_seats_in_turn(lm):
    data, _, (played,) = collected(lm, Opponents(fraction=0.5))
    actions = {turn.response_text for one in played for turn in one.turns}
    assert len(actions) == 1 and "Bet" in actions.pop()
    seats = {(one.game, one.seat, one.opponent) for one in played}
    # groups 1 and 3 play against the first snapshot
    alone = {(game, seat, None) for game in (0, 2) for seat in (0, 1)}
    assert seats == alone | {(1, 0, "0"), (3, 1, "0")}
    records = [to_record(one) for one in played]
    assert [(one["seat"], one["opponent"]) for one in records] == [
        (one.seat, one.opponent) for one in played
    ]
    assert Counter(one.group for one in played) == dict.fromkeys((0, 1, 2, 4, 5, 7), 3)
    # every sample of the batch is one of these turns
    assert len(data.buffer.samples) == sum(len(one.turns) for one in played)
    assert data.metrics["seats_without_turn"] == 0.0


@pytest.mark.parametrize(("own", "other", "rate"), [("Bet", "Pass", 1.0), ("Pass", "Bet", 0.0)])
def test_the_win_rate_is_that_of_games_against_the_opponent(lm, own, other, rate):
    # who bets wins the pot from who passes, whatever the cards
    opponents = Opponents(fraction=0.5)
    data, _, _ = collected(lm, opponents, own=own, other=other)
    assert (data.metrics["opponent_games"], data.metrics["opponent_win_rate"]) == (6.0, rate)
    assert data.metrics["win_rate_0"] == opponents.pool[0].win_rate == rate


def test_a_game_that_ends_before_a_seats_first_turn_counts(lm):
    # a response without a move gives up the pot
    opponents = Opponents(fraction=1.0)
    data, _, (played,) = collected(lm, opponents, own="Bet", other="nothing")
    # of the games in which the opponent moves first, the policy has no turn
    assert {one.seat for one in played} == {0} and data.metrics["opponent_win_rate"] == 1.0
    assert data.metrics["opponent_games"] == 12.0


def test_a_game_that_nobody_wins_is_a_draw_also_before_a_seats_first_turn(lm):
    # a malformed proposal ends the talks without an agreement
    data, _, _ = collected(
        lm, Opponents(fraction=1.0), target=NEGOTIATION, own="fine", other="propose"
    )
    assert data.metrics["opponent_games"] == 12.0 and data.metrics["opponent_win_rate"] == 0.5


def test_what_the_environment_names_counts_where_the_opponent_ends_the_game(lm):
    # the opponent accepts in games 0 and 2, and has nothing to accept in its first turn of the others
    data, _, _ = collected(
        lm, Opponents(fraction=1.0), target=NEGOTIATION, own="propose 1 hat", other="accept"
    )
    assert data.metrics["metrics/agreement"] == 0.5


def test_an_odd_number_of_games_has_each_seat_as_often_over_the_iterations(lm):
    _, _, played = collected(lm, Opponents(fraction=0.25), iterations=4)
    seats = [{one.seat for one in rollout if one.opponent is not None} for rollout in played]
    assert seats == [{0}, {1}, {0}, {1}]


class Unplayable(KuhnPoker):
    def reset(self, *, seed=None, options=None):
        raise ValueError("no cards")


def test_games_that_all_fail_in_their_reset_are_not_said_to_have_one_seat(lm):
    with pytest.raises(RolloutError, match="most failed with ValueError: no cards"):
        collected(lm, Opponents(seat=1), target=f"{__name__}.Unplayable")


def test_games_that_failed_and_draws(lm):
    opponents = Opponents(fraction=1.0)
    _, _, (played,) = collected(lm, opponents, own="Pass", other="Bet")
    before = opponents.pool[0].win_rate
    for one in played:
        one.status = EpisodeStatus.FAILED
    opponents.note(played)
    assert opponents.metrics() == {"opponent_games": 0.0, "win_rate_0": before}
    for one in played:
        one.status, one.seat_success = EpisodeStatus.TURN_LIMIT, [False, False]
    opponents.note(played)
    assert opponents.metrics()["opponent_win_rate"] == 0.5
    assert opponents.pool[0].win_rate == 0.5 * before + 0.25


def test_snapshots_are_taken_at_intervals_and_the_oldest_leaves(lm):
    opponents = Opponents(every=2, size=2, files=("a", "b"))
    opponents.check = lambda **settings: None
    for number in (-1.0, -2.0):
        opponents.add_file({"w": torch.tensor([number])})
    _, module, _ = collected(lm, opponents, iterations=7)
    assert [one.name for one in opponents.pool] == ["file_0", "file_1", "4", "6"]
    assert [one.weights["w"].item() for one in opponents.pool] == [-1.0, -2.0, 4.0, 6.0]
    # an iteration that is played again takes no second one
    names = [one.name for one in opponents.pool]
    opponents.begin(6, module, groups=4, seed=0)
    assert [one.name for one in opponents.pool] == names
    with pytest.raises(RolloutError, match="has 2 opponents of files, and 0 are set"):
        Opponents().load_state_dict(opponents.state_dict())


def test_an_environment_of_one_seat_is_refused_in_the_rollout_too(lm):
    with pytest.raises(RolloutError, match="the policy has one seat in this environment"):
        collected(lm, Opponents(), opponent="random")


def test_a_frozen_opponent_is_the_runs_start(lm):
    opponents = Opponents()
    _, module, _ = collected(lm, opponents, iterations=3)
    assert module.loaded == [0.0] * 3 and [one.name for one in opponents.pool] == ["0"]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("uniform", [1 / 3, 1 / 3, 1 / 3]),
        ("squared", [0.1 / 3 + 0.9 * 0.64 / 0.89, 0.1 / 3, 0.1 / 3 + 0.9 * 0.25 / 0.89]),
        ("variance", [0.1 / 3 + 0.9 * 0.16 / 0.41, 0.1 / 3, 0.1 / 3 + 0.9 * 0.25 / 0.41]),
    ],
)
def test_probabilities_follow_the_win_rates(rule, expected):
    opponents = Opponents(rule=rule, floor=0.1)
    opponents.pool = [
        Opponent(name=str(number), weights={}, win_rate=rate)
        for number, rate in enumerate((0.2, 1.0, None))
    ]
    assert opponents.probabilities() == pytest.approx(expected)
    # all beaten always: even, where the rule has no weight left
    opponents.pool = opponents.pool[1:2] * 2
    assert opponents.probabilities() == [0.5, 0.5]


def test_draws_follow_the_probabilities_and_the_seed():
    opponents = Opponents(rule="squared", floor=0.0)
    opponents.pool = [
        Opponent(name=name, weights={"n": name}, win_rate=rate)
        for name, rate in (("a", 0.5), ("b", 0.0))
    ]

    def drawn(seed):
        names = [
            opponents.begin(iteration, None, groups=2, seed=seed)["n"]
            for iteration in range(1, 401)
        ]
        return names

    counts = Counter(drawn(0))
    # 0.2 of 400, five standard deviations
    assert 40 <= counts["a"] <= 120 and drawn(0) == drawn(0) != drawn(1)


class Responses(pl.Callback):
    """Keeps the bundle's weights at the start, and what plays in the last rollout."""

    def on_fit_start(self, trainer, pl_module):
        self.start = pl_module.trained_weights()


def test_an_opponent_samples_with_its_own_weights_beside_the_policy(tmp_path):
    bundle = build_small_lm(seed=0, text=TEXT)
    agent, context = agent_of(bundle), ContextManager(bundle)
    proxy = AgentProxy(
        environments=EnvironmentManager(target=KUHN, max_turns=2, invalid_ends=False),
        context=context,
        max_response_tokens=4,
    )
    opponents = Opponents()
    data = RolloutDataModule(
        proxy,
        iteration=SIZES,
        update=UpdateSettings(epochs=1, minibatches=1),
        held_out=False,
        opponents=opponents,
    )
    seen = []

    class Watch(Responses):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch < 2:
                return
            # the engine of the last rollout, with its weights
            policy, engine = pl_module._opponent
            seen.append((policy.trained_weights(), engine.bundle is policy.bundle))

    watch = Watch()
    names = set(agent.state_dict())
    trainer = fitted(agent, data, watch, iterations=3)
    ((played, in_place),) = seen
    moved = agent.trained_weights()
    assert in_place and all(torch.equal(played[name], watch.start[name]) for name in played)
    assert any(not torch.equal(moved[name], watch.start[name]) for name in moved)
    assert all(torch.equal(opponents.pool[0].weights[name], watch.start[name]) for name in moved)
    # no part of the module: neither saved nor trained with it
    assert set(agent.state_dict()) == names
    file = tmp_path / "policy.ckpt"
    trainer.save_checkpoint(file)
    loaded = trained_weights(PolicyModule(build_small_lm(seed=0, text=TEXT)), file, source="files")
    assert all(torch.equal(loaded[name], moved[name]) for name in moved)
    other = PolicyModule(build_small_lm(seed=1, text=TEXT))
    name = next(iter(moved))
    other.get_parameter(name).requires_grad_(False)
    with pytest.raises(ConfigError, match=f"files: holds another {name}, which this run does not"):
        trained_weights(other, file, source="files")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=frozenlake"], "the policy has one seat in this environment"),
        (["env.kwargs.opponent=random"], "the policy has one seat in this environment"),
        (["rollout/engine=vllm_server"], "do not work with an engine that has a model of its own"),
        (["opponents.files=[none.ckpt]"], "opponents.files: there is no file none.ckpt"),
        (["opponents.initial=false"], "initial=false without files"),
        (["opponents.fraction=0.05"], "fraction=0.05: is less than one of rollout.groups="),
        (["algorithm=dapo"], "do not work with algorithm.filter.resample"),
        (["context.leave_out.turns=0.5"], "do not work with context.leave_out"),
    ],
)
def test_what_does_not_work_is_refused_before_a_model_is_built(overrides, message):
    base = ["env=kuhn_poker", "opponents=pool"]
    base = base[1:] if overrides[0].startswith("env=") else base
    cfg = compose_overrides("fit", [*base, *overrides])
    with pytest.raises(ConfigError, match=message) as refused:
        check_components(cfg, {cfg.env.name: make_environment(cfg.env).unwrapped})
    # a group of files takes no null
    assert "opponents=null" not in str(refused.value)


def test_sharded_weights_are_refused():
    overrides = ["env=kuhn_poker", "opponents=frozen", "trainer.strategy=fsdp2"]
    with pytest.raises(ConfigError, match=r"opponents: .* FSDP2 shards; leave opponents out"):
        check_config(compose_overrides("fit", overrides))


def test_the_presets_fit_a_game():
    for preset in ("frozen", "pool"):
        cfg = compose_overrides("fit", ["env=kuhn_poker", f"opponents={preset}"])
        check_components(cfg, {cfg.env.name: make_environment(cfg.env).unwrapped})


def test_resampled_groups_are_refused(lm):
    context = ContextManager(lm)
    proxy = AgentProxy(
        environments=EnvironmentManager(target=KUHN), context=context, max_response_tokens=8
    )
    with pytest.raises(ValueError, match=r"do not work with algorithm.filter.resample"):
        RolloutDataModule(
            proxy,
            opponents=Opponents(),
            group_filter=GroupFilter(keep=AboveDeviation(), resample=1),
        )
