"""Episodes and prompts of an engine, and the trainer's scores of them."""

import numpy as np
import torch
from support.episodes.trajectories import make_request

from ragen_pl.base.seeding import uniforms
from ragen_pl.data.collate import collate
from ragen_pl.data.microbatches import split_by_length
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, Prompt, generate
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.models.distribution import draw, log_distribution
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.trajectory import Observation

ENVIRONMENTS = {"text": "ragen/FrozenLake-v0", "images": "ragen/FrozenLakeVisual-v0"}


def proxy_of(bundle, *, window, kind="text", num_envs=64, temperature=1.0, turns=4, **context):
    return AgentProxy(
        environments=EnvironmentManager(target=ENVIRONMENTS[kind], max_turns=turns, invalid_ends=False),
        context=ContextManager(bundle, window=window, system_prompt=None, **context),
        max_response_tokens=12, temperature=temperature, num_envs=num_envs,
    )  # fmt: skip


def prompt_of(ids: np.ndarray, images=()) -> Prompt:
    return Prompt(ids=ids, unexpanded_ids=ids, images=list(images))


def words(bundle, text: str) -> Prompt:
    return prompt_of(np.array(bundle.tokenizer.encode(f"<|user|>{text}<|assistant|>")))


def draws_of(request: GenerationRequest) -> np.ndarray:
    return uniforms(request.seed, count=request.max_tokens)


def plain_logits(bundle, ids: np.ndarray, images) -> torch.Tensor:
    """The model's own forward over a whole sequence, no cache: `[time, vocab]`."""
    pixels = bundle.processor(images=list(images), return_tensors="pt") if len(images) else {}
    with torch.no_grad():
        return bundle.model(input_ids=torch.from_numpy(ids)[None], **pixels).logits[0]


def replay(bundle, prompt: Prompt, draws: np.ndarray, temperature: float) -> tuple[list, list]:
    """Sample a response token by token, each from a fresh forward over everything before it."""
    ids, logprobs = prompt.ids, []
    banned, greedy = torch.tensor(bundle.banned_token_ids), torch.tensor([False])
    for u in draws:
        logits = plain_logits(bundle, ids, prompt.images)[-1:]
        log_probs = log_distribution(logits, temperature=temperature, banned=banned)
        token = int(draw(log_probs, torch.tensor([u]), greedy=greedy))
        ids, logprobs = np.append(ids, token), [*logprobs, float(log_probs[0, token])]
        if token in bundle.eos_token_ids:
            break
    return ids[len(prompt.ids) :].tolist(), logprobs


def scored(bundle, episodes):
    batch = collate(episodes, bundle)
    with torch.no_grad():
        rows = split_by_length(batch.samples.length, 3)
        scores = PolicyModule(bundle)(batch.samples, batch.images, microbatches=rows)
    return batch, scores


def gap(bundle, episodes) -> torch.Tensor:
    """Difference of the trainer's and the engine's log-probs of the sampled tokens."""
    batch, scores = scored(bundle, episodes)
    return (scores.logprobs - batch.samples.rollout_logprobs)[batch.samples.turn >= 0].abs()


# ---- caches


def talks_with_images(bundle, engine, *, slots: int, turns: int, window: int | str = "all"):
    """Conversations with a new image every turn; yields each turn's requests and responses."""
    context, rng = ContextManager(bundle, window=window), np.random.default_rng(0)
    talks = [context.start("rules") for _ in range(slots)]
    for turn in range(turns):
        requests = []
        for slot, talk in enumerate(talks):
            image = rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)
            seen = Observation(text=f"turn {turn}", images=[image])
            prompt = context.observe(talk, seen, max_turns=turns)
            requests.append(make_request(prompt, session=slot, seed=10 * turn + slot))
        responses = generate(engine, requests, keep=True)
        for talk, response in zip(talks, responses, strict=True):
            talk.respond(ids=response.ids, text="", actions=[])
        yield requests, responses


def talk(bundle, **settings):
    """All responses of three turns with images, in one list."""
    engine = TransformersEngine(PolicyModule(bundle), **settings)
    turns = talks_with_images(bundle, engine, slots=5, turns=3)
    return engine, [response for _, responses in turns for response in responses]
