"""Every estimator gives a sampled token the same credit, whichever samples the episode's turns are spread over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.episodes.trajectories import in_context, make_turn

from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.advantages.cast import SolverTeacher
from ragen_pl.algorithms.advantages.gae import MaskedGAE
from ragen_pl.algorithms.advantages.gagpo import GroupGAE
from ragen_pl.algorithms.advantages.gated import GatedGAE
from ragen_pl.algorithms.advantages.gdpo import Decoupled
from ragen_pl.algorithms.advantages.gigpo import GroupInGroup
from ragen_pl.algorithms.advantages.graphgpo import GraphRelative
from ragen_pl.algorithms.advantages.group import GroupRelative, LeaveOneOut, SuccessRelative
from ragen_pl.algorithms.advantages.reinforce import BatchRelative, RawReturn, ReinforcePlusPlus
from ragen_pl.algorithms.advantages.turn import TurnGAE
from ragen_pl.algorithms.advantages.turn_baseline import Absent, TurnLeaveOneOut
from ragen_pl.algorithms.credit import Estimator, broadcast
from ragen_pl.algorithms.masks import until_action
from ragen_pl.algorithms.normalization import ByBatch, ByGroup, RewardNormalizer, Running
from ragen_pl.base.finite import NonFiniteError
from ragen_pl.data.batch import CreditLayout, TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.credit import assign_credit, write_credit
from ragen_pl.modules.masking import Masks, compute_token_masks
from ragen_pl.trajectory import EpisodeStatus, Observation, Span, Trajectory

BATCH_MEAN = GatedGAE(gamma=0.9, threshold=1.0)
ESTIMATORS = [
    MaskedGAE(gamma=0.9, lam=0.8),
    BilevelGAE(gamma_turn=0.9, lam_turn=0.8, gamma_token=0.95, lam_token=0.7),
    TurnGAE(gamma=0.9, lam=0.8),
    GroupRelative(),
    GroupRelative(scale_by_std=False),
    GroupInGroup(gamma=0.9),
    LeaveOneOut(),
    TurnLeaveOneOut(gamma=0.9),
    BatchRelative(),
    RawReturn(),
    ReinforcePlusPlus(gamma=0.9),
    GatedGAE(gamma=0.9, lam=0.8, threshold=-1e9),
    BATCH_MEAN,
    GroupGAE(gamma=0.9, lam=0.7),
    GraphRelative(),
    SolverTeacher(),
    SuccessRelative(),
    Decoupled(weights={"environment": 1.0}),
]
TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def bundle():
    return build_small_lm(seed=0, text=TEXT)


def episode(bundle, *, number: int, window: int | str, system: str | None = None) -> Trajectory:
    """Four or fewer turns whose responses do not depend on what is shown."""
    rng = np.random.default_rng(number)
    turns = []
    for turn in range(1 + (number + 3) % 4):
        ids = np.append(rng.integers(20, 200, rng.integers(2, 6)), bundle.end_of_turn_id)
        turns.append(
            make_turn(
                observation=Observation(text=f"see {turn}"), response_ids=ids,
                spans=rng.integers(1, 4, len(ids)).astype(np.int8), reward=float(rng.integers(-1, 2)),
                state_key=f"state {rng.integers(3)}", potential=-float((turn + number) % 4),
            )
        )  # fmt: skip
    trajectory = in_context(
        bundle, turns, window=window, system_prompt=system, group=number // 3, member=number % 3
    )
    trajectory.success, trajectory.final_potential = number % 3 == 0, -float(number)
    if number == 4:
        trajectory.status = EpisodeStatus.TRUNCATED
        trajectory.final_prompt_ids = turns[-1].prompt_ids
    return trajectory


def credit_by_token(batch: TrajectoryBatch, name: str) -> torch.Tensor:
    samples = batch.samples
    on = samples.turn >= 0
    return getattr(samples, name)[on][samples.token[on].argsort()]


def credited(bundle, *, window, estimator, whiten=False, order=None, normalizer=None, lower=None):
    """Return a batch with credit; `lower` is subtracted from all values of an episode."""
    played = [episode(bundle, number=number, window=window) for number in range(6)]
    batch = collate([played[number] for number in order or range(6)], bundle)
    samples = batch.samples
    values = torch.sin(samples.input_ids.float())
    batch.episodes.bootstrap = torch.where(batch.episodes.truncated, 0.7, 0.0)
    if lower is not None:
        values = values - lower[samples.episode][:, None]
        batch.episodes.bootstrap -= torch.where(batch.episodes.truncated, lower, 0.0)
    samples.values = torch.where(samples.turn >= 0, values, 0.0)
    layout = CreditLayout.of(batch)
    kept = compute_token_masks(batch, layout, Masks(advantage=until_action), kl=None)
    settings = {"whiten_advantages": whiten, "normalizers": [normalizer] if normalizer else []}
    estimates = assign_credit(batch, layout, kept, estimator, **settings)
    write_credit(samples, layout, kept, estimates)
    return batch


def test_no_mask_drops_a_reward(bundle) -> None:
    """A turn that a mask leaves empty keeps its sampled tokens, whoever wrote the mask."""
    batch = collate([episode(bundle, number=number, window="all") for number in range(6)], bundle)
    layout = CreditLayout.of(batch)
    spans, turn = layout.gather(batch.samples.spans), layout.turn

    def own(spans, turn):
        return (spans == Span.ACTION) & (turn > 0)

    kept = compute_token_masks(batch, layout, Masks(advantage=own), kl=None).advantage
    for row in range(len(turn)):
        for each in range(int(turn[row].max()) + 1):
            here, wanted = turn[row] == each, own(spans, turn)[row]
            expected = here & wanted if (here & wanted).any() else here
            assert (kept[row] & here).tolist() == expected.tolist()
    assert (kept & ~own(spans, turn)).any()


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_credit_does_not_depend_on_the_window(bundle, estimator) -> None:
    whole = credited(bundle, window="all", estimator=estimator)
    assert len(whole.samples) == 6
    for window in (1, 2):
        parts = credited(bundle, window=window, estimator=estimator)
        assert len(parts.samples) > 6
        for name in ("advantages", "returns", "loss_mask", "advantage_mask"):
            expected, actual = credit_by_token(whole, name), credit_by_token(parts, name)
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert float(whole.samples.advantages.abs().sum()) > 1


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_credit_does_not_depend_on_the_order_of_episodes(bundle, estimator) -> None:
    order = [5, 2, 0, 4, 1, 3]
    in_order = credited(bundle, window=1, estimator=estimator, whiten=True)
    shuffled = credited(bundle, window=1, estimator=estimator, whiten=True, order=order)
    for place, number in enumerate(order):
        actual = shuffled.samples.advantages[shuffled.samples.episode == place]
        expected = in_order.samples.advantages[in_order.samples.episode == number]
        torch.testing.assert_close(expected, actual, rtol=1e-5, atol=1e-5)


def test_normalized_rewards_sum_to_the_normalized_return(bundle) -> None:
    raw = credited(bundle, window=1, estimator=RawReturn())
    normalizer = RewardNormalizer(by=ByGroup(), clip_high=0.5)
    bounded = credited(bundle, window=1, estimator=RawReturn(), normalizer=normalizer)
    relative = credited(bundle, window=1, estimator=GroupRelative())
    expected = relative.samples.advantages.clamp(max=0.5)
    torch.testing.assert_close(bounded.samples.advantages, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(raw.samples.advantages, expected)


@pytest.mark.parametrize("by", [ByGroup(scale_by_std=False), ByBatch(scale_by_std=False)])
@pytest.mark.parametrize(
    "estimator",
    [each for each in ESTIMATORS if each.needs_values and each != BATCH_MEAN],
    ids=repr,
)
def test_centering_lowers_every_return_alike(bundle, estimator, by) -> None:
    """A critic that knows the lower returns sees the same advantages, however long an episode lasts."""
    raw = credited(bundle, window=1, estimator=estimator)
    episodes = raw.episodes
    assert episodes.truncated.any() and len(episodes.turns.unique()) > 2
    center, _ = by(episodes.turn_rewards.sum(1), episodes.group, iteration=0)
    assert float(center.abs().max()) > 0.1
    centered = credited(
        bundle, window=1, estimator=estimator, normalizer=RewardNormalizer(by=by), lower=center
    )
    trained = raw.samples.loss_mask
    torch.testing.assert_close(
        centered.samples.advantages, raw.samples.advantages, rtol=1e-5, atol=1e-5
    )
    lower = raw.samples.returns - center[raw.samples.episode][:, None]
    torch.testing.assert_close(
        centered.samples.returns[trained], lower[trained], rtol=1e-5, atol=1e-5
    )


def test_a_mean_in_place_of_the_critic_is_that_of_the_centered_returns(bundle) -> None:
    normalizer = RewardNormalizer(by=ByGroup(scale_by_std=False))
    raw = credited(bundle, window=1, estimator=BATCH_MEAN)
    center, _ = normalizer.by(raw.episodes.turn_rewards.sum(1), raw.episodes.group, iteration=0)
    assert len(center.unique()) > 1
    centered = credited(bundle, window=1, estimator=BATCH_MEAN, normalizer=normalizer, lower=center)
    on = raw.samples.advantage_mask
    lower = (raw.samples.returns - center[raw.samples.episode][:, None])[on]
    torch.testing.assert_close(centered.samples.advantages[on], lower - lower.mean())


@pytest.mark.parametrize("by", [ByBatch(scale_by_std=False), ByGroup(scale_by_std=False)])
@pytest.mark.parametrize("absent", Absent)
def test_members_of_a_group_are_compared_without_their_common_center(bundle, absent, by) -> None:
    """Episodes of a group have one to four turns."""
    normalizer = RewardNormalizer(by=by)
    estimator = TurnLeaveOneOut(gamma=0.9, absent=absent)
    raw = credited(bundle, window=1, estimator=estimator)
    centered = credited(bundle, window=1, estimator=estimator, normalizer=normalizer)
    center, _ = normalizer.by(raw.episodes.turn_rewards.sum(1), raw.episodes.group, iteration=0)
    assert float(center.abs().max()) > 0.1
    # a turn that no other member has is compared with nothing
    episodes, turn = raw.episodes, raw.samples.turn
    longer = torch.zeros(raw.samples.turn.shape, dtype=torch.int64)
    for row, number in enumerate(raw.samples.episode.tolist()):
        others = episodes.turns[episodes.group == episodes.group[number]]
        longer[row] = (others[:, None] > turn[row]).sum(0)
    compared = raw.samples.loss_mask & ((longer > 1) | (absent is Absent.ZERO))
    torch.testing.assert_close(
        centered.samples.advantages[compared], raw.samples.advantages[compared], rtol=1e-5, atol=1e-5
    )  # fmt: skip


def test_centering_without_a_critic_lowers_every_return_alike(bundle) -> None:
    """Rewards are discounted, and a group's mean in the last turn would be discounted with them."""
    normalizer = RewardNormalizer(by=ByGroup(scale_by_std=False))
    estimator = ReinforcePlusPlus(gamma=0.5)
    raw = credited(bundle, window=1, estimator=estimator)
    centered = credited(bundle, window=1, estimator=estimator, normalizer=normalizer)
    center, _ = normalizer.by(raw.episodes.turn_rewards.sum(1), raw.episodes.group, iteration=0)
    lower = raw.samples.returns - center[raw.samples.episode][:, None]
    expected = torch.where(raw.samples.loss_mask, lower, 0.0)
    torch.testing.assert_close(centered.samples.returns, expected, rtol=1e-5, atol=1e-5)
    by_turn = TurnLeaveOneOut(gamma=0.5)
    both = [
        credited(bundle, window=1, estimator=by_turn, normalizer=each).samples
        for each in (None, normalizer)
    ]
    # all members have a first turn to compare with
    first = both[0].turn == 0
    assert float(both[0].advantages[first].abs().max()) > 0.1
    expected, found = (samples.advantages[first] for samples in both)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [None, ByGroup, ByBatch])
def test_returns_of_the_same_rewards_are_equal_where_they_cancel(bundle, rule) -> None:
    """Ten times -0.1 and once 1, whose sums differ by rounding and have no size to compare that with."""
    played = [episode(bundle, number=number, window=1) for number in range(3)]
    order = [[0, 10], [5, 5], [10, 0]]
    for trajectory, (before, after) in zip(played, order, strict=True):
        amounts = [-0.1] * before + [1.0] + [-0.1] * after
        ids = np.append(np.arange(20, 22), bundle.end_of_turn_id)
        turns = [make_turn(response_ids=ids, reward=amount) for amount in amounts]
        trajectory.turns = in_context(bundle, turns, window=1, system_prompt=None).turns
    batch = collate(played, bundle)
    layout = CreditLayout.of(batch)
    kept = compute_token_masks(batch, layout, Masks(), kl=None)
    normalizers = [] if rule is None else [RewardNormalizer(by=rule())]
    for estimator in (GroupRelative(), LeaveOneOut(), BatchRelative(), RawReturn()):
        found = assign_credit(
            batch, layout, kept, estimator, whiten_advantages=False, normalizers=normalizers
        )
        assert not found.advantages.any()
    assert len({one.reward for one in played}) == len(batch.episodes.terms.unique()) == 1


def test_states_that_are_known_on_another_rank_alone_are_no_error(bundle, monkeypatch) -> None:
    played = [episode(bundle, number=number, window=1) for number in range(3)]
    for turn in (turn for one in played for turn in one.turns):
        turn.state_key = None
    batch = collate(played, bundle)
    layout = CreditLayout.of(batch)
    kept = compute_token_masks(batch, layout, Masks(), kl=None)
    settings = {"estimator": GroupInGroup(), "whiten_advantages": False}
    with pytest.raises(ValueError, match="found state=None"):
        assign_credit(batch, layout, kept, **settings)
    monkeypatch.setattr("ragen_pl.modules.credit.sum_over_ranks", lambda own: own + 1)
    found = assign_credit(batch, layout, kept, **settings)
    # the step has no part in it
    expected = assign_credit(batch, layout, kept, GroupRelative(), whiten_advantages=False)
    assert torch.equal(found.advantages, expected.advantages)


class Broken(Estimator):
    """Advantages of which one is not finite."""

    def __call__(self, credit, *, all_reduce=None):
        result = broadcast(credit.returns, credit)
        result.advantages[2, 1] = float("nan")
        return result


def test_an_estimator_that_returns_nan_is_named(bundle) -> None:
    with pytest.raises(NonFiniteError) as caught:
        credited(bundle, window=1, estimator=Broken())
    assert f"{__name__}.Broken are not finite: nan at [2, 1]" in str(caught.value)
    assert str(caught.value).startswith("algorithm.estimator: the advantages of ")


class TestUndividedSequence:
    """RICO: text that was shown is inside the masks, the system prompt and controls without probability are not."""

    def batch(self, bundle):
        played = [episode(bundle, number=n, window="all", system="rules here") for n in range(3)]
        return collate(played, bundle, observations=True), played

    def test_shown_text_without_system_prompt_and_banned_tokens_has_a_turn(self, bundle) -> None:
        batch, played = self.batch(bundle)
        samples = batch.samples
        banned = torch.tensor(list(bundle.banned_token_ids))
        for row, trajectory in enumerate(played):
            length, head = int(samples.length[row]), trajectory.system_prompt_length
            assert head > 3 and (samples.turn[row, :head] == -1).all()
            rest = slice(head, length)
            off = torch.isin(samples.input_ids[row, rest], banned)
            assert torch.equal(samples.turn[row, rest] < 0, off)
            responses = torch.cat(
                [torch.from_numpy(turn.response_ids) for turn in trajectory.turns]
            )
            sampled = (samples.turn[row] >= 0) & (samples.spans[row] != Span.SHOWN)
            assert torch.equal(samples.input_ids[row][sampled], responses)
            turns = samples.turn[row][samples.turn[row] >= 0]
            assert (turns.diff() >= 0).all() and int(turns.max()) == len(trajectory.turns) - 1
        numbers = samples.token[samples.turn >= 0]
        assert torch.equal(numbers, torch.arange(len(numbers)))

    def test_other_masks_hold_sampled_tokens_only(self, bundle) -> None:
        batch, _ = self.batch(bundle)
        plain = collate(self.batch(bundle)[1], bundle)
        for masked in (batch, plain):
            layout = CreditLayout.of(masked)
            kept = compute_token_masks(masked, layout, Masks(advantage=until_action), kl=None)
            kept.write(masked.samples, layout)
        assert torch.equal(batch.samples.loss_mask, plain.samples.loss_mask)
        assert torch.equal(batch.samples.advantage_mask, plain.samples.advantage_mask)

    def test_episode_of_several_samples_is_rejected(self, bundle) -> None:
        with pytest.raises(ValueError, match=r"context\.window=all"):
            collate([episode(bundle, number=0, window=1)], bundle, observations=True)


# ---- several environments

APART = [
    *((estimator, None) for estimator in ESTIMATORS),
    (RawReturn(), ByBatch),
    (LeaveOneOut(), Running),
]


def credit_of(bundle, groups, estimator, rule, *, whiten, scale=(1.0, 1.0)):
    """Return the advantages of groups that are in environments a and b in turn, by group and member."""
    played = [episode(bundle, number=number, window=1) for number in range(12)]
    played = [one for one in played if one.group in groups]
    for one in played:
        one.environment = "ab"[one.group % 2]
        for turn in one.turns:
            turn.reward_terms = {
                name: scale[one.group % 2] * amount for name, amount in turn.reward_terms.items()
            }
    batch = collate(played, bundle, shares={"a": 0.5, "b": 0.5})
    batch.samples.values = torch.where(
        batch.samples.turn >= 0, torch.sin(batch.samples.input_ids.float()), 0.0
    )
    layout = CreditLayout.of(batch)
    estimates = assign_credit(
        batch,
        layout,
        compute_token_masks(batch, layout, Masks(advantage=until_action), kl=None),
        estimator,
        whiten_advantages=whiten,
        normalizers=[RewardNormalizer(by=rule()) for _ in range(2)] if rule else [],
    )
    keys = zip(batch.episodes.group.tolist(), batch.episodes.member.tolist(), strict=True)
    return {
        key: row[turn >= 0]
        for key, row, turn in zip(keys, estimates.advantages, layout.turn, strict=True)
    }


@pytest.mark.parametrize(
    ("estimator", "rule"), APART, ids=lambda one: getattr(one, "__name__", type(one).__name__)
)
def test_credit_in_a_mixture_is_that_of_the_environment_alone(bundle, estimator, rule) -> None:
    for whiten in (False, True):
        mixed, *alone = (
            credit_of(bundle, groups, estimator, rule, whiten=whiten)
            for groups in ({0, 1, 2, 3}, {0, 2}, {1, 3})
        )
        apart = {key: credit for part in alone for key, credit in part.items()}
        assert len(mixed) == 12 and mixed.keys() == apart.keys()
        for key, expected in apart.items():
            torch.testing.assert_close(mixed[key], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "rule"),
    [(BatchRelative(), None), (ReinforcePlusPlus(gamma=0.9), None), (RawReturn(), Running)],
    ids=["batch", "reinforce", "running"],
)
def test_larger_rewards_of_one_environment_change_no_advantage(bundle, estimator, rule) -> None:
    groups = {0, 1, 2, 3}
    plain = credit_of(bundle, groups, estimator, rule, whiten=True)
    scaled = credit_of(bundle, groups, estimator, rule, whiten=True, scale=(1.0, 10.0))
    for key, expected in plain.items():
        torch.testing.assert_close(scaled[key], expected, rtol=1e-4, atol=1e-4)
    assert sum(float(one.abs().sum()) for one in plain.values()) > 1
