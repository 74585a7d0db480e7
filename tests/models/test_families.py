"""Log-probs of sampled tokens three ways, for tiny models of real families: the model's own forward with its own
processor on the whole conversation, the rollout engine, and the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import MODELS, tiny

from ragen_pl.data.collate import collate
from ragen_pl.data.microbatches import split_by_tokens
from ragen_pl.models.build import load_pretrained
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.distribution import log_distribution
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.engine import Generation, GenerationRequest, Prompt, generate
from ragen_pl.rollout.transformers_engine import TransformersEngine
from ragen_pl.trajectory import EpisodeStatus, Observation, Span, Trajectory, Turn

TOLERANCE = 1e-4
# height and width of the images of each turn; the second turn is text only
SIZES = ([(56, 84), (28, 56)], [], [(64, 64)], [(56, 84)])
SINGLE_IMAGE = [name for name, family in MODELS.items() if family.single_image]
WORDS = ("see", "see the goal, then answer", "Up is the answer to all that you see")


@dataclass
class Said:
    prompt: Prompt
    generation: Generation


def play(
    bundle: ModelBundle, *, window: int | str, keep: bool, single_image: bool = False
) -> list[list[Said]]:
    """Play episodes of unequal length side by side, four turns each."""
    context = ContextManager(bundle, window=window, system_prompt=None)
    engine = TransformersEngine(PolicyModule(bundle))
    rng = np.random.default_rng(1)
    talks = [context.start("") for _ in WORDS]
    episodes: list[list[Said]] = [[] for _ in WORDS]
    for turn, sizes in enumerate(SIZES):
        requests = []
        for number, (talk, words) in enumerate(zip(talks, WORDS, strict=True)):
            images = [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in sizes]
            # one episode sees fewer images
            images = (images[number % 2 :] if sizes else []) if bundle.images else []
            images = images[-1:] if single_image else images
            observation = Observation(text=f"{words} {turn}", images=images)
            prompt = context.observe(talk, observation, max_turns=len(SIZES))
            requests.append(
                GenerationRequest(
                    session=number, prompt=prompt, max_tokens=5 + 2 * number, temperature=1.0, seed=10 * turn + number
                )
            )  # fmt: skip
        responses = generate(engine, requests, keep=keep and context.grows)
        for talk, episode, request, response in zip(
            talks, episodes, requests, responses, strict=True
        ):
            episode.append(Said(request.prompt, response))
            context.response(talk, ids=response.ids, text="Up", actions=["Up"])
    return episodes


def own_logprobs(bundle: ModelBundle, said: Said) -> np.ndarray:
    """Log-probs of a response by the model's own forward, with its own processor on all images of the prompt."""
    ids = torch.from_numpy(np.concatenate([said.prompt.ids, said.generation.ids]))[None]
    inputs = {}
    if said.prompt.images:
        images = said.prompt.images
        processed = bundle.processor(
            images=[images], text=[bundle.images.slot * len(images)], return_tensors="pt", **bundle.image_settings
        )  # fmt: skip
        text = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
        inputs = {name: value for name, value in processed.items() if name not in text}
    if bundle.facts.token_types and said.prompt.images:
        types = bundle.processor.create_mm_token_type_ids(ids.tolist())
        inputs[bundle.facts.token_types] = torch.tensor(types)
    with torch.no_grad():
        logits = bundle.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs
        ).logits[0]
    log_probs = log_distribution(logits, banned=torch.tensor(bundle.banned_token_ids))
    places = torch.arange(len(said.prompt.ids), ids.shape[1])
    return log_probs[places - 1].gather(-1, ids[0, places][:, None])[:, 0].numpy()


def trajectory_of(episode: list[Said], number: int) -> Trajectory:
    turns = [
        Turn(
            observation=Observation(text=""), prompt_ids=said.prompt.ids, prompt_images=list(said.prompt.images),
            response_ids=said.generation.ids, response_logprobs=said.generation.logprobs, response_entropy=1.0,
            spans=np.full(len(said.generation.ids), Span.ACTION, np.int8), response_text="Up", think=None,
            actions=["Up"], action_is_valid=True, action_is_effective=True, hit_length_limit=False, temperature=1.0,
        )
        for said in episode
    ]  # fmt: skip
    return Trajectory(
        group=number, member=0, seed=0, turns=turns, status=EpisodeStatus.TERMINATED, success=False
    )


def trainer_logprobs(
    bundle: ModelBundle, episodes: list[list[Said]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Log-probs of all sampled tokens in the trainer, with every way to split rows into microbatches."""
    trajectories = [trajectory_of(episode, number) for number, episode in enumerate(episodes)]
    batch = collate(trajectories, bundle)
    policy, samples = PolicyModule(bundle).eval(), batch.samples
    rows = torch.arange(len(samples))
    layouts = [[rows], list(rows.split(1)), split_by_tokens(samples.length, 200)]
    for microbatches in layouts:
        with torch.no_grad():
            scores = policy(samples, batch.images, microbatches=microbatches)
        at = samples.token >= 0
        order = samples.token[at].argsort()
        yield len(samples), scores.logprobs[at][order].numpy()


@pytest.mark.parametrize(
    ("name", "window"),
    [
        *((name, window) for name in MODELS for window in ("all", 1) if name not in SINGLE_IMAGE),
        *((name, 1) for name in SINGLE_IMAGE),
    ],
)
def test_forward_engine_and_trainer_agree(name: str, window: int | str) -> None:
    bundle, single = tiny(name), name in SINGLE_IMAGE
    episodes = play(bundle, window=window, keep=True, single_image=single)
    again = play(bundle, window=window, keep=False, single_image=single)
    own = [own_logprobs(bundle, said) for episode in episodes for said in episode]
    sampled = [said.generation for episode in episodes for said in episode]
    assert np.std(np.concatenate(own)) > 0.3
    for number, (expected, generation) in enumerate(zip(own, sampled, strict=True)):
        difference = np.abs(expected - generation.logprobs).max()
        assert difference < TOLERANCE, f"response {number}: {difference}"
    repeated = [said.generation for episode in again for said in episode]
    for generation, other in zip(sampled, repeated, strict=True):
        assert generation.ids.tolist() == other.ids.tolist()
        assert np.abs(generation.logprobs - other.logprobs).max() < TOLERANCE
    for _, scored in trainer_logprobs(bundle, episodes):
        assert np.abs(scored - np.concatenate(own)).max() < TOLERANCE


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
    again, checkpointed, fewer = update(PolicyModule(bundle, gradient_checkpointing=True))
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
