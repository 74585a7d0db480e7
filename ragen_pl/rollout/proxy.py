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
from ragen_pl.prompts.conversation import Context
from ragen_pl.prompts.parsing import parse_response
from ragen_pl.prompts.requests import RequestRefusedError, record
from ragen_pl.rollout.failures import FailureLog
from ragen_pl.rollout.requests import answer_request, refusal, too_long
from ragen_pl.rollout.responders import Episode, Responder
from ragen_pl.rollout.settings import EpisodeSettings
from ragen_pl.rollout.summaries import begin_summary, summary_turn
from ragen_pl.rollout.turns import (
    Answer,
    end_episode,
    new_trajectory,
    played_turn,
    refused_answer,
)
from ragen_pl.trajectory import EpisodeStatus, Trajectory, add_terms

Progress = Callable[[int, int], None]
"""Receives the number of episodes done and the number of all."""

OnTurn = Callable[[Episode], None]
"""Receives an episode after each of its turns."""

ContextT = TypeVar("ContextT", bound=Context)

# wait for environments while the engine has requests under way
_SHORT_S = 0.001


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
        failures: logs the errors of failed episodes.
    """

    environments: EnvironmentManager
    context: ContextT
    failures: FailureLog = field(default_factory=FailureLog)

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

        Args:
            responder: answers the turns.
            episode_specs: the episodes; `group` and `member` enter the sampling seeds.
            seed_key: run seed, purpose and iteration, with which the sampling seeds start.
            progress: called while episodes are playing, and once at the end with all of them done.
            on_turn: called after each turn.
        """
        trajectories: list[Trajectory] = []
        with responder.collective_rollout():
            for first in range(0, len(episode_specs), self.num_envs):
                specs = episode_specs[first : first + self.num_envs]
                slots = self.environments.open(specs)
                try:
                    episodes = self._begin(slots, responder, seed_key)
                    for playing in self._turns(episodes, responder, on_turn=on_turn):
                        if progress is not None and playing:
                            progress(first + len(episodes) - playing, len(episode_specs))
                    responder.release()
                finally:
                    self.environments.close(slots)
                trajectories.extend(episode.trajectory for episode in episodes)
        self.failures.note(trajectories)
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
                trajectory=new_trajectory(slot, conversation),
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
        request, episode.refusal = episode.request, None
        try:
            prompt = self.context.observe(
                episode.conversation,
                episode.slot.observation,
                max_turns=self.environments.max_turns,
            )
        except RequestRefusedError as error:
            episode.refusal = refusal(error.code, str(error))
            return
        episode.prompt = prompt
        episode.temperature = self._temperature(episode)
        if request is not None and request.max_tokens is not None:
            episode.max_response_tokens = min(request.max_tokens, self.max_response_tokens)
        else:
            episode.max_response_tokens = self.max_response_tokens
            if begin_summary(self.context, episode, response_tokens=self.max_response_tokens):
                return
        if len(prompt.ids) + episode.max_response_tokens > self.context.max_tokens:
            if request is not None:
                long = too_long(
                    len(prompt.ids), episode.max_response_tokens, context=self.context.max_tokens
                )
                episode.refusal = refusal(long.code, str(long))
                return
            if not episode.trajectory.turns:
                raise RolloutError(
                    f"the first prompt has {len(prompt.ids)} tokens and a response may have "
                    f"{self.max_response_tokens}, more than context.max_tokens={self.context.max_tokens}; raise it"
                )
            end_episode(episode, EpisodeStatus.TRUNCATED)

    def _temperature(self, episode: Episode) -> float:
        """Return the temperature of the present turn; log-probs of greedy and written responses are at 1."""
        if not episode.samples:
            return 1.0
        if self.adaptive_temperature is None:
            return self.temperature
        return self.adaptive_temperature(self.temperature, episode.trajectory.turns)

    def _turns(
        self, episodes: Sequence[Episode], responder: Responder, *, on_turn: OnTurn | None
    ) -> Iterator[int]:
        """Play episodes to their ends. An environment steps while other episodes wait for their responses.

        Args:
            episodes: Opened episodes.
            responder: Answers the turns.
            on_turn: Called after each turn.

        Yields:
            Number of episodes that still play, whenever some of them had a turn.
        """
        playing = {episode.number: episode for episode in episodes if not episode.done}
        ready, asked = list(playing.values()), 0
        stepping: dict[int, Answer] = {}
        while playing:
            refused = [episode for episode in ready if episode.refusal is not None]
            stepping |= self._start([refused_answer(episode) for episode in refused])
            ready = [episode for episode in ready if episode.refusal is None]
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
                end_episode(episode, EpisodeStatus.FAILED if failed else EpisodeStatus.TRUNCATED)
            answered = [
                (playing[number], response)
                for number, response in responses
                if response is not None
            ]
            answers = [self._parse(*pair) for pair in answered if not pair[0].summarizes]
            summarized = [
                self._summarize(*pair, on_turn=on_turn) for pair in answered if pair[0].summarizes
            ]
            stepping |= self._start(answers)
            turned = self._finish(
                stepping, all_of_them=not responder.continuous, wait=not asked, on_turn=on_turn
            )
            turned += summarized
            ready = [episode for episode in turned if not episode.done]
            for episode in [*stopped, *turned]:
                if episode.done:
                    del playing[episode.number]
            if stopped or turned:
                yield len(playing)

    def _start(self, answers: Sequence[Answer]) -> dict[int, Answer]:
        """Start to carry out responses; return them by the numbers of their turns."""
        numbers = self.environments.start(
            [answer.episode.slot for answer in answers], [answer.parsed for answer in answers]
        )
        return dict(zip(numbers, answers, strict=True))

    def _finish(
        self,
        stepping: dict[int, Answer],
        *,
        all_of_them: bool,
        wait: bool,
        on_turn: OnTurn | None,
    ) -> list[Episode]:
        """Record the turns that have ended and return their episodes, in the order of the responses.

        Args:
            stepping: Responses under way by the numbers of their turns; those that ended are removed.
            all_of_them: Whether to wait for all. Otherwise the batches of a batch engine would depend on time.
            wait: Whether to wait for the first one.
            on_turn: Called after each turn.
        """
        results: dict[int, TurnResult] = {}
        while len(results) < len(stepping):
            wait_s = None if wait or all_of_them else _SHORT_S
            results.update(self.environments.finished(wait_s=wait_s))
            if not all_of_them:
                break
        ended = [(stepping.pop(number), results[number]) for number in sorted(results)]
        for answer, result in ended:
            is_turn = self._continue(answer, result)
            if on_turn is not None and is_turn:
                on_turn(answer.episode)
        return [answer.episode for answer, _ in ended]

    def _summarize(
        self, episode: Episode, response: Generation | str, *, on_turn: OnTurn | None
    ) -> Episode:
        """Record a summary, and go on with the conversation that it begins."""
        generation = self._encode(response) if isinstance(response, str) else response
        pieces = self.context.pieces(generation.ids)
        turn = summary_turn(self.context, episode, generation, pieces)
        episode.trajectory.turns.append(turn)
        episode.max_response_tokens = self.max_response_tokens
        if len(episode.prompt.ids) + self.max_response_tokens > self.context.max_tokens:
            end_episode(episode, EpisodeStatus.TRUNCATED)
        if on_turn is not None:
            on_turn(episode)
        return episode

    def _parse(self, episode: Episode, response: Generation | str) -> Answer:
        generation = self._encode(response) if isinstance(response, str) else response
        pieces = self.context.pieces(generation.ids)
        text = self.context.opening + "".join(pieces)
        names, max_actions = episode.slot.action_names, self.environments.max_actions_per_turn
        native, message = episode.conversation.native, None
        if episode.request is not None:
            assert native is not None
            answer = answer_request(
                episode.request,
                generation,
                native=native,
                prompt_tokens=len(episode.prompt.ids),
                turn=episode.slot.turn,
                opening=self.context.opening,
                pieces=pieces,
            )
            generation, parsed, message = answer.generation, answer.parsed, answer.message
            pieces = pieces[: len(generation.ids)]
        elif native is not None:
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
        if generation.hit_length_limit and episode.request is None:
            parsed.actions, parsed.calls = [], []
        return Answer(
            episode=episode,
            generation=generation,
            opening=self.context.opening,
            pieces=pieces,
            parsed=parsed,
            state_description=episode.slot.state_description,
            state_key=episode.slot.state_key,
            request=episode.request,
            message=message,
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

    def _continue(self, answer: Answer, result: TurnResult) -> bool:
        """Record a turn, and make the next prompt or end the episode; return whether there was a turn.

        A program's request that got no response is none, nor is a response that a program did not get.
        """
        episode = answer.episode
        trajectory = episode.trajectory
        is_turn = answer.generation is not None and result.delivered
        if answer.generation is not None and is_turn:
            self._record(answer, answer.generation, result)
        elif trajectory.turns:
            add_terms(trajectory.turns[-1], result.reward_terms)
        trajectory.success = result.success
        if result.error is not None:
            trajectory.error = result.error
        for number in result.invalid_turns:
            trajectory.turns[number].action_is_valid = False
        for number, terms in result.rewards_of.items():
            add_terms(trajectory.turns[number], terms)
        if result.status is not None and not trajectory.turns and result.error is None:
            trajectory.error = "the program ended without a response to any of its requests"
            result.status = EpisodeStatus.FAILED
        # a truncated episode keeps the prompt of its last state, to bootstrap from
        if result.status in (None, EpisodeStatus.TRUNCATED):
            self._observe(episode)
        if result.status is not None and not episode.done:
            end_episode(episode, result.status)
        return is_turn

    def _record(self, answer: Answer, generation: Generation, result: TurnResult) -> None:
        """Add a turn to its trajectory and its conversation."""
        episode, turn = answer.episode, played_turn(answer, generation, result)
        episode.trajectory.turns.append(turn)
        if answer.request is not None and answer.message is not None:
            record(
                episode.conversation,
                request=answer.request,
                prompt=episode.prompt,
                ids=turn.response_ids,
                message=answer.message,
            )
        episode.conversation.respond(
            ids=turn.response_ids,
            text=turn.response_text,
            actions=turn.actions,
            calls=answer.parsed.calls,
        )
