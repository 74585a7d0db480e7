"""AgentProxy: the turn loop that joins environments, contexts and a responder.

Many episodes are played at once, and each continues as soon as its response is there. The random draws of a
turn depend on its own seed (group, member, turn) only. The number of environments, the number of ranks and
the order in which responses finish change no trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from ragen_pl.checked import checked
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import Generation
from ragen_pl.environments.manager import (
    EnvironmentManager,
    EnvironmentSlot,
    EpisodeSpec,
    TurnResult,
)
from ragen_pl.models.truncation import Truncation
from ragen_pl.prompts.conversation import Context, Conversation
from ragen_pl.prompts.parsing import ParsedResponse, label_tokens, parse_response
from ragen_pl.rollout.attempts import Attempts, ReplayingResponder, opened
from ragen_pl.rollout.failures import FailureLog
from ragen_pl.rollout.responders import Episode, Responder
from ragen_pl.rollout.settings import EpisodeSettings, FailureSettings
from ragen_pl.rollout.stall import StallWatch
from ragen_pl.trajectory import EpisodeStatus, Trajectory, Turn

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
        environments: creates, resets and steps the environments.
        context: turns observations and responses into prompts.
        failures: attempts at episodes whose environment fails.
        failure_log: logs the errors of those that are given up.
    """

    environments: EnvironmentManager
    context: ContextT
    failures: FailureSettings = field(default_factory=FailureSettings)
    failure_log: FailureLog = field(default_factory=FailureLog)

    @property
    def truncation(self) -> Truncation | None:
        """Ids that sampling keeps; None for all."""
        return truncation_of(self)

    def rollout(
        self,
        responder: Responder,
        episode_specs: Sequence[EpisodeSpec],
        *,
        seed_key: Sequence[int | str],
        progress: Progress | None = None,
        on_turn: OnTurn | None = None,
    ) -> list[Trajectory]:
        """Play episodes and return their trajectories, in the order of the specs.

        An episode that fails is played again in another environment, see `FailureSettings`.

        Args:
            responder: answers the turns.
            episode_specs: the episodes; `group` and `member` enter the sampling seeds.
            seed_key: run seed, purpose and iteration, with which the sampling seeds start.
            progress: called while episodes are playing, and once at the end with all of them done.
            on_turn: called after each turn.
        """
        attempts = Attempts(episode_specs, self.failures)
        replaying = ReplayingResponder(responder=responder)
        with responder.collective_rollout():
            for batch in attempts.batches(self.num_envs):
                slots = opened(self.environments, batch, self.failures)
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
        trajectories = attempts.trajectories
        self.failure_log.note(trajectories)
        if progress is not None:
            progress(len(episode_specs), len(episode_specs))
        return trajectories

    def _begin(
        self, slots: Sequence[EnvironmentSlot], responder: Responder, seed_key: Sequence[int | str]
    ) -> list[Episode]:
        episodes = []
        for number, slot in enumerate(slots):
            conversation = self.context.start(
                self.environments.instructions(slot), tools=self.environments.tools(slot)
            )
            episode = Episode(
                number=number,
                slot=slot,
                conversation=conversation,
                trajectory=_new_trajectory(slot, conversation),
                prompt_format=self.environments.prompt_format,
                max_response_tokens=self.max_response_tokens,
                seed_key=(*seed_key, slot.spec.group, slot.spec.member),
                samples=responder.samples,
                truncation=self.truncation,
                done=slot.error is not None,
            )
            if not episode.done:
                self._observe(episode)
            episodes.append(episode)
        return episodes

    def _observe(self, episode: Episode) -> None:
        """Make the prompt of the next turn, or end the episode where no room is left for a response."""
        assert episode.slot.observation is not None
        prompt = self.context.observe(
            episode.conversation, episode.slot.observation, max_turns=self.environments.max_turns
        )
        episode.prompt = prompt
        episode.temperature = self._temperature(episode)
        if len(prompt.ids) + self.max_response_tokens > self.context.max_tokens:
            if not episode.trajectory.turns:
                raise RolloutError(
                    f"the first prompt has {len(prompt.ids)} tokens and a response may have "
                    f"{self.max_response_tokens}, more than context.max_tokens={self.context.max_tokens}; raise it"
                )
            _end(episode, EpisodeStatus.TRUNCATED)

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
        stepping: dict[int, _Answer] = {}
        while playing:
            watch.check()
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
                _end(episode, EpisodeStatus.FAILED if failed else EpisodeStatus.TRUNCATED)
            answers = [
                self._parse(playing[number], response)
                for number, response in responses
                if response is not None
            ]
            stepping |= self._start(answers)
            turned = self._finish(
                stepping,
                all_of_them=not responder.continuous,
                wait=not asked,
                watch=watch,
                on_turn=on_turn,
            )
            ready = [episode for episode in turned if not episode.done]
            for episode in [*stopped, *turned]:
                if episode.done:
                    del playing[episode.number]
            if stopped or turned:
                yield len(playing)

    def _start(self, answers: Sequence[_Answer]) -> dict[int, _Answer]:
        """Start to carry out responses; return them by the numbers of their turns."""
        numbers = self.environments.start(
            [answer.episode.slot for answer in answers], [answer.parsed for answer in answers]
        )
        return dict(zip(numbers, answers, strict=True))

    def _finish(
        self,
        stepping: dict[int, _Answer],
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
        for answer, result in ended:
            self._continue(answer, result)
            if on_turn is not None:
                on_turn(answer.episode)
        return [answer.episode for answer, _ in ended]

    def _parse(self, episode: Episode, response: Generation | str) -> _Answer:
        generation = self._encode(response) if isinstance(response, str) else response
        pieces = self.context.pieces(generation.ids)
        text = self.context.opening + "".join(pieces)
        names, max_actions = episode.slot.action_names, self.environments.max_actions_per_turn
        native = episode.conversation.native
        if native is not None:
            parsed = native.parse(text, names, max_actions=max_actions)
        else:
            parsed = parse_response(
                text,
                names,
                max_actions=max_actions,
                prompt_format=self.environments.prompt_format,
                start=self.context.words_start(text),
            )
        # a response without its end is no answer, even where it looks like one
        if generation.hit_length_limit:
            parsed.actions, parsed.calls = [], []
        return _Answer(
            episode=episode,
            generation=generation,
            opening=self.context.opening,
            pieces=pieces,
            parsed=parsed,
            state_description=episode.slot.state_description,
            state_key=episode.slot.state_key,
        )

    def _encode(self, text: str) -> Generation:
        """Return a written response as the tokens of a model."""
        ids = self.context.encode_response(text)
        prompt_format = self.environments.prompt_format
        if len(ids) > self.max_response_tokens and prompt_format.statements:
            raise RolloutError(
                f"rollout.max_response_tokens={self.max_response_tokens}: a scripted response in format "
                f"{prompt_format} has {len(ids)} tokens; raise it"
            )
        return Generation(
            ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            entropy=0.0,
            hit_length_limit=False,
            version=0,
        )

    def _continue(self, answer: _Answer, result: TurnResult) -> None:
        """Record a turn and make the next prompt, or end the episode."""
        episode, turn = answer.episode, _turn(answer, result)
        trajectory = episode.trajectory
        trajectory.turns.append(turn)
        trajectory.success = result.success
        self.context.response(
            episode.conversation,
            ids=turn.response_ids,
            text=turn.response_text,
            actions=turn.actions,
            calls=answer.parsed.calls,
        )
        if result.error is not None:
            trajectory.error = result.error
        # a truncated episode keeps the prompt of its last state, to bootstrap from
        if result.status in (None, EpisodeStatus.TRUNCATED):
            self._observe(episode)
        if result.status is not None and not episode.done:
            _end(episode, result.status)


@dataclass(kw_only=True, slots=True)
class _Answer:
    """A response with the state of its episode before it is carried out."""

    episode: Episode
    generation: Generation
    opening: str
    pieces: list[str]
    parsed: ParsedResponse
    state_description: str | None
    state_key: str | None


def _new_trajectory(slot: EnvironmentSlot, conversation: Conversation) -> Trajectory:
    return Trajectory(
        group=slot.spec.group,
        member=slot.spec.member,
        seed=slot.spec.seed,
        turns=[],
        status=EpisodeStatus.FAILED,
        success=False,
        difficulty=slot.difficulty,
        error=slot.error,
        system_prompt_length=len(conversation.system_prompt_ids),
    )


def _turn(answer: _Answer, result: TurnResult) -> Turn:
    episode, generation, parsed = answer.episode, answer.generation, answer.parsed
    ends = len(answer.opening) + np.cumsum([len(piece) for piece in answer.pieces])
    return Turn(
        observation=episode.conversation.observation,
        prompt_ids=episode.prompt.ids,
        prompt_images=episode.prompt.images,
        response_ids=generation.ids,
        response_logprobs=generation.logprobs,
        response_entropy=generation.entropy,
        spans=label_tokens(parsed, ends.tolist(), end_sampled=not generation.hit_length_limit),
        response_text="".join(answer.pieces),
        think=parsed.think,
        actions=result.actions,
        action_is_valid=parsed.valid and result.valid,
        action_is_effective=result.effective,
        hit_length_limit=generation.hit_length_limit,
        temperature=episode.temperature,
        reward_terms=result.reward_terms,
        info=result.info,
        statements=result.statements,
        state_description=answer.state_description,
        state_key=answer.state_key,
        prompt_patches=episode.prompt.patches,
        turns_left_out=episode.prompt.left_out,
    )


def _end(episode: Episode, status: EpisodeStatus) -> None:
    """End an episode; a truncated one keeps its last prompt, to bootstrap from."""
    episode.done = True
    trajectory = episode.trajectory
    trajectory.status = status
    if status is EpisodeStatus.TRUNCATED:
        trajectory.final_prompt_ids = episode.prompt.ids
        trajectory.final_images = episode.prompt.images
        trajectory.final_patches = episode.prompt.patches
