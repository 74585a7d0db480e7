"""Responders: policies that answer a turn. The policy behind an engine, or anything that writes text.

`AgentProxy` hands a responder the episodes whose turn it is. Responses may come back in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.generation_check import (
    GenerationCheck,
    InvalidGeneration,
    finished_responses,
    refused,
    unanswered,
    unrequested,
)
from ragen_pl.engines.protocol import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    collective_rollout,
)
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.turns import Episode

Response = Generation | str | None
"""A sampled response, the text of a written one, or None to stop the episode."""


class Responder(Protocol):
    """Answers turns."""

    @property
    def samples(self) -> bool:
        """Whether responses are drawn at the episode's temperature; otherwise turns record 1."""
        ...

    @property
    def continuous(self) -> bool:
        """Whether episodes may be submitted while others wait for their responses, in any order."""
        ...

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Start on the present turns of these episodes."""
        ...

    def collect(self, *, wait: bool = True) -> list[tuple[int, Response]]:
        """Return the responses finished since the last call, each with its episode's number.

        Args:
            wait: Wait for at least one response where any is under way.
        """
        ...

    def release(self) -> None:
        """Free the state of the episodes submitted so far."""
        ...

    def collective_rollout(self) -> AbstractContextManager[None]:
        """Return the context of a rollout, in which ranks may answer each other's turns."""
        ...


@dataclass(kw_only=True, slots=True)
class ForwardingResponder:
    """Base of responders that change how another one is asked.

    Attributes:
        responder: The other one.
    """

    responder: Responder

    @property
    def samples(self) -> bool:
        """As the other responder."""
        return self.responder.samples

    @property
    def continuous(self) -> bool:
        """As the other responder."""
        return self.responder.continuous

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Start on the present turns of these episodes."""
        self.responder.submit(episodes)

    def collect(self, *, wait: bool = True) -> list[tuple[int, Response]]:
        """Return the responses finished since the last call, each with its episode's number."""
        return self.responder.collect(wait=wait)

    def release(self) -> None:
        """Free the state of the episodes submitted so far."""
        self.responder.release()

    def collective_rollout(self) -> AbstractContextManager[None]:
        """As the other responder."""
        return self.responder.collective_rollout()


@dataclass(kw_only=True, slots=True)
class EngineResponder:
    """The policy behind a rollout engine.

    Attributes:
        engine: Samples the responses.
        context: The context manager that makes the prompts.
        greedy: Take the most probable tokens instead of sampling.
        version: The weights that responses must be sampled with; None takes any.
    """

    engine: RolloutEngine
    context: ContextManager
    greedy: bool = False
    version: int | None = None
    _pending: dict[int, GenerationRequest] = field(init=False, default_factory=dict)
    _is_possible: GenerationCheck = field(init=False)

    def __post_init__(self) -> None:
        self._is_possible = GenerationCheck.of(self.context.bundle)

    @property
    def samples(self) -> bool:
        """Whether responses are sampled."""
        return not self.greedy

    @property
    def continuous(self) -> bool:
        """Whether the engine is continuous and has no other work between the turns."""
        return self.engine.continuous and not self.context.leave_out

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Request a response for each episode; with `context.leave_out`, shorten the prompts first."""
        if self.context.leave_out:
            self._leave_out(episodes)
        requests = [self._request(episode) for episode in episodes]
        self.engine.submit(requests, keep=self.context.grows)
        self._pending |= {request.session: request for request in requests}

    def collect(self, *, wait: bool = True) -> list[tuple[int, Response]]:
        """Return the generations that have finished; with `context.leave_out`, wait for all of them.

        Raises:
            RolloutError: A response was sampled with other weights, or no policy can have sampled it.
        """
        finished = self._collected(wait=wait)
        # occlusion scores need the engine to themselves
        while self.context.leave_out and len(finished) < len(self._pending):
            finished += self._collected()
        self._check(finished)
        return list(finished)

    def _collected(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        try:
            finished = finished_responses(self.engine.collect(wait=wait))
        except InvalidGeneration as error:
            raise refused(self.engine, error) from error
        if wait and self._pending and not finished:
            raise unanswered(self.engine, len(self._pending))
        return finished

    def release(self) -> None:
        """Free the engine's sessions."""
        self._pending.clear()
        self.engine.release()

    def collective_rollout(self) -> AbstractContextManager[None]:
        """Return the context of a rollout with the engine."""
        return collective_rollout(self.engine)

    def _check(self, finished: Sequence[tuple[int, Generation]]) -> None:
        generations = [generation for _, generation in finished]
        for generation in generations:
            if self.version is not None and generation.version != self.version:
                raise RolloutError(
                    f"the rollout engine sampled a response with the weights of step {generation.version}, expected "
                    f"step {self.version}; it has not loaded the policy's present weights"
                )
        try:
            requests = [self._pending.pop(session) for session, _ in finished]
        except KeyError as error:
            raise unrequested(self.engine, error.args[0]) from error
        try:
            self._is_possible(requests, generations)
        except InvalidGeneration as error:
            raise refused(self.engine, error) from error

    def _request(self, episode: Episode) -> GenerationRequest:
        return GenerationRequest(
            session=episode.number,
            prompt=episode.prompt,
            max_tokens=episode.max_response_tokens,
            temperature=0.0 if self.greedy else episode.temperature,
            seed=episode.seed,
            truncation=None if self.greedy else episode.truncation,
            group=episode.slot.spec.group,
        )

    def _leave_out(self, episodes: Sequence[Episode]) -> None:
        """Remove from the prompts the parts that the policy's greedy response depends on least."""
        from ragen_pl.engines.occlusion import occlusion_scores

        scores = occlusion_scores(
            self.context.bundle,
            self.engine,
            [episode.prompt for episode in episodes],
            [self.context.candidates(episode.conversation) for episode in episodes],
            max_tokens=[episode.max_response_tokens for episode in episodes],
        )
        for episode, candidate_scores in zip(episodes, scores, strict=True):
            episode.prompt = self.context.narrow(episode.conversation, candidate_scores)


@dataclass(kw_only=True, slots=True)
class TextResponder(ABC):
    """Base of responders that write their responses as text, one turn at a time."""

    _written: list[tuple[int, str | None]] = field(init=False, default_factory=list)

    @property
    def samples(self) -> bool:
        """Written responses have no temperature."""
        return False

    @property
    def continuous(self) -> bool:
        """All responses are written at once."""
        return False

    @abstractmethod
    def respond(self, episode: Episode) -> str | None:
        """Return the response to the present turn, in the episode's prompt format; None to stop.

        With an error in its trajectory the episode has failed then, else it is truncated.
        """

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Write the responses."""
        self._written += [(episode.number, self.respond(episode)) for episode in episodes]

    def collect(self, *, wait: bool = True) -> list[tuple[int, Response]]:
        """Return the responses written since the last call."""
        written, self._written = self._written, []
        return list(written)

    def release(self) -> None:
        """Drop responses that were not collected."""
        self._written.clear()

    def collective_rollout(self) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()
