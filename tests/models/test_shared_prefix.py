"""The prefix that all rows begin with is computed once, with the same scores and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from family_models import MODELS, tiny
from played_agents import build_agent, build_batch
from three_ways import play, trajectory_of
from tiny_models import TEXT

from ragen_pl.data.batch import Samples, TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.models import shared_prefix
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.policy import PolicyModule, TokenScores

# with layers that read more than the keys and values of all earlier tokens
WHOLE = {
    "qwen2_5", "qwen3_5", "phi3", "gemma3", "gemma4", "lfm2", "qwen3_5_vl", "gemma4_vl", "gemma4_vl_experts",
    "gemma3_vl", "lfm2_vl", "llava_next",
}  # fmt: skip


@pytest.fixture
def any_prefix(monkeypatch) -> None:
    """Share the shortest prefixes too."""
    monkeypatch.setattr(shared_prefix, "_SAVED_ON_CPU", 1)
    monkeypatch.setattr(shared_prefix, "_LEAST_FRACTION", 0.0)


def batch_of(bundle, *, single_image: bool = False) -> TrajectoryBatch:
    episodes = play(bundle, window=1, keep=True, single_image=single_image)
    return collate([trajectory_of(episode, n) for n, episode in enumerate(episodes)], bundle)


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
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        weights = self.policy.named_parameters()
        gradients = {name: one.grad.clone() for name, one in weights if one.grad is not None}
        return scores, gradients, self.positions


def assert_alike(update: Update, *, shared: bool) -> None:
    """Compare with whole rows; `shared` says whether fewer positions are computed."""
    bundle = update.policy.bundle
    scores, gradients, computed = update()
    bundle.shares_prefix = False
    expected, expected_gradients, whole = update()
    assert computed < whole if shared else computed == whole
    torch.testing.assert_close(scores.logprobs, expected.logprobs, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, expected.entropy, atol=3e-5, rtol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for weight, gradient in gradients.items():
        difference = float((gradient - expected_gradients[weight]).abs().max())
        assert difference < 1e-5 * largest, weight


@pytest.mark.parametrize("name", MODELS)
def test_scores_and_gradients_of_families_are_those_of_whole_rows(name: str, any_prefix) -> None:
    bundle = tiny(name)
    batch = batch_of(bundle, single_image=MODELS[name].single_image)
    assert_alike(
        Update(PolicyModule(bundle), batch.samples, batch.images), shared=name not in WHOLE
    )


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_scores_and_gradients_of_small_models_are_those_of_whole_rows(images, any_prefix) -> None:
    agent = build_agent(images=images)
    batch = build_batch(agent, window="all")
    assert_alike(Update(agent.policy, batch.samples, batch.images), shared=True)


@pytest.mark.parametrize(
    "settings",
    [UpdateSettings(share_prefix=False), UpdateSettings(gradient_checkpointing=True)],
    ids=["off", "layers computed again"],
)
def test_whole_rows_are_computed(settings: UpdateSettings, any_prefix) -> None:
    bundle = build_small_lm(text=TEXT)
    batch = batch_of(bundle)
    rows, time = batch.samples.input_ids.shape
    *_, computed = Update(PolicyModule(bundle, update=settings), batch.samples, batch.images)()
    assert computed % (rows * time) == 0
    *_, fewer = Update(PolicyModule(build_small_lm(text=TEXT)), batch.samples, batch.images)()
    assert fewer < rows * time


@pytest.mark.parametrize(
    ("rows", "shared", "is_shared"),
    [(9, 32, True), (9, 31, False), (2, 130, False), (20, 19, False), (20, 20, True)],
)
def test_a_short_prefix_is_not_worth_a_pass(rows: int, shared: int, is_shared: bool) -> None:
    """A pass of its own has to save 256 positions, and a fifth of each row's."""
    time = 100 if shared < 100 else 150
    ids = torch.arange(rows * time).view(rows, time) % 97 + 20
    ids[:, :shared] = ids[0, :shared]
    sampled = torch.zeros(rows, time, dtype=torch.bool)
    sampled[:, -3:] = True
    samples = Samples.of_one_turn(
        ids, sampled, length=torch.full((rows,), time), image_index=ids.new_zeros(rows, 0)
    )
    *_, computed = Update(PolicyModule(build_small_lm(text=TEXT)), samples, images=[])()
    assert computed == (rows * time - (rows - 1) * shared if is_shared else rows * time)
