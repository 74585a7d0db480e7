"""Episodes of several samples: how calls are joined, and the credit of their tokens."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.call_trees import after, call, episode

from ragen_pl.algorithms.advantages.adaptive import AdaptiveBilevelGAE
from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.advantages.gigpo import GroupInGroup
from ragen_pl.algorithms.advantages.group import GroupRelative, LeaveOneOut
from ragen_pl.algorithms.advantages.turn import TurnGAE
from ragen_pl.algorithms.advantages.turn_baseline import TurnLeaveOneOut
from ragen_pl.algorithms.credit import Estimator
from ragen_pl.algorithms.normalization import ByGroup, RewardNormalizer
from ragen_pl.checkpoints import known_pickle
from ragen_pl.checkpoints.known_pickle import packed, unpacked
from ragen_pl.data.batch import CreditLayout, TrajectoryBatch
from ragen_pl.data.collate import collate, usable
from ragen_pl.data.demonstrations import set_discounted_returns
from ragen_pl.modules.credit import assign_credit, write_credit
from ragen_pl.modules.masking import Masks, compute_token_masks
from ragen_pl.trajectory import Action, Observation, ProgramCall, Summary, Trajectory, Turn


def by_token(batch: TrajectoryBatch, name: str) -> torch.Tensor:
    """A field of the samples at the sampled tokens, in their order."""
    on = batch.samples.turn >= 0
    return getattr(batch.samples, name)[on][batch.samples.token[on].argsort()]


def credit(
    batch: TrajectoryBatch,
    estimator: Estimator,
    values: torch.Tensor | None = None,
    normalizer: RewardNormalizer | None = None,
) -> torch.Tensor:
    """Assign credit to a batch and return the advantages of its sampled tokens."""
    samples = batch.samples
    on = samples.token >= 0
    if values is not None:
        samples.values[on] = values[samples.token[on]]
    layout = CreditLayout.of(batch)
    kept = compute_token_masks(batch, layout, Masks(), kl=None)
    estimates = assign_credit(
        batch,
        layout,
        kept,
        estimator,
        whiten_advantages=False,
        normalizers=[normalizer] if normalizer else [],
    )
    write_credit(samples, layout, kept, estimates)
    return by_token(batch, "advantages")


# ---- worked examples


@pytest.mark.parametrize("breaks", [(), (2,), (1,), (1, 2)])
def test_advantages_do_not_depend_on_the_number_of_samples(lm, breaks) -> None:
    """By hand: turns [0, 0, 1, 2, 2] with r = [0, 0, .5, 0, 1]."""
    turns = [call([20], [30, 31])]
    for number, (response, reward) in enumerate([([32], 0.5), ([33, 34], 1.0)], start=1):
        prompt = [50 + number] if number in breaks else after(turns[-1], 40)
        turns.append(call(prompt, response, reward=reward))
    batch = collate([episode(*turns)], lm)
    assert len(batch.samples) == 1 + len(breaks)
    half, values = {"gamma_turn": 0.5, "lam_turn": 0.5}, torch.tensor([0.2, 0.4, 0.6, 0.8, 0.5])
    found = credit(batch, BilevelGAE(**half), values)
    assert found.tolist() == pytest.approx([0.1875, -0.0125, 0.35, 0.2, 0.5], abs=1e-6)
    found = credit(batch, BilevelGAE(**half, published=True), values)
    assert found.tolist() == pytest.approx([0.16875, -0.03125, 0.275, 0.2, 0.5], abs=1e-6)


def compacted(*, advances: bool = True, summary: bool = True) -> Trajectory:
    """Turns of one token; the second one is a summary, from which the others go on."""
    first = call([20], [30])
    turns = [first]
    if summary:
        turns.append(call(after(first, 40), [31], is_task_step=advances))
    turns.append(call([20, 41], [32]))
    turns.append(call(after(turns[-1], 42), [33], reward=1.0))
    return episode(*turns)


def test_a_summary_changes_no_discount_between_the_other_turns(lm) -> None:
    estimator, none = BilevelGAE(gamma_turn=0.5, lam_turn=1.0), torch.zeros(4)

    def found(played, estimator=estimator, values=none):
        return credit(collate([played], lm), estimator, values).tolist()

    assert found(compacted(advances=False)) == [0.25, 0.5, 0.5, 1.0]
    assert found(compacted(summary=False)) == [0.25, 0.5, 1.0]
    assert found(compacted()) == [0.125, 0.25, 0.5, 1.0]
    shorter = BilevelGAE(gamma_turn=0.5, lam_turn=0.5)
    of_critic = found(compacted(advances=False), shorter, torch.tensor([0.2, 0.3, 0.4, 0.5]))
    assert of_critic == pytest.approx([-0.03125, 0.075, -0.025, 0.5], abs=1e-6)
    assert found(compacted(advances=False), TurnGAE(gamma=0.5)) == [0.25, 0.5, 0.5, 1.0]
    by_turn = TurnGAE(gamma=1.0, lam=0.5)
    assert found(compacted(advances=False), by_turn) == [0.25, 0.5, 0.5, 1.0]


def test_a_summary_changes_no_progress_of_the_other_turns(lm) -> None:
    estimator = AdaptiveBilevelGAE(gamma_turn=0.5, beta=0.5, low=0.1)
    with_summary = collate([compacted(advances=False)], lm)
    found = credit(with_summary, estimator, torch.tensor([0.1, 0.5, 0.5, 0.8]))
    plain = collate([compacted(summary=False)], lm)
    expected = credit(plain, estimator, torch.tensor([0.1, 0.5, 0.8]))
    torch.testing.assert_close(found[[0, 2, 3]], expected)


@pytest.mark.parametrize("estimator", [TurnLeaveOneOut(gamma=0.5), GroupInGroup(gamma=0.5)])
def test_a_summary_is_no_step_of_returns_to_go(lm, estimator) -> None:
    def found(**kind) -> float:
        played = [replace(compacted(**kind), member=0), episode(call([20], [30]), member=1)]
        for trajectory in played:
            trajectory.turns[0].state_key = "start"
        return float(credit(collate(played, lm), estimator)[0])

    assert found(advances=False) == found(summary=False) != found()


def forked() -> list[Trajectory]:
    """A main agent with a sub-agent whose calls lie between its two, and an episode of one call."""
    main = call([20, 21], [30, 31])
    helper = call([22], [32])
    again = call(after(helper, 40), [33])
    last = call(after(main, 41, 42), [34, 35], reward=1.0)
    other = episode(call([20, 21], [36, 37, 38]), member=1)
    return [episode(main, helper, again, last), other]


def test_a_fork_is_two_samples_and_trains_each_token_once(lm) -> None:
    samples = collate(forked(), lm).samples
    rows = [sorted(set(row[row >= 0].tolist())) for row in samples.turn]
    assert rows == [[0, 3], [1, 2], [0]] and samples.episode.tolist() == [0, 0, 1]
    assert samples.loss_mask.sum(1).tolist() == [4, 2, 3]
    assert samples.token[0][samples.token[0] >= 0].tolist() == [0, 1, 4, 5]
    assert samples.token[1][samples.token[1] >= 0].tolist() == [2, 3]


def test_a_second_turn_from_the_same_point_starts_a_new_sample(lm) -> None:
    main = call([20], [30])
    branches = [call(after(main, 40), [31]), call(after(main, 40), [32])]
    longest = call(after(branches[1], 41), [33])
    samples = collate([episode(main, *branches, longest)], lm).samples
    assert [sorted(set(row[row >= 0].tolist())) for row in samples.turn] == [[0, 1], [2, 3]]
    # the first response is context of the second sample
    assert samples.input_ids[1, 1] == 30 and samples.turn[1, 1] == -1


def test_a_turn_continues_the_longest_sample(lm) -> None:
    longer = call([20, 30, 40], [31])
    shorter = call([20], [30])
    samples = collate([episode(longer, shorter, call(after(longer, 41), [32]))], lm).samples
    assert [sorted(set(row[row >= 0].tolist())) for row in samples.turn] == [[0, 2], [1]]


def test_group_estimators_count_one_return_an_episode(lm) -> None:
    played = forked()
    for estimator, expected in (
        (GroupRelative(scale_by_std=False), 0.5),
        (GroupRelative(), 0.5**0.5),
        (LeaveOneOut(), 1.0),
    ):
        found = credit(collate(played, lm), estimator)
        signs = [1.0] * 6 + [-1.0] * 3
        assert found.tolist() == pytest.approx([expected * sign for sign in signs], abs=1e-5)
    normalizer = RewardNormalizer(by=ByGroup(scale_by_std=False))
    centered = credit(collate(played, lm), TurnLeaveOneOut(), normalizer=normalizer)
    assert float(centered[0]) == pytest.approx(1.0)
    played[0].turns[2].reward_terms = {"environment": 0.4}
    to_go = credit(collate(played[:1], lm), BilevelGAE(gamma_turn=1.0), torch.zeros(6))
    assert to_go.tolist() == pytest.approx([1.4] * 4 + [1.0] * 2)


# ---- untrained turns


def judged() -> Trajectory:
    judge = {"trained": False}
    plan = call([20], [30], reward=0.25, **judge)
    first = call(after(plan, 40), [31, 32], reward=0.5)
    verdict = call(after(first, 41), [33], reward=2.0, **judge)
    last = call(after(verdict, 42), [34])
    return episode(plan, first, verdict, last, call([25], [], reward=4.0, **judge))


def test_untrained_turns_are_context_and_their_rewards_move(lm) -> None:
    batch = collate([judged()], lm)
    samples, episodes = batch.samples, batch.episodes
    assert samples.input_ids.tolist() == [[20, 30, 40, 31, 32, 41, 33, 42, 34]]
    assert samples.turn.tolist() == [[-1, -1, -1, 0, 0, -1, -1, -1, 1]]
    assert torch.equal(samples.loss_mask, samples.turn >= 0)
    assert torch.equal(samples.advantage_mask, samples.turn >= 0)
    assert episodes.turn_rewards.tolist() == [[2.75, 4.0]] and episodes.turns.tolist() == [2]
    found = credit(batch, BilevelGAE(gamma_turn=0.5), torch.zeros(3))
    assert found.tolist() == [4.75, 4.75, 4.0]


def test_an_episode_without_a_trained_turn_is_left_out(lm) -> None:
    untrained = episode(call([20], [30], reward=1.0, trained=False))
    assert not usable(untrained) and usable(judged())
    assert collate([untrained, judged()], lm).episodes.turns.tolist() == [2]


def test_text_that_was_shown_is_not_trained_on_with_untrained_turns(lm) -> None:
    with pytest.raises(ValueError, match="response that is not trained on"):
        collate([judged()], lm, observations=True)


# ---- what earlier versions wrote


@pytest.mark.parametrize(
    ("former", "kind"),
    [
        ({}, Action()),
        ({"advances": True, "trained": True, "call_id": None, "history": None}, Action()),
        ({"advances": False, "trained": True, "call_id": None, "history": None}, Summary()),
        (
            {"advances": False, "trained": False, "call_id": "a", "history": "joined"},
            ProgramCall(call_id="a", history="joined", is_task_step=False, trained=False),
        ),
    ],
)
def test_turns_of_an_earlier_version_have_a_kind(monkeypatch, former, kind) -> None:
    turn = call([20], [30], reward=1.0, is_task_step=False)
    kinds = (Turn, Observation, Action, ProgramCall, Summary)
    assert unpacked(packed(turn), kinds).kind == ProgramCall(is_task_step=False)
    turn.info = {"success": True} if former else {}
    names = {field.name for field in fields(turn)} - {"kind", "success"}
    state = {name: getattr(turn, name) for name in names} | former
    monkeypatch.setattr(Turn, "__getstate__", lambda turn: (None, state))
    data = packed(turn)
    monkeypatch.undo()
    earlier = unpacked(data, kinds)
    assert earlier.kind == kind and earlier.reward == 1.0
    assert earlier.success is (True if former else None)


def test_arrays_of_an_earlier_version_are_read(monkeypatch) -> None:
    """Their function was in another module."""
    monkeypatch.setattr(known_pickle._array, "__module__", "ragen_pl.known_pickle")
    data = packed(np.arange(3))
    monkeypatch.undo()
    assert b"ragen_pl.known_pickle" in data
    assert unpacked(data, ()).tolist() == [0, 1, 2]


def test_every_turn_of_a_batch_of_an_earlier_version_advances(lm) -> None:
    state = collate([compacted(advances=False)], lm).state_dict()
    assert not TrajectoryBatch.from_state_dict(state).episodes.advances.all()
    del state["episodes"]["advances"]
    for name in ("success", "terms"):
        del state["episodes"][name]
    del state["terms"]
    earlier = TrajectoryBatch.from_state_dict(state)
    assert earlier.episodes.advances.tolist() == [[True] * 4]
    assert earlier.episodes.success.tolist() == [-1] and earlier.episodes.terms.shape == (1, 0)
    assert earlier.terms == ()


# ---- random episodes


@st.composite
def trees(draw) -> list[Trajectory]:
    """Episodes whose calls continue any earlier one, rewrite its history, or begin anew; few different ids."""
    ids = st.lists(st.integers(20, 22), min_size=1, max_size=3)
    played = []
    for number in range(draw(st.integers(1, 3))):
        turns = []
        for _ in range(draw(st.integers(1, 6))):
            kind = draw(st.sampled_from(["continue", "rewrite", "fresh"] if turns else ["fresh"]))
            prompt = draw(ids)
            if kind != "fresh":
                prompt = after(draw(st.sampled_from(turns)), *prompt)
            if kind == "rewrite":
                del prompt[draw(st.integers(0, len(prompt) - 2))]
            facts = {"is_task_step": draw(st.booleans()), "trained": draw(st.integers(0, 3)) > 0}
            reward = draw(st.integers(-2, 2)) / 4
            turns.append(call(prompt, draw(ids), reward=reward, **facts))
        played.append(episode(*turns, group=0, member=number))
    return played


def chain(trajectory: Trajectory, values: list[float], estimator: BilevelGAE) -> list[float]:
    """Advantages by the definition, from the last token to the first."""
    turns = [turn for turn in trajectory.turns if turn.trained]
    rewards, seen = [0.0] * len(turns), -1
    for turn in trajectory.turns:
        seen += turn.trained
        rewards[max(seen, 0)] += turn.reward
    ends = torch.tensor([len(turn.response_ids) for turn in turns]).cumsum(0).tolist()
    result, following, ahead = [0.0] * ends[-1], 0.0, 0.0
    for number in reversed(range(len(turns))):
        step = turns[number].is_task_step
        gamma, lam = (estimator.gamma_turn, estimator.lam_turn) if step else (1.0, 1.0)
        last, first = ends[number] - 1, ends[number] - len(turns[number].response_ids)
        value = values[last if estimator.published else first]
        ahead = rewards[number] + gamma * following - value + gamma * lam * ahead
        following, result[last] = value, ahead + value - values[last]
        for place in reversed(range(first, last)):
            delta = estimator.gamma_token * values[place + 1] - values[place]
            trace = estimator.gamma_token * estimator.lam_token
            result[place] = delta + trace * result[place + 1]
    return result


@given(played=trees(), data=st.data())
@settings(max_examples=60)
def test_random_episodes(lm, played, data) -> None:
    kept = [trajectory for trajectory in played if usable(trajectory)]
    batch = collate(played, lm)
    samples = batch.samples
    responses = [
        (number, index, turn)
        for number, trajectory in enumerate(kept)
        for index, turn in enumerate(turn for turn in trajectory.turns if turn.trained)
    ]
    # each response once, after its own prompt, and numbered in order
    count = sum(len(turn.response_ids) for *_, turn in responses)
    assert int(samples.loss_mask.sum()) == int(samples.advantage_mask.sum()) == count
    assert sorted(samples.token[samples.token >= 0].tolist()) == list(range(count))
    first = 0
    for number, index, turn in responses:
        place = (samples.episode[:, None] == number) & (samples.turn == index)
        (row,) = set(place.nonzero()[:, 0].tolist())
        start, length = int(place[row].nonzero()[0]), len(turn.response_ids)
        assert samples.input_ids[row, : start + length].tolist() == after(turn)
        assert samples.token[row, place[row]].tolist() == list(range(first, first + length))
        first += length
    # no reward is lost
    returns = [trajectory.reward for trajectory in kept]
    assert batch.episodes.turn_rewards.sum(1).tolist() == returns
    # credit by the definition
    published = data.draw(st.booleans())
    four = {"gamma_turn": 0.7, "lam_turn": 0.6, "gamma_token": 0.9, "lam_token": 0.8}
    estimator = BilevelGAE(**four, published=published)
    values = torch.sin(torch.arange(count).float())
    found, left = credit(batch, estimator, values), values.tolist()
    for trajectory in kept:
        own = sum(len(turn.response_ids) for turn in trajectory.turns if turn.trained)
        assert found[:own].tolist() == pytest.approx(
            chain(trajectory, left[:own], estimator), abs=1e-5
        )
        # another rank may hold the episode alone
        alone = credit(collate([trajectory], lm), estimator, torch.tensor(left[:own]))
        torch.testing.assert_close(alone, found[:own])
        found, left = found[own:], left[own:]
    # the order of the rows changes nothing
    order = torch.tensor(data.draw(st.permutations(range(len(samples)))), dtype=torch.int64)
    for other in (estimator, GroupRelative(), TurnGAE(gamma=0.7, lam=0.6)):
        expected = credit(batch, other, values)
        shuffled = replace(batch, samples=samples.select(order))
        assert torch.equal(credit(shuffled, other, values), expected)


def test_returns_of_demonstrations_do_not_discount_summaries(lm):
    first = call([1], [2])
    summary = call(after(first, 3), [4], is_task_step=False)
    last = call(after(summary, 5), [6], reward=1.0)
    batch = collate([episode(first, summary, last)], lm)
    set_discounted_returns(batch, gamma=0.5)
    assert by_token(batch, "returns").tolist() == [0.5, 1.0, 1.0]
