"""Tiny models of real families: forward, rollout engine and trainer agree (see `three_ways`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.compared_logprobs import agree, play, trajectory_of
from support.models.family_models import MODELS, tiny

from ragen_pl.data.collate import collate
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.models.build import load_pretrained
from ragen_pl.modules.policy import PolicyModule

SINGLE_IMAGE = [name for name, family in MODELS.items() if family.single_image]


@pytest.mark.parametrize(
    ("name", "window"),
    [
        *((name, window) for name in MODELS for window in ("all", 1) if name not in SINGLE_IMAGE),
        *((name, 1) for name in SINGLE_IMAGE),
    ],
)
def test_forward_engine_and_trainer_agree(name: str, window: int | str) -> None:
    agree(tiny(name), window=window, single_image=name in SINGLE_IMAGE)


@pytest.mark.parametrize("name", SINGLE_IMAGE)
@pytest.mark.parametrize(("window", "single_image"), [(1, False), ("all", True)])
def test_several_images_are_refused_where_each_then_has_other_tokens(
    name: str, window: int | str, single_image: bool
) -> None:
    """In one observation, or in the turns of a window."""
    with pytest.raises(ValueError, match=r"shows 2; set context\.window=1 with one image"):
        play(tiny(name), window=window, keep=True, single_image=single_image)


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_loads_unchanged(name: str, tmp_path: Path) -> None:
    bundle = tiny(name)
    bundle.save(tmp_path)
    loaded = load_pretrained(str(tmp_path), image_processor=dict(bundle.image_settings) or None)
    assert type(loaded.model) is type(bundle.model) and loaded.source == str(tmp_path)
    assert loaded.facts == bundle.facts
    assert loaded.banned_token_ids == bundle.banned_token_ids
    first_play, second_play = (
        play(each, window=1, keep=True, single_image=name in SINGLE_IMAGE)
        for each in (bundle, loaded)
    )
    for first, second in zip(first_play, second_play, strict=True):
        for said, again in zip(first, second, strict=True):
            assert said.prompt.ids.tolist() == again.prompt.ids.tolist()
            assert said.generation.ids.tolist() == again.generation.ids.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_layers_computed_again_give_the_same_gradient(name: str) -> None:
    bundle, single = tiny(name), name in SINGLE_IMAGE
    window = 1 if single else "all"
    episodes = play(bundle, window=window, keep=True, single_image=single)
    batch = collate([trajectory_of(episode, n) for n, episode in enumerate(episodes)], bundle)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    def update(policy: PolicyModule) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        policy.train().zero_grad()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            scores = policy(batch.samples, batch.images)
        elements = sum(kept)
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        gradients = {
            name: weight.grad.clone()
            for name, weight in policy.named_parameters()
            if weight.grad is not None
        }
        return scores.logprobs.detach(), gradients, elements

    logprobs, gradients, elements = update(PolicyModule(bundle))
    again, checkpointed, fewer = update(
        PolicyModule(bundle, update=UpdateSettings(gradient_checkpointing=True))
    )
    assert fewer < 0.6 * elements
    torch.testing.assert_close(again, logprobs, rtol=1e-6, atol=1e-6)
    assert checkpointed.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for weight, gradient in gradients.items():
        assert float((checkpointed[weight] - gradient).abs().max()) < 1e-5 * largest, weight
    # rollouts keep their cache
    bundle.model.eval()
    generations = [said.generation for episode in episodes for said in episode]
    played_again = play(bundle, window=window, keep=True, single_image=single)
    replayed = [said.generation for episode in played_again for said in episode]
    for generation, other in zip(generations, replayed, strict=True):
        assert generation.ids.tolist() == other.ids.tolist()
