"""The update's loader: every sample once a pass, resumable anywhere, denominators over the whole step."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.reference_cases import reference_cases

from ragen_pl.algorithms.aggregation import Aggregation, aggregate
from ragen_pl.data import validation
from ragen_pl.data.batch import Samples, TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.validation import ValidationLoader

CASES = reference_cases("episode_samples")
AVERAGES = {
    "token_mean": Aggregation.TOKEN_MEAN,
    "episode_mean": Aggregation.EPISODE_MEAN,
    "sample_mean": Aggregation.SEQ_MEAN_TOKEN_MEAN,
}


@pytest.fixture(scope="module")
def batch(lm, make_trajectory):
    """Seven samples of 2, 3, … 8 sampled tokens."""
    made = collate([make_trajectory(lm, [n + 2], seed=n) for n in range(7)], lm)
    made.reference = torch.arange(int(made.samples.loss_mask.sum())).float()
    return made


def loader_of(batch, **changes) -> MinibatchLoader:
    return MinibatchLoader(
        batch, **({"epochs": 2, "minibatches": 3, "seed_key": (1, "shuffle")} | changes)
    )


def episodes(minibatch) -> list[int]:
    return minibatch.samples.episode[minibatch.samples.weight > 0].tolist()


@settings(max_examples=40, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4))
def test_every_sample_is_yielded_once_an_epoch(batch, epochs, minibatches, accumulate):
    loader = loader_of(batch, epochs=epochs, minibatches=minibatches, accumulate=accumulate)
    steps = list(loader)
    assert len(steps) == len(loader) == epochs * minibatches * accumulate
    size = minibatches * accumulate
    orders = [
        [n for step in steps[e * size : (e + 1) * size] for n in episodes(step)]
        for e in range(epochs)
    ]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert all(len(step.samples) > 0 for step in steps)


@settings(max_examples=40, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 2), st.integers(4, 40), st.integers(0, 3))
def test_microbatches_keep_the_token_budget(batch, minibatches, accumulate, tokens, more):
    """`more`: microbatches that another rank needs in addition."""
    whole = loader_of(batch, minibatches=minibatches, accumulate=accumulate)
    loader = loader_of(
        batch,
        minibatches=minibatches,
        accumulate=accumulate,
        tokens_per_microbatch=tokens,
        max_over_ranks=lambda count: count + more,
    )
    steps, size = list(loader), loader.accumulate
    assert size % accumulate == 0 and size >= accumulate * (1 + more)
    assert len(steps) == len(loader) == 2 * minibatches * size
    assert [step.ends_step for step in steps] == ([False] * (size - 1) + [True]) * 2 * minibatches
    for step in steps:
        (rows,) = step.microbatches
        assert len(rows) == len(step.samples) == 1 or step.samples.input_ids.numel() <= tokens
        assert step.scale == size
    # the same samples in each optimizer step, and the same counts
    for number, first in enumerate(range(0, len(steps), size)):
        parts = steps[first : first + size]
        together = [n for step in parts for n in episodes(step)]
        own = [*whole][number * accumulate : (number + 1) * accumulate]
        assert sorted(together) == sorted(n for step in own for n in episodes(step))
        assert {float(step.loss_tokens) for step in parts} == {float(own[0].loss_tokens)}


def test_every_rank_has_the_same_number_of_microbatches(batch):
    """By length, the ranks' minibatches have their own numbers; padding rows make up for the difference."""
    plain = list(loader_of(batch, epochs=1, length_buckets=3))
    assert {len(step.microbatches) for step in plain} > {2}
    others = list(loader_of(batch, epochs=1, length_buckets=3, max_over_ranks=lambda n: n * 0 + 5))
    for step, padded in zip(plain, others, strict=True):
        assert len(padded.microbatches) == 5
        assert episodes(step) == episodes(padded)
        own = [rows.tolist() for rows in step.microbatches]
        assert [rows.tolist() for rows in padded.microbatches][: len(own)] == own
        added = padded.samples.weight == 0
        assert int(added.sum()) == 5 - len(own) and not padded.samples.kl_mask[added].any()
        assert not padded.samples.loss_weight[added].any()
        places = torch.cat(padded.microbatches).sort().values
        assert places.tolist() == list(range(len(padded.samples)))


def test_order_depends_on_the_seed_key_and_the_epoch(batch):
    def order(**changes):
        return [episodes(step) for step in loader_of(batch, **changes)]

    assert order() == order() != order(seed_key=(2, "shuffle"))
    assert order()[:3] != order()[3:]


@pytest.mark.parametrize("position", range(7))
def test_resuming_continues_after_the_last_minibatch(batch, position):
    first = loader_of(batch)
    whole = [episodes(step) for step in loader_of(batch)]
    given_out = iter(first)
    for _ in range(position):
        next(given_out)
    resumed = loader_of(batch)
    resumed.load_state_dict(first.state_dict())
    assert [episodes(step) for step in resumed] == whole[position:]
    assert [episodes(step) for step in resumed] == whole  # the next pass is a whole one


def test_loader_can_be_read_again_after_all_minibatches(batch):
    """Lightning never asks a sized loader for the batch after its last."""
    loader = MinibatchLoader(batch, epochs=1, minibatches=3)
    counts = []
    for _ in range(3):
        steps = iter(loader)
        counts.append(len([next(steps) for _ in range(len(loader))]))
    assert counts == [3, 3, 3]
    loader.load_state_dict(loader.state_dict())  # of an epoch that is over
    assert len(list(loader)) == 0 and len(list(loader)) == 3


def test_padding_rows_have_weight_zero(batch):
    steps = list(loader_of(batch, epochs=1, minibatches=9))
    padding = [step for step in steps if not episodes(step)]
    assert len(steps) == 9 and len(padding) == 2
    for step in padding:
        assert len(step.samples) == 1 and step.samples.weight.tolist() == [0.0]
        assert not step.samples.loss_mask.any() and not step.samples.kl_mask.any()
        assert (step.loss_tokens, step.sequences) == (1, 1)  # never a division by 0
    assert batch.samples.weight.tolist() == [1.0] * 7  # the batch itself is untouched
    assert batch.samples.loss_mask.sum() == 35


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_counts_cover_the_whole_optimizer_step(batch, accumulate):
    steps = list(loader_of(batch, epochs=1, minibatches=2, accumulate=accumulate, world_size=3))
    totals = []
    for first in range(0, len(steps), accumulate):
        group = steps[first : first + accumulate]
        tokens = sum(int(step.samples.loss_mask.sum()) for step in group)
        assert all(step.loss_tokens == tokens for step in group)
        assert all(step.sequences == sum(len(episodes(s)) for s in group) for step in group)
        assert all(step.scale == 3 * accumulate for step in group)
        totals.append(tokens)
    assert sum(totals) == 35


@pytest.mark.parametrize("weight", [3.0, 0.01])
def test_means_do_not_depend_on_the_scale_of_the_weights(batch, weight):
    samples = copy.copy(batch.samples)
    samples.loss_weight = weight * samples.loss_weight
    for minibatch in loader_of(replace(batch, samples=samples), epochs=1, minibatches=4):
        own, sums = minibatch.samples, {"sequences": minibatch.sequences}
        means = [
            aggregate(
                own.rollout_logprobs, weights, how=AVERAGES["token_mean"], tokens=count, **sums
            )
            for weights, count in (
                (own.loss_weight, minibatch.loss_tokens),
                (own.loss_mask, own.loss_mask.sum()),
            )
        ]
        assert float(means[0]) == pytest.approx(float(means[1]), rel=1e-5)


def test_counts_cover_all_ranks(batch):
    seen = []

    def sum_over_ranks(
        counts,
    ):  # another rank with 100 tokens, 80 valued, 60 held, 40 of text, 10 samples of 5 episodes a step
        seen.append(counts)
        return counts + torch.tensor([100.0, 80.0, 60.0, 40.0, 10.0, 5.0])

    steps = list(loader_of(batch, epochs=1, minibatches=2, sum_over_ranks=sum_over_ranks))
    assert sum(float(step.loss_tokens) for step in steps) == 235
    assert sum(float(step.value_tokens) for step in steps) == 195
    assert sum(float(step.kl_tokens) for step in steps) == 155
    assert sum(float(step.text_tokens) for step in steps) == 80
    assert sum(float(step.sequences) for step in steps) == 27
    assert sum(float(step.episodes) for step in steps) == 17
    assert len(seen) == 1


def test_padding_rows_are_not_counted(lm, make_trajectory):
    made = collate([make_trajectory(lm, [3]), make_trajectory(lm, [4], seed=1)], lm)
    made.samples.weight[1] = 0
    (step,) = loader_of(made, epochs=1, minibatches=1)
    assert (step.loss_tokens, step.sequences) == (3, 1)


@pytest.mark.parametrize("minibatches, accumulate", [(1, 1), (3, 1), (2, 3), (9, 1)])
def test_sum_of_token_losses_does_not_depend_on_the_split(batch, minibatches, accumulate):
    """Loss of a token: its log-prob. Trainer's mean over accumulated steps undoes the scale."""
    loader = loader_of(batch, epochs=1, minibatches=minibatches, accumulate=accumulate)
    weighed = 0.0
    for step in loader:
        loss = (step.samples.rollout_logprobs * step.samples.loss_mask).sum()
        share = float(loss * step.scale / step.loss_tokens) / accumulate
        weighed += share * float(step.loss_tokens)
    expected = float((batch.samples.rollout_logprobs * batch.samples.loss_mask).sum())
    assert weighed == pytest.approx(expected, rel=1e-5)


def test_reference_and_images_follow_their_rows(vlm, make_trajectory):
    made = collate(
        [make_trajectory(vlm, [n + 1, 2], seed=n, window=1, images=n != 1) for n in range(4)], vlm
    )
    tokens = int((made.samples.token >= 0).sum())
    made.reference = torch.arange(tokens).float()
    for step in loader_of(made, epochs=1, minibatches=3):
        samples = step.samples
        assert step.reference.tolist() == samples.token[samples.token >= 0].tolist()
        for row in range(len(samples)):
            whole = int(
                ((made.samples.token == samples.token[row].max()).any(1)).nonzero().squeeze()
            )
            there, here = made.samples.image_index[whole], samples.image_index[row]
            assert torch.equal(there < 0, here < 0)
            shown = [step.images[number] for number in here[here >= 0]]
            expected = [made.images[number] for number in there[there >= 0]]
            assert len(shown) == len(expected) and all(map(torch.equal, shown, expected))
        assert len(step.images) == int((samples.image_index >= 0).sum())


def test_validation_loader_gives_each_episode_once_in_chunks():
    class Proxy:
        num_envs = 4

    class FiveValidation:
        proxy, episode_specs = Proxy(), list(range(10))

    loader = ValidationLoader(FiveValidation())
    assert [chunk.episode_specs for chunk in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3


@pytest.mark.parametrize(
    ("episodes", "expected"),
    [
        (9, ([[0, 2, 4, 6], [8]], [[1, 3, 5, 7], []])),
        (1, ([[0]], [[]])),
        (8, ([[0, 2, 4, 6]], [[1, 3, 5, 7]])),
    ],
)
def test_ranks_have_as_many_chunks_as_each_other(monkeypatch, episodes, expected):
    """Those that share an engine play together."""
    validation_set = SimpleNamespace(
        proxy=SimpleNamespace(num_envs=4), episode_specs=list(range(episodes))
    )
    monkeypatch.setattr(validation, "world_size", lambda: 2)
    for rank, chunks in enumerate(expected):
        monkeypatch.setattr(validation, "rank", lambda rank=rank: rank)
        loader = ValidationLoader(validation_set)
        assert [chunk.episode_specs for chunk in loader] == chunks


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_means_of_the_reference(case, parts):
    """`episodes`: turns with the `sample` that they are in and their token `losses`; means over an optimizer step."""
    rows, episode = [], []
    for number, turns in enumerate(case["inputs"]["episodes"]):
        for sample in sorted({turn["sample"] for turn in turns}):
            rows.append([x for turn in turns if turn["sample"] == sample for x in turn["losses"]])
            episode.append(number)
    lengths = torch.tensor([len(row) for row in rows])
    on = torch.arange(int(lengths.max())) < lengths[:, None]
    samples = Samples.of_one_turn(
        on.long(), on, length=lengths, image_index=torch.zeros(len(rows), 0, dtype=torch.int64)
    )
    samples.episode = torch.tensor(episode)
    # the losses are carried as values
    samples.values = torch.zeros(on.shape).masked_scatter(
        on, torch.tensor([x for row in rows for x in row])
    )
    batch = TrajectoryBatch(samples=samples, episodes=None, images=[])
    means = dict.fromkeys(AVERAGES, 0.0)
    for minibatch in MinibatchLoader(batch, epochs=1, minibatches=1, accumulate=parts):
        for name, how in AVERAGES.items():
            means[name] += float(
                aggregate(
                    minibatch.samples.values,
                    minibatch.samples.loss_weight * minibatch.non_padding,
                    how=how,
                    tokens=minibatch.loss_tokens,
                    sequences=minibatch.sequences,
                    episodes=minibatch.episodes,
                    episode_tokens=minibatch.episode_tokens,
                )
            )
    for name, mean in means.items():
        assert mean == pytest.approx(case["outputs"][name], rel=1e-5, abs=1e-5), name
