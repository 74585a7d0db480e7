"""Check at the start of a run: engine, trainer and the model's own forward give the same log-probs.

What a family needs in addition to token ids (positions of several axes, masks by layer type, features of deeper layers)
is handed to transformers' code, see `ragen_pl.models.inputs`. A family that needs something else is found here, before
anything is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ragen_pl.distributed import all_ranks_do, gather_over_ranks, rank, world_size
from ragen_pl.models.distribution import log_distribution
from ragen_pl.models.inputs import run_decoder, whole_inputs
from ragen_pl.models.truncation import Truncation
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.engine import (
    EnginePolicy,
    Generation,
    GenerationRequest,
    Prompt,
    RolloutEngine,
    generate,
    taking_part,
)
from ragen_pl.rollout.errors import RolloutError
from ragen_pl.trajectory import Observation

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle
    from ragen_pl.rollout.vllm_server.engine import VLLMServerEngine

# one conversation for each text: rows of unequal length
_TEXTS = (
    "Where is the goal?",
    "You see a map with a goal and two holes. Which way is the shortest? Answer with a word.",
)
# images of each turn of the first conversation; the second has none
_IMAGES = (1, 0, 1)
_TOKENS = 4
# nats: the largest difference of a token in float32, and the mean difference in types of 16 bits
_LARGEST, _MEAN = 1e-3, 0.05
# key and remedy by what differs
_BLAMED = {
    "rollout engine": (
        "rollout.engine",
        "it has other weights, leaves out temperature, banned tokens or rollout.top_p, top_k and min_p, or reads "
        "inputs of this family ({family}) in another way: set another rollout/engine, or another model",
    ),
    "trainer": (
        "model.build",
        "this family ({family}) needs inputs that are not known here: choose another model, and report this one",
    ),
}


@dataclass(frozen=True, slots=True)
class _Response:
    prompt: Prompt
    generation: Generation
    truncation: Truncation | None


def check_agreement(
    context: ContextManager,
    engine: RolloutEngine,
    *,
    image_size: tuple[int, int] | None,
    policy: EnginePolicy | None = None,
    truncation: Truncation | None = None,
    sampled_by: int | None = None,
) -> float:
    """Compare the log-probs of a few sampled tokens three ways. All ranks must call it.

    Args:
        context: Context of the run's prompts.
        engine: Rollout engine of the same model.
        image_size: Height and width of the environment's images; None for an environment of text.
        policy: Policy that the engine was built with, where its weights may be sharded; None for the context's model.
        truncation: Ids that sampling keeps; None for all.
        sampled_by: Rank that samples the tokens, for all; None for each rank its own.

    Returns:
        The largest difference from the model's own forward, in nats.

    Raises:
        ValueError: Engine or trainer differ from the model's own forward.
    """

    def converse() -> list[_Response]:
        if sampled_by not in (None, rank()):
            return []
        with taking_part(engine):
            return _converse(context, engine, image_size=image_size, truncation=truncation)

    responses = all_ranks_do(converse)
    if sampled_by is not None:
        responses = gather_over_ranks(responses)[sampled_by]

    def computed(bundle: ModelBundle) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (_own_logprobs(bundle, each), _trainer_logprobs(bundle, each)) for each in responses
        ]

    # no inference mode, in which sharded weights can't be gathered
    with torch.no_grad():
        both = computed(context.bundle) if policy is None else policy.compute(computed)
    return all_ranks_do(lambda: _largest_difference(context.bundle, engine, responses, both))


def _largest_difference(
    bundle: ModelBundle,
    engine: RolloutEngine,
    responses: Sequence[_Response],
    computed: Sequence[tuple[np.ndarray, np.ndarray]],
) -> float:
    """Return the largest difference of the engine's or the trainer's log-probs from the model's own.

    Raises:
        ValueError: It is too large.
    """
    differences: dict[str, list[np.ndarray]] = {"rollout engine": [], "trainer": []}
    for response, (own, trainer) in zip(responses, computed, strict=True):
        differences["rollout engine"].append(np.abs(response.generation.logprobs - own))
        differences["trainer"].append(np.abs(trainer - own))
    full_precision = bundle.model.dtype == engine.dtype == torch.float32
    largest = 0.0
    for name, parts in differences.items():
        values = np.concatenate(parts)
        largest = max(largest, float(values.max()))
        found, limit = (values.max(), _LARGEST) if full_precision else (values.mean(), _MEAN)
        if not found <= limit:
            key, remedy = _BLAMED[name]
            raise ValueError(
                f"{key}: log-probs of the {name} differ by {found:.3g} nats from those of the model's own forward, "
                f"expected at most {limit:g}; {remedy.format(family=bundle.facts.family)}"
            )
    return largest


def check_servers(
    context: ContextManager,
    engine: VLLMServerEngine,
    *,
    image_size: tuple[int, int] | None,
    policy: EnginePolicy | None = None,
    truncation: Truncation | None = None,
) -> None:
    """Check each server of an engine by itself, one rank for each; see `check_agreement`.

    Raises:
        ValueError: A server's model differs from the trainer's.
    """
    for number, url in enumerate(engine.urls):
        with engine.only(url):
            try:
                check_agreement(
                    context,
                    engine,
                    image_size=image_size,
                    policy=policy,
                    truncation=truncation,
                    sampled_by=number % world_size(),
                )
            except RolloutError:
                raise  # it does not answer
            except ValueError as error:
                raise ValueError(
                    f"rollout.engine.urls: {url} has another model than the trainer, or other settings of it ({error})"
                ) from error


def _converse(
    context: ContextManager,
    engine: RolloutEngine,
    *,
    image_size: tuple[int, int] | None,
    truncation: Truncation | None,
) -> list[_Response]:
    """Sample responses in a few short conversations, side by side."""
    rng = np.random.default_rng(0)
    talks = [context.start("Find the goal.") for _ in _TEXTS]
    responses: list[_Response] = []
    for turn, count in enumerate(_IMAGES):
        requests: list[GenerationRequest] = []
        for session, (talk, text) in enumerate(zip(talks, _TEXTS, strict=True)):
            images: list[np.ndarray] = []
            if image_size is not None and session == 0:
                shape = (*image_size, 3)
                images = [rng.integers(0, 255, shape, dtype=np.uint8) for _ in range(count)]
            observation = Observation(text=text, images=images)
            prompt = context.observe(talk, observation, max_turns=len(_IMAGES))
            request = GenerationRequest(
                session=session,
                prompt=prompt,
                max_tokens=_TOKENS,
                temperature=1.0,
                seed=len(_TEXTS) * turn + session,
                truncation=truncation,
            )
            requests.append(request)
        generations = generate(engine, requests, keep=context.grows)
        for talk, request, generation in zip(talks, requests, generations, strict=True):
            responses.append(_Response(request.prompt, generation, truncation))
            context.response(talk, ids=generation.ids, text="", actions=[])
    engine.release()
    return responses


def _sequence(bundle: ModelBundle, response: _Response) -> Tensor:
    """Return the ids of prompt and response, int64 `[1, time]`."""
    ids = np.concatenate([response.prompt.ids, response.generation.ids])
    return torch.from_numpy(ids)[None].to(bundle.device)


def _logprobs(bundle: ModelBundle, logits: Tensor, ids: Tensor, response: _Response) -> np.ndarray:
    """Return the log-probs of a response's tokens, `[response]`, from logits `[time, vocab]`."""
    first = len(response.prompt.ids)
    log_probs = log_distribution(logits[first - 1 : -1], banned=bundle.banned(logits.device))
    tokens = ids[0, first:]
    if response.truncation is not None:
        behavior = torch.from_numpy(response.generation.logprobs).to(logits.device)
        kept = response.truncation.kept_by_engine(log_probs, tokens, behavior)
        log_probs = torch.log_softmax(kept.drop_others(log_probs), dim=-1)
    own: np.ndarray = log_probs.gather(-1, tokens[:, None]).squeeze(-1).cpu().numpy()
    return own


def _own_logprobs(bundle: ModelBundle, response: _Response) -> np.ndarray:
    """Return log-probs by the model's own forward, with its own processor on all images of the prompt."""
    ids, images = _sequence(bundle, response), response.prompt.images
    inputs: dict[str, Any] = {}
    if images and bundle.images is not None:
        inputs = bundle.images.inputs([images])
        if bundle.facts.token_types is not None:
            inputs[bundle.facts.token_types] = ids.eq(bundle.facts.image_token_id or 0).long()
    logits = bundle.model(
        input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs
    ).logits[0]
    return _logprobs(bundle, logits, ids, response)


def _trainer_logprobs(bundle: ModelBundle, response: _Response) -> np.ndarray:
    """Return log-probs as the trainer computes them."""
    ids, images = _sequence(bundle, response), response.prompt.images
    inputs = whole_inputs(
        bundle,
        ids,
        images=[torch.from_numpy(image) for image in images],
        image_index=torch.arange(len(images), device=ids.device)[None],
        patches=torch.zeros(1, 0, 0, dtype=torch.bool, device=ids.device),
    )
    logits = bundle.lm_head(run_decoder(bundle, inputs)[0])
    return _logprobs(bundle, logits, ids, response)
