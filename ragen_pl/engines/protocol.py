"""The rollout engine's protocol: token ids and images in, sampled ids and their log-probabilities out.

Another engine is one module with a class that follows `RolloutEngine` and inherits from `EngineTraits`, and one file in
`conf/rollout/engine/`. The module imports no torch, so that the configuration's check can read an engine's class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from omegaconf import DictConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ragen_pl.engines.generation_check import GenerationCheck
    from ragen_pl.models.bundle import ModelBundle
    from ragen_pl.models.truncation import Truncation
    from ragen_pl.models.value_head import StateCritic

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Prompt:
    """The ids that a policy is shown, and the images of their image slots in order."""

    ids: np.ndarray
    """int64 `[prompt]`, one image token for each feature of an image."""
    unexpanded_ids: np.ndarray
    """int64, the same prompt with one image token for each image; equal to `ids` without images."""
    images: list[np.ndarray] = field(default_factory=list)
    """RGB images, each uint8 `[height, width, 3]`."""
    patches: list[np.ndarray] | None = None
    """int64, the indices of the patches that each image shows; None for all."""
    left_out: tuple[int, ...] = ()
    """Numbers of the turns in the window that are not shown."""
    roles: np.ndarray | None = None
    """int8, roles of the last ids, see `Turn.prompt_roles`."""


@dataclass(kw_only=True, slots=True)
class GenerationRequest:
    """A request for one response. Prompt, sampling parameters and seed alone decide the result."""

    session: int
    """Number of the environment. An engine may reuse the session's earlier keys and values for a common prefix."""
    prompt: Prompt
    max_tokens: int
    temperature: float
    """Sampling temperature; 0 is greedy."""
    seed: int
    """The only source of randomness of the response."""
    truncation: Truncation | None = None
    """Ids that sampling keeps; None for all. A greedy response has none."""
    group: int | None = None
    """Number of the session's group, whose members begin with the same prompt; None for a session by itself."""


@dataclass(kw_only=True, slots=True)
class Generation:
    """A sampled response."""

    ids: np.ndarray
    """int64 `[response]`, with the end-of-turn token where it was sampled."""
    logprobs: np.ndarray
    """float32 `[response]`, of the distribution that was sampled from; at temperature 1 for a greedy response."""
    entropy: float | None
    """Mean over the response's tokens in nats; None where the engine cannot compute it."""
    hit_length_limit: bool
    """Whether the response reached `max_tokens` without an end-of-turn token."""
    version: int
    """Version of the weights that sampled it, see `RolloutEngine.load_weights`."""
    kept_ids: np.ndarray | None = None
    """int32 `[kept]`, ids that truncated sampling kept at each token, one token after the other; None where unknown."""
    kept_counts: np.ndarray | None = None
    """int32 `[response]`, number of these ids of each token, 0 for all ids."""
    values: np.ndarray | None = None
    """float32 `[response]`, the critic's value of the state before each token; None without `ReadsValues`."""


class RolloutEngine(Protocol):
    """Generates responses for many environments at once."""

    @property
    def exact(self) -> bool:
        """Whether it computes as the trainer does, so that log-probs in float32 are equal but for the last digits."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether it samples with the policy's own model. Otherwise it copies `EnginePolicy.weights`."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type that it computes in."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether it can sample in another thread while the policy trains.

        It then has weights of its own, which only `load_weights` changes, and leaves alone what is global to the
        process, such as random generators.
        """
        ...

    @property
    def continuous(self) -> bool:
        """Whether requests join those under way. Otherwise the responses of a `submit` are sampled together."""
        ...

    def submit(self, requests: Sequence[GenerationRequest], *, keep: bool) -> None:
        """Queue requests, at most one for each session.

        Args:
            requests: Responses to sample.
            keep: Whether the sessions will continue from these prompts and responses.
        """
        ...

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        """Return the responses that finished since the last call, each with its session.

        Args:
            wait: Block until at least one response has finished, unless nothing is pending. Otherwise a continuous
                engine may return an empty list, after a short time.
        """
        ...

    def load_weights(self, version: int) -> None:
        """Use the policy's present weights and drop every cache. All ranks call it together.

        Args:
            version: Number of optimizer steps that the weights have taken. It labels the generations. An engine
                must load again for an equal version: a rollback can put other weights at the same step.
        """
        ...

    def release(self) -> None:
        """Forget all sessions and free their memory."""
        ...

    def sleep(self) -> None:
        """Free the memory that only a rollout needs. `load_weights` comes before the next request."""
        ...

    def close(self) -> None:
        """End the engine and free its memory. It is not used again."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSizes:
    """Sizes of a rollout on one device, by which an engine's memory is planned.

    Attributes:
        bundle: Model, whose weights have no data.
        weights: Bytes of its weights.
        forward_context: Context around its forward passes.
        prefill_bytes: Returns the bytes at the peak of a forward pass over so many prompts.
        episodes: Episodes that are played at once.
        prompt: Tokens of a prompt, those of images included.
        response: Tokens of a response.
        images: Images of a prompt, each uint8 `[height, width, 3]`.
        device: Bytes of the device; None if they are unknown.
        on_gpu: Whether the device is a GPU.
    """

    bundle: ModelBundle
    weights: int
    forward_context: Callable[[], AbstractContextManager[object]]
    prefill_bytes: Callable[[int], int]
    episodes: int
    prompt: int
    response: int
    images: Sequence[np.ndarray]
    device: int | None
    on_gpu: bool


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes that an engine takes of a device, by part.

    Attributes:
        rollout: During a rollout.
        update: While it sleeps.
    """

    rollout: dict[str, int] = field(default_factory=dict)
    update: dict[str, int] = field(default_factory=dict)


class EngineTraits:
    """Traits of a class of engines, for checks and plans before one is built.

    A subclass overrides what is different. `config_problems` is called before torch is imported: an engine whose module
    imports torch inherits it from a class in a module that doesn't.

    Attributes:
        exact: As in `RolloutEngine`.
        in_place: As in `RolloutEngine`.
        asynchronous: As in `RolloutEngine`.
        continuous: As in `RolloutEngine`.
        records_kept_ids: Whether its responses have the ids that truncated sampling kept (`Generation.kept_ids`).
        shares_forward: Whether it calls the same functions on a model as the trainer does. In place on a model of this
            package, such an engine is not compared with the trainer at the start of a run.
    """

    exact: bool = False
    in_place: bool = False
    asynchronous: bool = False
    continuous: bool = False
    records_kept_ids: bool = False
    shares_forward: bool = False

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield one line with key, value and remedy for each setting that the engine can't run.

        Args:
            cfg: Config of a command, which may lack the keys of others.
            ranks: Number of processes of the Trainer; None if it depends on the machine.
        """
        yield from ()

    @classmethod
    def planned_memory(cls, settings: Mapping[str, Any], sizes: RolloutSizes) -> EngineMemory:
        """Return the bytes that an engine takes beside the policy; by default a copy of its weights unless `in_place`.

        Args:
            settings: `rollout.engine` in the config; arguments with a default may be left out.
            sizes: Sizes of a rollout.
        """
        copied = {} if cls.in_place else {"weights of the engine": sizes.weights}
        return EngineMemory(copied, copied)


def check_asynchronous(engine: RolloutEngine | type[EngineTraits]) -> None:
    """Check that an engine, or its class, can sample while the policy trains.

    Raises:
        ValueError: It can't.
    """
    if not engine.asynchronous:
        name = engine.__name__ if isinstance(engine, type) else type(engine).__name__
        raise ValueError(
            f"rollout.iterations_ahead=1: {name} can't sample while the policy trains; set "
            "rollout/engine=vllm_server, or rollout.iterations_ahead=0"
        )


def kept_ids_problem(engine: str, truncation: Truncation) -> str:
    """Return why rollouts ahead can't train on what an engine has sampled, by its name and its truncation."""
    limits = " ".join(f"rollout.{name}={value}" for name, value in truncation.limits().items())
    return (
        f"rollout.iterations_ahead=1 with {limits}: {engine} does not tell which ids it kept, and newer weights would "
        "keep others; set rollout.iterations_ahead=0, or sample from all ids"
    )


@runtime_checkable
class HasReplicas(Protocol):
    """Engine that samples with several models, such as those of servers, which are compared with the trainer's."""

    @property
    def replicas(self) -> Sequence[str]:
        """Names of the models, such as addresses."""
        ...

    def only(self, replica: str) -> AbstractContextManager[None]:
        """Return the context in which one of them gets all requests."""
        ...


@runtime_checkable
class ReadsValues(Protocol):
    """Engine that can read a critic's values from the states that it samples tokens from.

    Where it is `exact` and `in_place`, they are those of the trainer's own pass over the samples, but for rounding.
    """

    def read_values(self, critic: StateCritic | None) -> None:
        """Fill in the `values` of all later responses.

        Args:
            critic: Critic, whose present weights are read each time; None for responses without values.
        """
        ...


@runtime_checkable
class CountsResent(Protocol):
    """Engine that sends requests again that a server has failed."""

    @property
    def resent(self) -> int:
        """Number of such requests."""
        ...


def resent_by(engine: RolloutEngine) -> int | None:
    """Return the number of requests that an engine has sent again, None where it counts none."""
    return engine.resent if isinstance(engine, CountsResent) else None


@runtime_checkable
class SharedByRanks(Protocol):
    """Engine whose model several ranks may hold together. They answer the requests of each of them together."""

    @property
    def ranks(self) -> int:
        """Number of ranks that hold a model together."""
        ...

    def collective_rollout(self) -> AbstractContextManager[None]:
        """Return the context of a rollout, which all ranks enter equally often.

        It ends when those of all ranks that share the engine have. What one of them raises is raised on all.
        """
        ...


def is_shared(engine: RolloutEngine) -> bool:
    """Return whether ranks wait for each other in a rollout, since they share the engine."""
    return isinstance(engine, SharedByRanks) and engine.ranks > 1


def collective_rollout(engine: RolloutEngine) -> AbstractContextManager[None]:
    """Return the context of a rollout with an engine, see `SharedByRanks`; an empty one for other engines."""
    return engine.collective_rollout() if isinstance(engine, SharedByRanks) else nullcontext()


class EnginePolicy(Protocol):
    """Policy as an engine reads it.

    Where the policy is sharded, its model has whole weights only for an engine that is `in_place`, and only between
    `load_weights` and `sleep`.
    """

    @property
    def bundle(self) -> ModelBundle:
        """Model, tokenizer and processor."""
        ...

    def weights(self, *, adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the present weights under the names of their checkpoint, adapters merged.

        With `adapters`, yield those of the adapters alone, under the names of a peft checkpoint.

        Sharded ones are gathered one layer at a time, with all ranks. Each rank takes them once in `load_weights`.
        """
        ...

    def compute(self, work: Callable[[ModelBundle], T]) -> T:
        """Return the result of a function of the present weights.

        All ranks call it together where the policy is sharded, and have to run its layers equally often.
        """
        ...


class EngineFactory(Protocol):
    """Builds the engine of a policy; `rollout.engine` in the config."""

    def __call__(
        self,
        policy: EnginePolicy,
        *,
        forward_context: Callable[[], AbstractContextManager[object]] = ...,
    ) -> RolloutEngine:
        """Build the engine.

        Args:
            policy: Policy whose weights the engine samples with.
            forward_context: Context around the model's forward passes, such as the trainer's autocast.
        """
        ...


def generate(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    *,
    keep: bool,
    check: GenerationCheck | None = None,
) -> list[Generation]:
    """Return the responses to requests, in their order.

    Args:
        engine: Rollout engine.
        requests: As in `RolloutEngine.submit`.
        keep: As in `RolloutEngine.submit`.
        check: Check of the model's responses; None for that of their types alone.

    Raises:
        RolloutError: The engine returned too few responses, some that were not requested, or something else.
    """
    # it imports this module
    from ragen_pl.engines.generation_check import (
        InvalidGeneration,
        finished_responses,
        refused,
        unanswered,
        unrequested,
    )

    engine.submit(requests, keep=keep)
    generations: dict[int, Generation] = {}
    sessions = {request.session for request in requests}
    while len(generations) < len(requests):
        try:
            finished = finished_responses(engine.collect())
        except InvalidGeneration as error:
            raise refused(engine, error) from error
        if not finished:
            raise unanswered(engine, len(requests) - len(generations))
        for session, generation in finished:
            if session not in sessions or session in generations:
                raise unrequested(engine, session)
            generations[session] = generation
    ordered = [generations[request.session] for request in requests]
    if check is not None:
        try:
            check(requests, ordered)
        except InvalidGeneration as error:
            raise refused(engine, error) from error
    return ordered
