"""Check at the start of a run: engine, trainer and the model's own forward give the same log-probs.

What a family needs in addition to token ids (positions of several axes, masks by layer type, features of deeper layers)
is handed to transformers' code, see `ragen_pl.models.inputs`. A family that needs something else is found here, before
anything is trained, on the device, in the precision and with the attention of the run. The trainer is compared in train
mode, so that nothing random and nothing else that depends on the mode is left in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ragen_pl.base.distributed import all_ranks_do, rank, values_of, world_size
from ragen_pl.base.seeding import seeded
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.generation_check import GenerationCheck
from ragen_pl.engines.protocol import (
    EnginePolicy,
    GenerationRequest,
    HasReplicas,
    RolloutEngine,
    collective_rollout,
    generate,
)
from ragen_pl.models.distribution import log_distribution
from ragen_pl.models.inputs import run_decoder, whole_inputs
from ragen_pl.models.truncation import Truncation
from ragen_pl.models.vision_parts import vision_weights
from ragen_pl.prompts.check_conversations import CheckedResponse, converse
from ragen_pl.prompts.context import ContextManager

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

# nats: the largest difference of a token in float32, and the mean difference in types of 16 bits
_LARGEST, _MEAN = 1e-3, 0.05
# weights of the decoder whose gradients are computed: the first ones that are no tables of embeddings
_WEIGHTS, _LARGEST_WEIGHT = 8, 2**24
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
    "train mode": (
        "model.build",
        "a layer of this family ({family}) computes something else in train mode than in eval mode, such as a batch "
        "norm: choose another model",
    ),
}


@dataclass(frozen=True, slots=True)
class _Scores:
    """Log-probs of responses by the number of the response, each `[response]`."""

    own: dict[int, np.ndarray]
    """By the model's own forward."""
    train: dict[int, np.ndarray]
    """By the trainer."""
    eval: dict[int, np.ndarray]
    """By the trainer in eval mode, of some responses."""
    reads_image: dict[str, bool]
    """Whether log-probs, and gradients where they are computed, of a response change with its image."""
    rounded: bool
    """Whether autocast rounds in forward passes."""


_Context = Callable[[], AbstractContextManager[object]]


def check_agreement(
    context: ContextManager,
    engine: RolloutEngine,
    *,
    image_size: tuple[int, int] | None,
    policy: EnginePolicy | None = None,
    truncation: Truncation | None = None,
    sampled_by: int | None = None,
    forward_context: _Context = nullcontext,
    alone: bool = False,
) -> float:
    """Compare the log-probs of a few sampled tokens three ways.

    Args:
        context: Context of the run's prompts. One conversation is as long as it allows.
        engine: Rollout engine of the same model.
        image_size: Height and width of the environment's images; None for an environment of text.
        policy: Policy that the engine was built with, where its weights may be sharded; None for the context's model.
        truncation: Ids that sampling keeps; None for all.
        sampled_by: Rank that samples the tokens, for all; None for each rank its own.
        forward_context: Context around the trainer's forward passes, such as autocast.
        alone: Whether this rank checks by itself. Otherwise all ranks must call it.

    Returns:
        The largest difference from the model's own forward, in nats.

    Raises:
        ValueError: Engine or trainer differ from the model's own forward.
    """
    check = GenerationCheck.of(context.bundle)

    def ask(requests: Sequence[GenerationRequest]) -> list[CheckedResponse]:
        generations = generate(engine, requests, keep=context.grows, check=check)
        return [
            CheckedResponse(request.prompt, generation.ids, generation.logprobs, truncation)
            for request, generation in zip(requests, generations, strict=True)
        ]

    def sample() -> list[CheckedResponse]:
        if sampled_by not in (None, rank()):
            return []
        with collective_rollout(engine), _in_mode(context.bundle.model, train=False):
            responses = converse(context, ask, image_size=image_size, truncation=truncation)
        engine.release()
        return responses

    responses: list[CheckedResponse] = _doer(alone)(sample)
    if sampled_by is not None:
        [responses] = values_of([sampled_by], responses)
    return _compare(
        context.bundle,
        responses,
        policy=policy,
        forward_context=forward_context,
        alone=alone,
        engine_dtype=engine.dtype,
    )


def check_trainer(
    context: ContextManager,
    *,
    image_size: tuple[int, int] | None,
    policy: EnginePolicy,
    forward_context: _Context = nullcontext,
    alone: bool = False,
) -> float:
    """Compare the trainer with the model's own forward on drawn tokens; see `check_agreement`."""
    bundle, rng = context.bundle, np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(bundle.logit_count), bundle.banned_token_ids)

    def ask(requests: Sequence[GenerationRequest]) -> list[CheckedResponse]:
        return [
            CheckedResponse(request.prompt, rng.choice(allowed, request.max_tokens))
            for request in requests
        ]

    return _compare(
        bundle,
        _doer(alone)(lambda: converse(context, ask, image_size=image_size)),
        policy=policy,
        forward_context=forward_context,
        alone=alone,
    )


def _compare(
    bundle: ModelBundle,
    responses: Sequence[CheckedResponse],
    *,
    policy: EnginePolicy | None,
    forward_context: _Context,
    alone: bool,
    engine_dtype: torch.dtype | None = None,
) -> float:
    order = sorted(range(len(responses)), key=lambda n: len(responses[n].prompt.ids))
    # a batch of the longest sequence and the shortest, and one of the others
    long, short = sorted({order[0], order[-1]}), order[1:-1]

    def computed(bundle: ModelBundle) -> _Scores:
        with forward_context():
            return _Scores(
                # the context's own model may be a copy without data
                rounded=torch.is_autocast_enabled(bundle.device.type),
                own={n: _own_logprobs(bundle, each) for n, each in enumerate(responses)},
                train=_trainer_logprobs(bundle, responses, [long, short], train=True),
                eval=_trainer_logprobs(bundle, responses, [short], train=False),
                reads_image=_reads_image(bundle, [responses[number] for number in order]),
            )

    # no inference mode, in which sharded weights can't be gathered
    with torch.inference_mode(False), torch.no_grad():
        scores = computed(bundle) if policy is None else policy.compute(computed)
    exact = not scores.rounded and {bundle.model.dtype, engine_dtype or torch.float32} == {
        torch.float32
    }
    largest: float = _doer(alone)(
        lambda: _largest_difference(responses, scores, family=bundle.facts.family, exact=exact)
    )
    return largest


def _doer(alone: bool) -> Callable[[Callable[[], Any]], Any]:
    """Return the caller of some work: this rank by itself, or all ranks, which then raise the error of one."""
    return (lambda work: work()) if alone else all_ranks_do


def _largest_difference(
    responses: Sequence[CheckedResponse], scores: _Scores, *, family: str, exact: bool
) -> float:
    """Return the largest difference of the engine's or the trainer's log-probs from the model's own.

    Args:
        responses: Responses.
        scores: Their log-probs.
        family: Name of the family, for the error.
        exact: Whether everything is computed in float32.

    Raises:
        ValueError: It is too large.
    """
    sampled = {
        number: response.logprobs
        for number, response in enumerate(responses)
        if response.logprobs is not None
    }
    compared = {
        "rollout engine": (sampled, scores.own),
        "train mode": (scores.eval, scores.train),
        "trainer": (scores.train, scores.own),
    }
    largest = 0.0
    for name, (first, second) in compared.items():
        if not first:
            continue
        values = np.concatenate([np.abs(first[number] - second[number]) for number in first])
        largest = max(largest, float(values.max()))
        found, limit = (values.max(), _LARGEST) if exact else (values.mean(), _MEAN)
        if not found <= limit:
            key, remedy = _BLAMED[name]
            other = "eval mode" if name == "train mode" else "the model's own forward"
            raise ValueError(
                f"{key}: log-probs of the {name} differ by {found:.3g} nats from those of {other}, "
                f"expected at most {limit:g}; {remedy.format(family=family)}"
            )
    for name, changes in scores.reads_image.items():
        if not changes:
            raise ValueError(
                f"model.build: {name} of a response stay the same where its image is black instead: what this family "
                f"({family}) is shown does not reach what is trained; choose another model, and report this one"
            )
    return largest


def check_engine(
    context: ContextManager, engine: RolloutEngine, *, alone: bool = False, **settings: Any
) -> None:
    """Check an engine, each of its replicas by itself where it has several, one rank for each.

    Args:
        context: As in `check_agreement`.
        engine: As in `check_agreement`.
        alone: As in `check_agreement`; not for an engine with replicas.
        settings: Other arguments of `check_agreement`.

    Raises:
        ValueError: The engine's model differs from the trainer's.
    """
    if not isinstance(engine, HasReplicas):
        check_agreement(context, engine, alone=alone, **settings)
        return
    for number, replica in enumerate(engine.replicas):
        with engine.only(replica):
            try:
                check_agreement(context, engine, sampled_by=number % world_size(), **settings)
            except RolloutError:
                raise  # it does not answer
            except ValueError as error:
                raise ValueError(
                    f"rollout.engine: {replica} has another model than the trainer, or other settings of it ({error})"
                ) from error


def _logprobs(bundle: ModelBundle, logits: Tensor, response: CheckedResponse) -> Tensor:
    """Return the log-probs of a response's tokens, `[response]`, from the logits that predict them."""
    log_probs = log_distribution(logits, banned=bundle.banned(logits.device))
    tokens = torch.from_numpy(response.ids).to(logits.device)
    if response.truncation is not None and response.logprobs is not None:
        rollout_logprobs = torch.from_numpy(response.logprobs).to(logits.device)
        kept = response.truncation.kept_by_engine(log_probs, tokens, rollout_logprobs)
        log_probs = torch.log_softmax(kept.drop_others(log_probs), dim=-1)
    return log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _own_logprobs(bundle: ModelBundle, response: CheckedResponse) -> np.ndarray:
    """Return log-probs by the model's own forward, with all that its own processor gives for the conversation."""
    ids = np.concatenate([response.prompt.ids, response.ids])
    inputs = bundle.own_inputs(ids, response.prompt.images)
    count = len(response.ids) + 1
    if bundle.facts.keeps_logits:
        # those of a long prompt would take gigabytes
        inputs["logits_to_keep"] = count
    logits = bundle.model(use_cache=False, **inputs).logits[0, -count:-1]
    values: np.ndarray = _logprobs(bundle, logits, response).cpu().numpy()
    return values


def _trainer_logprobs(
    bundle: ModelBundle,
    responses: Sequence[CheckedResponse],
    batches: Sequence[list[int]],
    *,
    train: bool,
) -> dict[int, np.ndarray]:
    """Return log-probs of batches of responses as the trainer computes them, in train or in eval mode."""
    values: dict[int, np.ndarray] = {}
    # a family may draw although nothing of it is random
    with seeded("agreement"), _in_mode(bundle.model, train=train):
        for numbers in filter(None, batches):
            rows = _batch_logprobs(bundle, [responses[number] for number in numbers])
            values |= dict(zip(numbers, (row.cpu().numpy() for row in rows), strict=True))
    return values


def _reads_image(bundle: ModelBundle, responses: Sequence[CheckedResponse]) -> dict[str, bool]:
    """Return whether the trainer's log-probs of what follows an image, and their gradients, change with the image.

    Gradients are those of a few weights of the decoder, where they are trained and not sharded. All tokens after the
    last image count: a sliding window may hide the image from the response.

    Args:
        bundle: Model.
        responses: Responses, the shortest first; the first with an image is computed.
    """
    shown = next((each for each in responses if each.prompt.images), None)
    if shown is None:
        return {}
    sequence = np.concatenate([shown.prompt.ids, shown.ids])
    start = int((sequence == bundle.image_token_id).nonzero()[0][-1]) + 1
    seen = replace(shown.prompt, ids=sequence[:start])
    black = replace(seen, images=[np.zeros_like(image) for image in seen.images])
    vision = set(vision_weights(bundle.model))
    weights = [
        weight
        for weight in bundle.model.parameters()
        if weight.requires_grad and weight.numel() <= _LARGEST_WEIGHT and weight not in vision
    ][:_WEIGHTS]
    if any(isinstance(weight, DTensor) for weight in bundle.model.parameters()):
        weights = []
    logprobs, gradients = [], []
    for prompt in (seen, black):
        with (
            seeded("agreement"),
            _in_mode(bundle.model, train=True),
            torch.set_grad_enabled(bool(weights)),
        ):
            (row,) = _batch_logprobs(bundle, [CheckedResponse(prompt, sequence[start:])])
            logprobs.append(row.detach())
            if weights:
                found = torch.autograd.grad(row.sum(), weights, allow_unused=True)
                gradients.append([one for one in found if one is not None])
    changes = {"log-probs": not torch.equal(*logprobs)}
    if gradients and gradients[0]:
        equal = (torch.equal(own, other) for own, other in zip(*gradients, strict=True))
        changes["gradients"] = not all(equal)
    return changes


@contextmanager
def _in_mode(model: torch.nn.Module, *, train: bool) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train(train)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _batch_logprobs(bundle: ModelBundle, responses: Sequence[CheckedResponse]) -> list[Tensor]:
    """Return the log-probs of responses whose sequences are one batch, padded on the right."""
    sequences = [np.concatenate([response.prompt.ids, response.ids]) for response in responses]
    lengths = [len(sequence) for sequence in sequences]
    padded = np.full((len(lengths), max(lengths)), bundle.pad_token_id, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = sequence
    ids = torch.from_numpy(padded).to(bundle.device)
    images = [torch.from_numpy(image) for each in responses for image in each.prompt.images]
    counts = [len(response.prompt.images) for response in responses]
    index = torch.full((len(counts), max(counts)), -1, device=ids.device)
    for row, count in enumerate(counts):
        first = sum(counts[:row])
        index[row, :count] = torch.arange(first, first + count, device=ids.device)
    inputs = whole_inputs(
        bundle,
        ids,
        images=images,
        image_index=index,
        patches=torch.zeros(len(counts), 0, 0, dtype=torch.bool, device=ids.device),
    )
    hidden = run_decoder(bundle, inputs)
    return [
        _logprobs(
            bundle, bundle.lm_head(hidden[row, length - len(each.ids) - 1 : length - 1]), each
        )
        for row, (each, length) in enumerate(zip(responses, lengths, strict=True))
    ]
