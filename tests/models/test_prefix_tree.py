"""Prefixes that several rows share are computed once, with the same scores and gradients."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.played_agents import build_agent, build_batch, take_gradient
from support.models.compared_logprobs import play, trajectory_of
from support.models.family_models import MODELS, tiny
from support.models.tiny_models import TEXT

from ragen_pl.data.batch import Samples, TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.models import attention, prefix_tree
from ragen_pl.models.attention import PACKED_ROWS
from ragen_pl.models.build import build_small_lm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.inputs import DecoderInputs, run_decoder
from ragen_pl.models.prefix_tree import SortedRows, tree_states
from ragen_pl.modules.policy import PolicyModule, TokenScores

# with layers that read more than the keys and values of all earlier tokens
WHOLE = {
    "qwen2_5", "qwen3_5", "phi3", "gemma3", "gemma4", "lfm2", "qwen3_5_vl", "gemma4_vl", "gemma4_vl_experts",
    "gemma3_vl", "lfm2_vl", "llava_next",
}  # fmt: skip
SHARED = [name for name in MODELS if name not in WHOLE]


@pytest.fixture
def any_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the shortest prefixes too."""
    monkeypatch.setattr(prefix_tree, "_WORTH_ON_CPU", 1)
    monkeypatch.setattr(prefix_tree, "_LEAST_FRACTION", 0.0)
    monkeypatch.setattr(prefix_tree, "_COPY", 0.0)


def batch_of(bundle: ModelBundle, *, single_image: bool = False) -> TrajectoryBatch:
    """Groups of two episodes that are alike, images included, up to their last response."""
    episodes = play(
        bundle, window=1 if single_image else "all", keep=True, single_image=single_image
    )
    trajectories = []
    for episode in episodes:
        said = episode[-1].generation
        other = replace(said, ids=said.ids[::-1].copy())
        member = [*episode[:-1], replace(episode[-1], generation=other)]
        trajectories += [trajectory_of(each, len(trajectories) // 2) for each in (episode, member)]
    return collate(trajectories, bundle)


class Update:
    """Scores and gradients of a policy, and the positions that its first layer computes."""

    def __init__(self, policy: PolicyModule, samples: Samples, images: list[torch.Tensor]) -> None:
        self.policy, self.samples, self.images = policy.train(), samples, images
        self.positions = 0
        policy.bundle.first_layer.register_forward_pre_hook(self._count)

    def _count(self, layer: object, arguments: tuple[torch.Tensor, ...]) -> None:
        self.positions += math.prod(arguments[0].shape[:2])

    def __call__(self) -> tuple[TokenScores, dict[str, torch.Tensor], int]:
        self.policy.zero_grad()
        self.positions = 0
        scores = self.policy(self.samples, self.images)
        positions = self.positions
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        weights = self.policy.named_parameters()
        gradients = {name: one.grad.clone() for name, one in weights if one.grad is not None}
        return scores, gradients, positions


def assert_alike(update: Update, *, least: float) -> None:
    """Compare with whole rows, of whose positions `least` are to be saved."""
    bundle = update.policy.bundle
    # the first pass tries the layers
    update()
    scores, gradients, computed = update()
    bundle.shares_prefix = False
    expected, expected_gradients, whole = update()
    assert computed < (1.0 - least) * whole if least else computed == whole
    torch.testing.assert_close(scores.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, expected.entropy, atol=1e-5, rtol=1e-5)
    assert_gradients_alike(gradients, expected_gradients)


def assert_gradients_alike(
    gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for weight, gradient in gradients.items():
        assert float((gradient - expected[weight]).abs().max()) < 1e-5 * largest, weight


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("name", SHARED)
def test_scores_and_gradients_of_families_are_those_of_whole_rows(
    name: str, checkpointed: bool, any_prefix: None
) -> None:
    bundle = tiny(name)
    batch = batch_of(bundle, single_image=MODELS[name].single_image)
    policy = PolicyModule(bundle, update=UpdateSettings(gradient_checkpointing=checkpointed))
    assert_alike(Update(policy, batch.samples, batch.images), least=0.3)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_rows_of_other_families_stay_whole(name: str) -> None:
    assert not prefix_tree.can_share(tiny(name))


@pytest.mark.parametrize("window", [1, "all"])
@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_scores_and_gradients_of_small_models_are_those_of_whole_rows(
    images: bool, window: int | str, any_prefix: None
) -> None:
    agent = build_agent(images=images)
    batch = build_batch(agent, window=window)
    assert_alike(Update(agent.policy, batch.samples, batch.images), least=0.05)


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_an_update_is_that_of_whole_rows(images: bool, any_prefix: None) -> None:
    """With losses, masks and a critic on the policy's states, in several microbatches of a minibatch."""
    results = []
    for shares in (True, False):
        agent = build_agent(images=images)
        agent.policy.bundle.shares_prefix = shares
        batch = build_batch(agent, members=4, window="all")
        loader = MinibatchLoader(batch, epochs=2, minibatches=2, length_buckets=3)
        minibatches = [loader.minibatch(number) for number in range(len(loader))]
        assert any(len(each.microbatches) > 1 for each in minibatches)
        losses = []
        for minibatch in minibatches:
            loss, gradients = take_gradient(agent, [minibatch])
            losses.append(loss)
            with torch.no_grad():
                for name, weight in agent.named_parameters():
                    weight -= 0.01 * gradients.get(name, 0.0)
        weights = {name: weight.detach() for name, weight in agent.named_parameters()}
        saved = agent.statistics.metrics(steps=4)["shared_positions"]
        results.append((losses, gradients, weights, saved))
    (losses, gradients, weights, saved), (expected, whole_gradients, whole_weights, none) = results
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_gradients_alike(gradients, whole_gradients)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, whole_weights[name], atol=1e-5, rtol=0.0)
    assert saved > 0.1
    assert none == 0.0


def test_sharing_can_be_switched_off(any_prefix: None) -> None:
    bundle = build_small_lm(text=TEXT)
    batch = batch_of(bundle)
    rows, time = batch.samples.input_ids.shape
    policy = PolicyModule(bundle, update=UpdateSettings(share_prefix=False))
    *_, computed = Update(policy, batch.samples, batch.images)()
    assert computed == rows * time


@pytest.mark.parametrize(
    ("rows", "shared", "is_shared"),
    [(9, 35, True), (9, 31, False), (2, 120, False), (40, 14, False), (40, 17, True)],
)
def test_a_short_prefix_is_not_worth_a_level(rows: int, shared: int, is_shared: bool) -> None:
    """It has to save 256 positions, and 15% of all."""
    time = 100 if shared < 100 else 150
    ids = torch.arange(rows * time).view(rows, time) % 251 + 20
    ids[:, :shared] = ids[0, :shared]
    sampled = torch.zeros(rows, time, dtype=torch.bool)
    sampled[:, -3:] = True
    samples = Samples.of_one_turn(
        ids, sampled, length=torch.full((rows,), time), image_index=ids.new_zeros(rows, 0)
    )
    bundle = build_small_lm(text=TEXT)
    update = Update(PolicyModule(bundle), samples, images=[])
    update()
    *_, computed = update()
    assert computed == (rows * time - (rows - 1) * shared if is_shared else rows * time)


def test_layers_that_mix_rows_compute_whole_rows(
    any_prefix: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mixing(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        if others.pop("levels", None) is not None:
            mask = None
        return attention.causal_attention(module, query, key, value, mask, **others)

    def deaf(*arguments: Any, **others: Any) -> Any:
        others.pop("levels", None)
        return attention.causal_attention(*arguments, **others)

    for changed in (mixing, deaf):
        bundle = tiny("llama3_2")
        attention.pack_rows(bundle.model.config)
        batch = batch_of(bundle)
        with monkeypatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS, PACKED_ROWS, changed)
            assert_alike(Update(PolicyModule(bundle), batch.samples, batch.images), least=0.0)
        assert bundle.keeps_parts_apart is False


# ---- any rows


@st.composite
def rows_and_cuts(draw: st.DrawFn) -> tuple[list[list[int]], set[int]]:
    """Rows over two ids, which often begin alike and may be equal or a prefix of another, and columns."""
    row = st.lists(st.integers(0, 1), min_size=1, max_size=7)
    rows = draw(st.lists(row, min_size=1, max_size=8))
    time = max(map(len, rows))
    return rows, draw(st.sets(st.integers(1, time), max_size=3))


def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows])
    ids = np.full((len(rows), lengths.max()), -1)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return ids, lengths


@settings(max_examples=150)
@given(rows_and_cuts())
def test_each_prefix_is_computed_once(case: tuple[list[list[int]], set[int]]) -> None:
    rows, columns = case
    ids, lengths = padded(rows)
    time = ids.shape[1]
    known = SortedRows.of(ids[..., None], lengths)
    every = list(range(time + 1))
    assert known.positions(every) == len(
        {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    )
    # with a level for nothing, no choice of cuts computes less than every cut
    assert known.positions(known.cuts(least=0)) == known.positions(every)
    cuts = known.cuts(least=2, forced=sorted(columns))
    assert columns <= set(cuts)
    assert cuts[0] == 0
    assert cuts[-1] == time
    tree = known.tree(cuts, first=0, device=torch.device("cpu"))
    assert known.positions(cuts) == len(tree.source) == sum(x.parts * x.width for x in tree.levels)
    ids_of_tree = ids.flatten()[tree.source.numpy()]
    for number, row in enumerate(rows):
        assert ids_of_tree[tree.place[number, : len(row)].numpy()].tolist() == row
        # the part that a part continues holds the row's tokens before
        offset, before = 0, None
        for level, (start, _) in zip(tree.levels, pairwise(cuts), strict=True):
            if start < len(row):
                part = (int(tree.place[number, start]) - offset) // level.width
                assert (None if level.continued is None else int(level.continued[part])) == before
                before = part
            offset += level.parts * level.width


@functools.cache
def llama() -> ModelBundle:
    bundle = tiny("llama3_2")
    attention.pack_rows(bundle.model.config)
    return bundle


@settings(max_examples=25)
@given(rows_and_cuts())
def test_states_of_any_tree_are_those_of_whole_rows(
    case: tuple[list[list[int]], set[int]],
) -> None:
    rows, columns = case
    ids, lengths = padded(rows)
    known = SortedRows.of(ids[..., None], lengths)
    cuts = sorted({0, ids.shape[1], *columns})
    tree = known.tree(cuts, first=0, device=torch.device("cpu"))
    inputs = DecoderInputs(ids=torch.from_numpy(ids + 20))
    inside = torch.from_numpy(ids >= 0)
    with torch.no_grad():
        expected = run_decoder(llama(), inputs)[inside]
        states = tree_states(llama(), inputs, tree)[tree.place[inside]]
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
