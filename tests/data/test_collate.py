"""From trajectories to tensors: layouts, masks, images, and the same credit in every layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.advantages.gae import MaskedGAE
from ragen_pl.algorithms.masks import all_but_action, sampled
from ragen_pl.data.batch import CreditLayout, TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.models.truncation import KeptIds
from ragen_pl.modules.credit import assign_credit, write_credit
from ragen_pl.modules.masking import Masks, compute_token_masks
from ragen_pl.trajectory import EpisodeStatus, ProgramCall

LENGTHS = [[3, 5, -4], [2], [4, -1, 3, 2]]


def test_training_sequence_is_prompts_and_responses(lm, make_trajectory):
    trajectory = make_trajectory(lm, [3, -4, 2])
    samples = collate([trajectory], lm).samples
    last = trajectory.turns[-1]
    expected = np.concatenate([last.prompt_ids, last.response_ids])
    assert len(samples) == 1 and samples.input_ids[0].tolist() == expected.tolist()
    for number, turn in enumerate(trajectory.turns):
        place = samples.turn[0] == number
        assert samples.input_ids[0, place].tolist() == turn.response_ids.tolist()
        first = int(place.nonzero()[0])
        assert samples.input_ids[0, :first].tolist() == turn.prompt_ids.tolist()
        assert samples.rollout_logprobs[0, place].tolist() == turn.response_logprobs.tolist()
        assert samples.spans[0, place].tolist() == turn.spans.tolist()
        assert (samples.temperature[0, place] == 0.5 + number).all()


def test_masks_are_exactly_the_sampled_tokens(lm, make_trajectory):
    trajectory = make_trajectory(lm, [3, -4, 2])
    samples = collate([trajectory, make_trajectory(lm, [2])], lm).samples
    assert samples.loss_mask.sum(1).tolist() == [9, 2]
    for mask in (samples.loss_mask, samples.advantage_mask, samples.kl_mask, samples.token >= 0):
        assert torch.equal(mask, samples.turn >= 0)
    off = ~samples.loss_mask
    assert (samples.spans[off] == 0).all() and (samples.rollout_logprobs[off] == 0).all()
    assert (samples.temperature[off] == 1).all() and (samples.token[off] == -1).all()
    ends = samples.input_ids == lm.end_of_turn_id
    # of the three end tokens of the first row the cut response's one is the template's, not sampled
    assert ends[0].sum() == 3 and (ends & samples.loss_mask)[0].sum() == 2
    padding = torch.arange(samples.input_ids.shape[1]) >= samples.length[:, None]
    assert (samples.input_ids[padding] == lm.pad_token_id).all()
    assert not samples.loss_mask[padding].any()


@pytest.mark.parametrize(
    ("window", "turns"),
    [("all", [[0, 1, 2, 3]]), (1, [[0], [1], [2], [3]]), (2, [[0, 1], [2], [3]])],
)
def test_changed_prefix_starts_a_new_sample(lm, make_trajectory, window, turns):
    samples = collate([make_trajectory(lm, [2, 3, 2, 3], window=window)], lm).samples
    assert [sorted(set(row[row >= 0].tolist())) for row in samples.turn] == turns
    assert samples.token[samples.token >= 0].tolist() == list(range(10))  # each once, in order


def test_changed_early_token_starts_a_new_sample(lm, make_trajectory):
    trajectory = make_trajectory(lm, [3, 3])
    changed = trajectory.turns[1].prompt_ids.copy()
    changed[len(trajectory.turns[0].prompt_ids)] += 1
    trajectory.turns[1].prompt_ids = changed
    assert len(collate([trajectory], lm).samples) == 2


def test_episodes_have_their_success_and_the_sums_of_their_reward_terms(lm, make_trajectory):
    played = [
        make_trajectory(lm, lengths, seed=seed) for seed, lengths in enumerate([[2, 2], [3], [1]])
    ]
    for trajectory in played:
        for turn in trajectory.turns:
            turn.actions = ["Left"]
    played[0].turns[0].reward_terms = {"environment": 0.25, "judge": 0.1}
    played[0].turns[1].reward_terms = {"environment": 0.5, "format": -0.05}
    played[0].turns[1].kind = ProgramCall(trained=False)
    played[0].turns[1].success = True
    played[0].success = True
    played[1].turns[0].reward_terms = {}
    played[2].turns[0].reward_terms = {"format": -1.0}
    played[2].turns[0].success = False
    batch = collate(played, lm)
    assert batch.episodes.success.tolist() == [1, -1, 0]
    # its last step, which may be the one that says it, was not taken
    played[1].status = EpisodeStatus.TRUNCATED
    assert collate(played, lm).episodes.success.tolist() == [1, -2, 0]
    # and no action has been carried out
    played[1].status, played[1].turns[0].actions = EpisodeStatus.TERMINATED, []
    assert collate(played, lm).episodes.success.tolist() == [1, -2, 0]
    assert batch.terms == ("environment", "format", "judge")
    assert batch.episodes.terms.tolist() == [[0.75, -0.05, 0.1], [0, 0, 0], [0, -1, 0]]


def test_failed_and_empty_trajectories_are_left_out(lm, make_trajectory):
    sound = make_trajectory(lm, [2, 2], group=7, rewards=[0.5, 1.0])
    failed = make_trajectory(lm, [2], status=EpisodeStatus.FAILED)
    empty = make_trajectory(lm, [], status=EpisodeStatus.TURN_LIMIT)
    batch = collate([failed, sound, empty], lm)
    assert batch.episodes.group.tolist() == [7] and batch.samples.episode.tolist() == [0]
    assert batch.episodes.turn_rewards.tolist() == [[0.5, 1.0]] and batch.final is None


def test_rank_without_usable_trajectories_has_an_empty_batch(lm, make_trajectory):
    batch = collate([make_trajectory(lm, [2], status=EpisodeStatus.FAILED)], lm)
    assert len(batch.samples) == 0 and len(batch.episodes.turns) == 0


def test_truncated_episodes_have_a_final_prompt(lm, make_trajectory):
    batch = collate(
        [
            make_trajectory(lm, [2], status=EpisodeStatus.TURN_LIMIT),
            make_trajectory(lm, [2, 3], seed=1, status=EpisodeStatus.TRUNCATED),
        ],
        lm,
    )
    assert batch.episodes.truncated.tolist() == [False, True]
    assert batch.final.episode.tolist() == [1] and not batch.final.loss_mask.any()
    final = batch.final.input_ids[0, : int(batch.final.length[0])]
    known = batch.samples.input_ids[1, : int(batch.samples.length[1])]
    assert torch.equal(final[: len(known)], known) and len(final) > len(known)


@pytest.mark.parametrize("window", ["all", 1, 2])
def test_images_are_stored_once_and_belong_to_their_turns(vlm, make_trajectory, window):
    trajectory = make_trajectory(
        vlm, [2, 2, 2], window=window, images=True, status=EpisodeStatus.TRUNCATED
    )
    plain = make_trajectory(vlm, [3], images=False)
    batch = collate([trajectory, plain], vlm)
    assert len(batch.images) == 4
    for samples in (batch.samples, batch.final):
        slots = (samples.input_ids == vlm.image_token_id).sum(1)
        assert (slots == 4 * (samples.image_index >= 0).sum(1)).all()
    shown = {tuple(turn.prompt_images[-1].flatten()[:20]) for turn in trajectory.turns}
    held = {tuple(image.flatten()[:20].tolist()) for image in batch.images}
    assert shown < held
    assert (batch.samples.image_index[-1] == -1).all()
    if window == "all":
        assert batch.samples.image_index[0].tolist() == [0, 1, 2]
        assert batch.final.image_index[0].tolist() == [0, 1, 2, 3]


# ---- the same credit in every layout


def estimate(batch, estimator, *, masks=None, whiten=False):
    """Assign credit to a batch in place."""
    layout = CreditLayout.of(batch)
    kept = compute_token_masks(batch, layout, masks or Masks(), kl=None)
    estimates = assign_credit(batch, layout, kept, estimator, whiten_advantages=whiten)
    write_credit(batch.samples, layout, kept, estimates)


def credited(bundle, make, window, *, estimator, masks, values, lengths=LENGTHS, whiten=False):
    trajectories = [
        make(
            bundle, length, seed=n, window=window, group=n,
            status=EpisodeStatus.TRUNCATED if n == 0 else EpisodeStatus.TERMINATED,
        )
        for n, length in enumerate(lengths)
    ]  # fmt: skip
    batch = collate(trajectories, bundle)
    samples = batch.samples
    on = samples.token >= 0
    samples.values[on] = values[samples.token[on]]
    batch.episodes.bootstrap[0] = 0.7
    estimate(batch, estimator, masks=masks, whiten=whiten)
    order = samples.token[on].argsort()
    return samples.advantages[on][order], samples.returns[on][order]


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("mask", [sampled, all_but_action])
@pytest.mark.parametrize(
    "estimator",
    [
        MaskedGAE(gamma=0.9, lam=0.8),
        BilevelGAE(gamma_turn=0.9, gamma_token=0.95, lam_turn=0.8, lam_token=0.7),
    ],
)
def test_credit_of_a_token_does_not_depend_on_the_layout(
    lm, make_trajectory, estimator, mask, whiten
):
    values = torch.randn(40, generator=torch.Generator().manual_seed(3))
    settings_ = {
        "estimator": estimator,
        "masks": Masks(advantage=mask),
        "values": values,
        "whiten": whiten,
    }
    whole = credited(lm, make_trajectory, "all", **settings_)
    assert whole[0].abs().min() > 0 or mask is not sampled
    for window in (1, 2, 3):
        other = credited(lm, make_trajectory, window, **settings_)
        torch.testing.assert_close(other, whole, atol=1e-6, rtol=1e-5)


@settings(max_examples=25, derandomize=True)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, 1000),
)
def test_credit_of_random_episodes_does_not_depend_on_the_window(
    lm, make_trajectory, lengths, window, seed
):
    count = sum(map(sum, lengths))
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    choice = {
        "estimator": BilevelGAE(gamma_turn=0.9, gamma_token=0.95, lam_turn=0.8, lam_token=0.7),
        "masks": Masks(), "values": values, "lengths": lengths,
    }  # fmt: skip
    whole, parts = (credited(lm, make_trajectory, w, **choice) for w in ("all", window))
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)


def test_hand_computed_credit_across_two_samples(lm, make_trajectory):
    """One token a turn, gamma and lambda 0.5: A_1 = 1 - 2 = -1, A_0 = 0 + 0.5*2 - 1 + 0.25*(-1)."""
    batch = collate([make_trajectory(lm, [1, 1], window=1, rewards=[0.0, 1.0])], lm)
    batch.samples.values[batch.samples.token == 0] = 1.0
    batch.samples.values[batch.samples.token == 1] = 2.0
    estimate(batch, MaskedGAE(gamma=0.5, lam=0.5))
    sampled_ = batch.samples.token >= 0
    assert batch.samples.advantages[sampled_].tolist() == [-0.25, -1.0]
    assert batch.samples.returns[sampled_].tolist() == [0.75, 1.0]
    assert (batch.samples.advantages[~sampled_] == 0).all()


def test_padding_rows_take_no_part_in_credit(lm, make_trajectory):
    batch = collate([make_trajectory(lm, [2, 3], window=1)], lm)
    double = batch.samples.select(torch.tensor([0, 1, 1]))
    double.weight[2] = 0
    batch.samples = double
    layout = CreditLayout.of(batch)
    assert layout.turn.tolist() == [[0, 0, 1, 1, 1]] and 2 not in layout.rows


# ---- rows and checkpoints


def test_select_shortens_rows_to_the_longest(lm, make_trajectory):
    samples = collate(
        [make_trajectory(lm, length, seed=1) for length in ([9, 9], [2], [3])], lm
    ).samples
    chosen = samples.select(torch.tensor([2, 1]))
    time = int(samples.length[[1, 2]].max())
    assert chosen.input_ids.shape == (2, time) and time < samples.input_ids.shape[1]
    assert torch.equal(chosen.input_ids, samples.input_ids[[2, 1], :time])
    assert chosen.episode.tolist() == [2, 1]
    assert chosen.loss_mask.sum() == samples.loss_mask[[1, 2]].sum()
    assert len(samples.select(torch.tensor([], dtype=torch.int64))) == 0


def test_states_after_the_last_turn_are_numbered_with_those_before_turns(lm, make_trajectory):
    first, second = make_trajectory(lm, [2, 3]), make_trajectory(lm, [2])
    for turn, key in zip([*first.turns, *second.turns], "aba", strict=True):
        turn.state_key = key
    first.final_state_key, second.final_state_key = "c", "b"
    episodes = collate([first, second], lm).episodes
    assert episodes.state.tolist() == [[0, 1], [0, -1]] and episodes.final_state.tolist() == [2, 1]


@pytest.mark.parametrize("status", [EpisodeStatus.TERMINATED, EpisodeStatus.TRUNCATED])
def test_batch_survives_a_checkpoint(vlm, make_trajectory, tmp_path, status):
    batch = collate([make_trajectory(vlm, [2, 3], images=True, status=status)], vlm)
    batch.reference = torch.randn(5)
    torch.save(batch.state_dict(), tmp_path / "batch.pt")
    back = TrajectoryBatch.from_state_dict(torch.load(tmp_path / "batch.pt", weights_only=True))
    first, second = batch.state_dict(), back.state_dict()
    assert str(first) == str(second) and (back.final is None) == (batch.final is None)
    assert torch.equal(back.samples.rollout_logprobs, batch.samples.rollout_logprobs)
    assert all(map(torch.equal, back.images, batch.images))


def test_a_checkpoint_of_an_earlier_version_has_one_column_of_log_probs(lm, make_trajectory):
    batch = collate([make_trajectory(lm, [2, 3])], lm)
    batch.samples.old_logprobs = batch.samples.old_logprobs - 1.0
    batch.kept_ids = KeptIds.all_of(5, device=torch.device("cpu"))
    (step,) = MinibatchLoader(batch, epochs=1, minibatches=1)
    for whole in (batch, step):
        state = whole.state_dict()
        columns = state["samples"]
        del columns["rollout_logprobs"]
        columns["behavior_logprobs"] = columns.pop("old_logprobs")
        state["kept"] = state.pop("kept_ids")
        earlier = type(whole).from_state_dict(state)
        assert torch.equal(earlier.samples.old_logprobs, whole.samples.old_logprobs)
        assert torch.equal(earlier.samples.rollout_logprobs, whole.samples.old_logprobs)
        assert len(earlier.kept_ids) == 5
