"""Attempts at episodes whose environment fails: other environments, the same seeds, the same responses.

The seeds of an episode do not depend on the attempt. So a new attempt is a replay, and adds no bias to what is trained
on: the responses that an earlier attempt had to the same prompts are given again, without the policy, up to the turn at
which it failed. Where the environment shows something else, the policy answers.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ragen_pl.engines.protocol import Generation, Prompt
from ragen_pl.environments.manager import EnvironmentManager, EnvironmentSlot, EpisodeSpec
from ragen_pl.rollout.responders import ForwardingResponder, Response
from ragen_pl.rollout.settings import FailureSettings
from ragen_pl.rollout.turns import Episode, played_trajectories
from ragen_pl.trajectory import EpisodeStatus, FailureCause, Trajectory

log = logging.getLogger(__name__)
# seconds before a second attempt where all environments fail; twice as many before each one after it
_PAUSE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedResponse:
    """A response, with the ids and images of the prompt that it was given to."""

    ids: np.ndarray
    images: list[np.ndarray]
    response: Generation | str

    def answers(self, prompt: Prompt) -> bool:
        """Return whether a prompt is the one that the response was given to."""
        return (
            prompt.patches is None
            and np.array_equal(self.ids, prompt.ids)
            and len(self.images) == len(prompt.images)
            and all(map(np.array_equal, self.images, prompt.images))
        )


@dataclass(kw_only=True, slots=True)
class Attempt:
    """An attempt at an episode.

    Attributes:
        number: Index of the episode in the rollout.
        spec: The episode.
        failed_after: Turns of each earlier attempt when it failed.
        recorded_responses: Those of earlier attempts by turn; None for one that cannot be given again.
        responses: Those of this attempt.
        replayed: Number of turns that had a recorded response.
    """

    number: int
    spec: EpisodeSpec
    failed_after: tuple[int, ...] = ()
    recorded_responses: list[RecordedResponse | None] = field(default_factory=list)
    responses: list[RecordedResponse | None] = field(default_factory=list)
    replayed: int = 0

    def next(self, turns: int) -> Attempt:
        """Return the attempt that follows this one, which has failed after so many turns."""
        return Attempt(
            number=self.number,
            spec=self.spec,
            failed_after=(*self.failed_after, turns),
            recorded_responses=[
                *self.responses,
                *self.recorded_responses[len(self.responses) :],
            ],
        )


class Attempts:
    """The episodes of a rollout: those that wait for an attempt, and the trajectories of the others.

    Args:
        specs: The episodes.
        settings: Number of attempts.
        recorded_responses: Responses to the first turns of each episode; empty for none.
    """

    def __init__(
        self,
        specs: Sequence[EpisodeSpec],
        settings: FailureSettings,
        *,
        recorded_responses: Sequence[Sequence[RecordedResponse]] = (),
    ) -> None:
        self._settings = settings
        of_episodes = recorded_responses or [()] * len(specs)
        self._waiting = deque(
            Attempt(number=number, spec=spec, recorded_responses=[*responses])
            for number, (spec, responses) in enumerate(zip(specs, of_episodes, strict=True))
        )
        self._ended: dict[int, list[Trajectory]] = {}
        self._all_broken = False

    @property
    def ended(self) -> int:
        """Number of episodes without a further attempt."""
        return len(self._ended)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories in the order of the specs, once all episodes have ended."""
        return [one for number in range(len(self._ended)) for one in self._ended[number]]

    def batches(self, size: int) -> Iterator[list[Attempt]]:
        """Yield attempts until all episodes have ended, at most `size` at once; `end` has to follow each time."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
            if self._all_broken:
                # by the attempts, not the batches, of which there may be many
                pause(max(1, *(len(attempt.failed_after) for attempt in batch)))
            yield batch

    def end(self, attempts: Sequence[Attempt], episodes: Sequence[Episode]) -> None:
        """Note how attempts have ended. Episodes that may have another one wait for it, behind the others."""
        broken = 0
        for attempt, episode in zip(attempts, episodes, strict=True):
            cause = episode.slot.cause
            fails = episode.trajectory.status is EpisodeStatus.FAILED
            broken += fails and cause is FailureCause.INFRASTRUCTURE
            made = 1 + len(attempt.failed_after)
            if fails and made < self._settings.attempts_after(cause):
                self._waiting.append(attempt.next(episode.turns_played))
                continue
            trajectories = played_trajectories(episode)
            for trajectory in trajectories:
                trajectory.cause = cause
            # of all seats; noted once
            trajectories[0].failed_after = attempt.failed_after
            trajectories[0].replayed_turns = attempt.replayed
            self._ended[attempt.number] = trajectories
        # what they all need may be on its way back
        self._all_broken = broken == len(attempts)


def open_slots(
    environments: EnvironmentManager, attempts: Sequence[Attempt], settings: FailureSettings
) -> list[EnvironmentSlot]:
    """Return the slots of attempts.

    Raises:
        Exception: An environment cannot be made. Where that may be the fault of infrastructure, it is tried again.
    """
    for made in range(1, settings.attempts):
        try:
            return environments.open([attempt.spec for attempt in attempts])
        except Exception as error:
            from ragen_pl.environments.causes import cause_of

            if cause_of(error) is FailureCause.DATA:
                raise
            log.warning("an environment cannot be made (%s); this is tried again", error)
            pause(made)
    return environments.open([attempt.spec for attempt in attempts])


def pause(number: int) -> None:
    """Wait for something that is broken: longer with each pause, and so long that not all return at once."""
    time.sleep(_PAUSE_S * 2 ** (number - 1) * random.SystemRandom().uniform(0.5, 1.0))


@dataclass(kw_only=True, slots=True)
class ReplayingResponder(ForwardingResponder):
    """Responder that gives the recorded responses of attempts again, and leaves the others to another responder.

    Attributes:
        attempts: Attempts under way by the numbers of their episodes.
    """

    attempts: Sequence[Attempt] = ()
    _repeated: list[tuple[int, Response]] = field(init=False, default_factory=list)
    _asked: dict[int, tuple[Episode, Prompt]] = field(init=False, default_factory=dict)

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Give recorded responses to the present turns again, and ask for the others."""
        unknown = []
        for episode in episodes:
            attempt, turn = self.attempts[episode.number], episode.turns_played
            earlier = attempt.recorded_responses
            recorded = earlier[turn] if turn < len(earlier) else None
            if recorded is not None and recorded.answers(episode.prompt):
                attempt.responses.append(recorded)
                attempt.replayed += 1
                self._repeated.append((episode.number, recorded.response))
            else:
                unknown.append(episode)
                self._asked[episode.number] = (episode, episode.prompt)
        if unknown:
            self.responder.submit(unknown)

    def collect(self, *, wait: bool = True) -> list[tuple[int, Response]]:
        """Return the responses since the last call, each with its episode's number."""
        repeated, self._repeated = self._repeated, []
        found = self.responder.collect(wait=wait and not repeated) if self._asked else []
        for number, response in found:
            episode, prompt = self._asked.pop(number)
            recorded = None
            # a prompt that the responder has shortened depends on more than the conversation
            if response is not None and episode.prompt is prompt:
                recorded = RecordedResponse(ids=prompt.ids, images=prompt.images, response=response)
            self.attempts[number].responses.append(recorded)
        return [*repeated, *found]

    def release(self) -> None:
        """Free the state of the episodes submitted so far."""
        self._repeated.clear()
        self._asked.clear()
        self.responder.release()
