"""AgentProxy: the turn loop that joins environments, contexts and a responder.

Many episodes are played at once, and each continues as soon as its response is there. The random draws of a
turn depend on its own seed (group, member, turn) only. The number of environments, the number of ranks and
the order in which responses finish change no trajectory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from ragen_pl.base.checked import checked
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import Generation
from ragen_pl.environments.manager import (
    EnvironmentManager,
    EnvironmentSlot,
    EpisodeSpec,
    TurnResult,
)
from ragen_pl.models.truncation import Truncation
from ragen_pl.prompts.conversation import Context
from ragen_pl.prompts.hint import Hint
from ragen_pl.rollout.actions import ActionTurn
from ragen_pl.rollout.attempts import Attempts, RecordedResponse, ReplayingResponder, open_slots
from ragen_pl.rollout.failures import FailureLog
from ragen_pl.rollout.responders import Responder
from ragen_pl.rollout.settings import EpisodeSettings, FailureSettings
from ragen_pl.rollout.stall import StallWatch
from ragen_pl.rollout.turns import (
    Episode,
    PendingTurn,
    PresentTurn,
    Seat,
    TurnSettings,
    end_episode,
    new_trajectory,
    pay_seats,
    sampled,
)
from ragen_pl.trajectory import EpisodeStatus, Trajectory

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Receives the number of episodes done and the number of all."""

OnTurn = Callable[[Episode], None]
"""Receives an episode after each of its turns."""

ContextT = TypeVar("ContextT", bound=Context)

# waits for environments while the engine has requests under way, and otherwise
_SHORT_S, _LONG_S = 0.001, 1.0


def truncation_of(settings: EpisodeSettings) -> Truncation | None:
    """Return the ids that sampling keeps by these settings; None for all."""
    return Truncation(top_p=settings.top_p, top_k=settings.top_k, min_p=settings.min_p) or None


@checked
@dataclass(kw_only=True, slots=True)
class AgentProxy(EpisodeSettings, Generic[ContextT]):
    """Play episodes with a responder, by the keys of `EpisodeSettings`.

    Attributes:
        environments: Creates, resets and steps the environments.
        context: Turns observations and responses into prompts.
        hint: What a teacher reads in place of observations, in the rollouts of training; None without a teacher that
            reads hints.
        failures: Attempts at episodes whose environment fails.
        failure_log: Logs the errors of those that are given up.
    """

    environments: EnvironmentManager
    context: ContextT
    hint: Hint | None = None
    failures: FailureSettings = field(default_factory=FailureSettings)
    failure_log: FailureLog = field(default_factory=FailureLog)

    @property
    def truncation(self) -> Truncation | None:
        """Ids that sampling keeps; None for all."""
        return truncation_of(self)

    def response_limit(self, manager: EnvironmentManager) -> int:
        """Return the longest response in a manager's environments."""
        return manager.max_response_tokens or self.max_response_tokens

    def rollout(
        self,
        responder: Responder,
        episode_specs: Sequence[EpisodeSpec],
        *,
        seed_key: Sequence[int | str],
        progress: Progress | None = None,
        on_turn: OnTurn | None = None,
        recorded_responses: Sequence[Sequence[RecordedResponse]] = (),
    ) -> list[Trajectory]:
        """Play episodes and return their trajectories, in the order of the specs.

        A game of several seats gives one trajectory for each seat that has had a turn, in their order. Their group
        is that of the spec times the number of seats, plus the seat.

        An episode that fails is played again in another environment, see `FailureSettings`.

        Args:
            responder: Answers the turns.
            episode_specs: The episodes; `group` and `member` enter the sampling seeds.
            seed_key: Run seed, purpose and iteration, with which the sampling seeds start.
            progress: Called while episodes are playing, and once at the end with all of them done.
            on_turn: Called after each turn, in a game of several seats when the next one is to move.
            recorded_responses: Responses to the first turns of each episode, which are given where their prompts come
                again; the responder answers the others. `Trajectory.replayed_turns` counts them.
        """
        attempts = Attempts(episode_specs, self.failures, recorded_responses=recorded_responses)
        replaying = ReplayingResponder(responder=responder)
        crowded = 0
        with responder.collective_rollout():
            for batch in attempts.batches(self.num_envs):
                slots = open_slots(self.environments, batch, self.failures)
                replaying.attempts = batch
                try:
                    episodes = self._begin(slots, replaying, seed_key)
                    with StallWatch(self.failures.stall_s) as watch:
                        for playing in self._turns(
                            episodes, replaying, watch=watch, on_turn=on_turn
                        ):
                            if progress is not None and playing:
                                progress(attempts.ended + len(batch) - playing, len(episode_specs))
                    replaying.release()
                finally:
                    self.environments.close(slots)
                attempts.end(batch, episodes)
                crowded += sum(episode.crowded for episode in episodes)
        if crowded:
            log.warning(
                "%d of %d games ended at a seat's first prompt: with what another seat wrote, it leaves no room for a "
                "response; raise context.max_tokens=%d",
                crowded,
                len(episode_specs),
                self.context.max_tokens,
            )
        trajectories = _with_seats(attempts.trajectories)
        self.failure_log.note(trajectories)
        if progress is not None:
            progress(len(episode_specs), len(episode_specs))
        return trajectories

    def _begin(
        self, slots: Sequence[EnvironmentSlot], responder: Responder, seed_key: Sequence[int | str]
    ) -> list[Episode]:
        episodes, truncation = [], self.truncation
        for number, slot in enumerate(slots):
            manager = self.environments.of(slot)
            starts = [
                partial(
                    self.context.start,
                    manager.instructions(slot, seat=seat),
                    tools=manager.tools(slot, seat=seat),
                )
                for seat in range(slot.seats)
            ]
            has_teacher = self.hint is not None and responder.samples
            episode = Episode(
                number=number,
                slot=slot,
                seats=[
                    Seat(
                        conversation=(conversation := start()),
                        trajectory=new_trajectory(slot, conversation, seat=seat),
                        teacher=start() if has_teacher else None,
                    )
                    for seat, start in enumerate(starts)
                ],
                turn=ActionTurn(),
                prompt_format=manager.prompt_format,
                max_response_tokens=self.response_limit(manager),
                seed_key=(*seed_key, slot.spec.group, slot.spec.member),
                samples=responder.samples,
                truncation=truncation,
                done=slot.error is not None,
            )
            if not episode.done:
                self._observe(episode)
            episodes.append(episode)
        return episodes

    def _observe(self, episode: Episode) -> None:
        """Begin the next turn, or end the episode where no room is left for a response."""
        episode.seat, episode.turn = episode.slot.seat, self._present_turn(episode.slot)
        manager = self.environments.of(episode.slot)
        settings = TurnSettings(
            max_turns=manager.max_turns,
            max_response_tokens=self.response_limit(manager),
            temperature=self._temperature(episode),
            hint=self.hint,
        )
        if not episode.turn.begin(episode, self.context, settings):
            self._end(episode, EpisodeStatus.TRUNCATED)

    def _present_turn(self, slot: EnvironmentSlot) -> PresentTurn:
        """Return the turn that an environment waits for."""
        observation = slot.observation
        assert observation is not None
        if observation.request is None:
            return ActionTurn()
        # of agent programs only
        from ragen_pl.rollout.requests import RequestTurn

        return RequestTurn(
            request=observation.request,
            images=observation.images,
            penalty=lambda: self.environments.of(slot).penalty(slot.members),
        )

    def _end(self, episode: Episode, status: EpisodeStatus) -> None:
        max_turns = self.environments.of(episode.slot).max_turns
        end_episode(episode, status, context=self.context, max_turns=max_turns)

    def _temperature(self, episode: Episode) -> float:
        """Return the temperature of the present turn; log-probs of greedy and written responses are at 1."""
        if not episode.samples:
            return 1.0
        if self.adaptive_temperature is None:
            return self.temperature
        return self.adaptive_temperature(self.temperature, episode.trajectory.turns)

    def _turns(
        self,
        episodes: Sequence[Episode],
        responder: Responder,
        *,
        watch: StallWatch,
        on_turn: OnTurn | None,
    ) -> Iterator[int]:
        """Play episodes to their ends. An environment steps while other episodes wait for their responses.

        Args:
            episodes: Opened episodes.
            responder: Answers the turns.
            watch: Notes turns that have ended.
            on_turn: Called after each turn.

        Yields:
            Number of episodes that still play, whenever some of them had a turn.
        """
        playing = {episode.number: episode for episode in episodes if not episode.done}
        ready, asked = list(playing.values()), 0
        stepping: dict[int, PendingTurn] = {}
        while playing:
            watch.check()
            refused = [(episode, episode.turn.refused(episode)) for episode in ready]
            stepping |= self._start([turn for _, turn in refused if turn is not None])
            ready = [episode for episode, turn in refused if turn is None]
            if ready:
                responder.submit(ready)
                asked += len(ready)
            responses = responder.collect(wait=not stepping) if asked else []
            if not responses and not stepping:
                raise RuntimeError(f"no response came for {len(playing)} episodes that wait")
            asked -= len(responses)
            stopped = [playing[number] for number, response in responses if response is None]
            for episode in stopped:
                failed = episode.trajectory.error is not None
                self._end(episode, EpisodeStatus.FAILED if failed else EpisodeStatus.TRUNCATED)
            answered = [
                self._read(playing[number], response)
                for number, response in responses
                if response is not None
            ]
            stepping |= self._start([turn for turn in answered if turn.episode.turn.acts])
            written = [turn for turn in answered if not turn.episode.turn.acts]
            summarized = [self._summarize(turn, on_turn=on_turn) for turn in written]
            turned = self._finish(
                stepping,
                all_of_them=not responder.continuous,
                wait=not asked,
                watch=watch,
                on_turn=on_turn,
            )
            turned += summarized
            ready = [episode for episode in turned if not episode.done]
            for episode in [*stopped, *turned]:
                if episode.done:
                    del playing[episode.number]
            if stopped or turned:
                yield len(playing)

    def _start(self, turns: Sequence[PendingTurn]) -> dict[int, PendingTurn]:
        """Start to carry out responses; return them by the numbers of their turns."""
        numbers = self.environments.start(
            [turn.episode.slot for turn in turns], [turn.parsed for turn in turns]
        )
        return dict(zip(numbers, turns, strict=True))

    def _finish(
        self,
        stepping: dict[int, PendingTurn],
        *,
        all_of_them: bool,
        wait: bool,
        watch: StallWatch,
        on_turn: OnTurn | None,
    ) -> list[Episode]:
        """Record the turns that have ended and return their episodes, in the order of the responses.

        Args:
            stepping: Responses under way by the numbers of their turns; those that ended are removed.
            all_of_them: Whether to wait for all. Otherwise the batches of a batch engine would depend on time.
            wait: Whether to wait for the first one, for a while.
            watch: Notes turns that have ended.
            on_turn: Called after each turn.
        """
        results: dict[int, TurnResult] = {}
        while len(results) < len(stepping):
            wait_s = _LONG_S if wait or all_of_them else _SHORT_S
            found = self.environments.finished(wait_s=wait_s)
            watch.check(turn_ended=bool(found))
            results.update(found)
            if not all_of_them:
                break
        ended = [(stepping.pop(number), results[number]) for number in sorted(results)]
        for pending, result in ended:
            is_turn = self._continue(pending, result)
            if on_turn is not None and is_turn:
                on_turn(pending.episode)
        return [pending.episode for pending, _ in ended]

    def _summarize(self, pending: PendingTurn, *, on_turn: OnTurn | None) -> Episode:
        """Record a summary, and go on with the conversation that it begins."""
        episode = pending.episode
        episode.turn.record(pending, TurnResult(), self.context)
        if not episode.fits(self.context):
            self._end(episode, EpisodeStatus.TRUNCATED)
        if on_turn is not None:
            on_turn(episode)
        return episode

    def _read(self, episode: Episode, response: Generation | str) -> PendingTurn:
        generation = sampled(response, self.context)
        has_statements = episode.turn.acts and episode.prompt_format.statements
        manager = self.environments.of(episode.slot)
        if isinstance(response, str) and has_statements:
            self._check_written(generation, manager)
        return episode.turn.read(
            episode,
            generation,
            self.context,
            max_actions=manager.max_actions_per_turn,
        )

    def _check_written(self, generation: Generation, manager: EnvironmentManager) -> None:
        if len(generation.ids) > self.response_limit(manager):
            raise RolloutError(
                f"rollout.max_response_tokens={self.response_limit(manager)}: a scripted response in format "
                f"{manager.prompt_format} has {len(generation.ids)} tokens; raise it"
            )

    def _continue(self, pending: PendingTurn, result: TurnResult) -> bool:
        """Record a turn, and make the next prompt or end the episode; return whether there was a turn.

        A program's request that got no response is none, nor is a response that a program did not get.
        """
        episode, trajectory = pending.episode, pending.episode.trajectory
        is_turn = episode.turn.record(pending, result, self.context)
        trajectory.success = bool(result.success)
        pay_seats(episode, result)
        if result.error is not None:
            trajectory.error = result.error
        # a truncated episode keeps the prompt of its last state, to bootstrap from
        if result.status in (None, EpisodeStatus.TRUNCATED):
            self._observe(episode)
        if result.status is not None and not episode.done:
            self._end(episode, result.status)
        return is_turn


def _with_seats(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories of a rollout, with one for each seat of an episode whose reset failed.

    How many seats it has is known from the other episodes only, whichever environments were open beside it.

    Raises:
        RolloutError: They differ, so that the groups of some would have the numbers of others.
    """
    known = {one.seats for one in trajectories if one.seats > 1 or one.turns}
    if len(known) > 1:
        found = " and ".join(map(str, sorted(known)))
        raise RolloutError(
            f"environments of one rollout have {found} seats; give all of them as many"
        )
    seats = max(known, default=1)
    return [
        of_seat
        for one in trajectories
        for of_seat in ([one] if one.seats == seats else _of_each_seat(one, seats))
    ]


def _of_each_seat(failed: Trajectory, seats: int) -> list[Trajectory]:
    """Return a trajectory without turns for each seat; the first one has the earlier attempts."""
    return [
        replace(
            failed,
            group=seats * failed.group + seat,
            seat=seat,
            seats=seats,
            turns=[],
            user_errors=[],
            final_images=[],
            failed_after=() if seat else failed.failed_after,
        )
        for seat in range(seats)
    ]
