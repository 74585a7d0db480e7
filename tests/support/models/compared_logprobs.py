"""Log-probs of sampled tokens three ways: the model's own forward with its own processor on the whole conversation, the
rollout engine, and the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from support.episodes.trajectories import make_trajectory, make_turn

from ragen_pl.data.collate import collate
from ragen_pl.data.microbatches import split_by_tokens
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import Generation, GenerationRequest, Prompt, generate
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.distribution import log_distribution
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.trajectory import Observation, Trajectory

TOLERANCE = 1e-4
# height and width of the images of each turn; the second turn is text only
SIZES = ([(56, 84), (28, 56)], [], [(64, 64)], [(56, 84)])
WORDS = ("see", "see the goal, then answer", "Up is the answer to all that you see")


@dataclass
class Said:
    prompt: Prompt
    generation: Generation


def play(
    bundle: ModelBundle,
    *,
    window: int | str,
    keep: bool,
    single_image: bool = False,
    engine: TransformersEngine | None = None,
) -> list[list[Said]]:
    """Play episodes of unequal length side by side, four turns each."""
    context = ContextManager(bundle, window=window, system_prompt=None)
    engine = engine or TransformersEngine(PolicyModule(bundle))
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
            talk.respond(ids=response.ids, text="Up", actions=["Up"])
    return episodes


def own_logprobs(bundle: ModelBundle, said: Said) -> np.ndarray:
    """Log-probs of a response by the model's own forward, with its own processor on all images of the prompt."""
    ids = np.concatenate([said.prompt.ids, said.generation.ids])
    with torch.no_grad():
        logits = bundle.model(use_cache=False, **bundle.own_inputs(ids, said.prompt.images)).logits[
            0
        ]
    log_probs = log_distribution(logits, banned=torch.tensor(bundle.banned_token_ids))
    places = np.arange(len(said.prompt.ids), len(ids))
    return log_probs[places - 1, ids[places]].numpy()


def trajectory_of(episode: list[Said], number: int) -> Trajectory:
    turns = [
        make_turn(
            prompt_ids=said.prompt.ids, prompt_images=list(said.prompt.images), response_ids=said.generation.ids,
            response_logprobs=said.generation.logprobs, response_text="Up", actions=["Up"],
        )
        for said in episode
    ]  # fmt: skip
    return make_trajectory(*turns, group=number)


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


def agree(
    bundle: ModelBundle, *, window: int | str = "all", single_image: bool = False
) -> list[list[Said]]:
    """Check that all three agree, with and without a cache, and return the episodes."""
    episodes = play(bundle, window=window, keep=True, single_image=single_image)
    again = play(bundle, window=window, keep=False, single_image=single_image)
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
    return episodes
