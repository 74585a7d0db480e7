"""AgentProxy: the turn loop that joins environments, contexts and a rollout engine.

All environments take their turn together: one call of the engine serves every environment that is still playing.
What an environment samples depends on the seeds of its own (group, member, turn) only, so neither the number
of environments nor the number of ranks changes a trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ragen_pl.constraints import Count, Positive, checked
from ragen_pl.rollout.context import ContextManager, Conversation
from ragen_pl.rollout.engine import (
    Generation,
    GenerationRequest,
    Prompt,
    RolloutEngine,
    generate,
)
from ragen_pl.rollout.environments import (
    EnvironmentManager,
    EnvironmentSlot,
    EpisodeSpec,
    TurnResult,
)
from ragen_pl.rollout.errors import RolloutError
from ragen_pl.rollout.formats import format_instructions
from ragen_pl.rollout.leave_out import occlusion_scores
from ragen_pl.rollout.parsing import ParsedResponse, label_tokens, parse_response
from ragen_pl.rollout.temperature import AdaptiveTemperature
from ragen_pl.seeding import derive_seed
from ragen_pl.trajectory import EpisodeStatus, Observation, Trajectory, Turn

Progress = Callable[[int, int], None]  # (episodes done, episodes in all)


@dataclass(slots=True)
class Episode:
    """An environment with its conversation and the trajectory it has made so far."""

    number: int
    slot: EnvironmentSlot
    conversation: Conversation
    trajectory: Trajectory
    prompt: Prompt | None = None
    done: bool = False


@checked
@dataclass(kw_only=True, slots=True)
class AgentProxy:
    """Play episodes with the policy behind an engine.

    Attributes:
        max_response_tokens: longest response.
        temperature: of sampled responses; greedy rollouts ignore it.
        num_envs: episodes played at once.
        adaptive_temperature: sets a turn's temperature by how the turns before it went; None leaves it.
    """

    environments: EnvironmentManager
    context: ContextManager
    max_response_tokens: Count = 64
    temperature: Positive = 1.0
    num_envs: Count = 256
    progress: Progress | None = field(default=None)
    adaptive_temperature: AdaptiveTemperature | None = None

    def rollout(
        self,
        engine: RolloutEngine,
        starts: Sequence[EpisodeSpec],
        *,
        seed_key: Sequence[int | str],
        greedy: bool = False,
    ) -> list[Trajectory]:
        """Play one episode for each start and return the trajectories in that order.

        Args:
            engine: what responses.
            starts: which episodes; `group` and `member` enter the sampling seeds.
            seed_key: run seed, purpose and iteration, which the sampling seeds start with.
            greedy: take the most probable token instead of sampling.
        """
        trajectories: list[Trajectory] = []
        for first in range(0, len(starts), self.num_envs):
            batch = starts[first : first + self.num_envs]
            episodes = self._open(batch)
            playing = [episode for episode in episodes if not episode.done]
            while playing:
                self._turn(engine, playing, seed_key=seed_key, greedy=greedy)
                playing = [episode for episode in playing if not episode.done]
                if self.progress is not None:
                    self.progress(first + len(batch) - len(playing), len(starts))
            engine.release()
            self.environments.close([episode.slot for episode in episodes])
            trajectories.extend(episode.trajectory for episode in episodes)
        return trajectories

    def _open(self, starts: Sequence[EpisodeSpec]) -> list[Episode]:
        episodes, manager = [], self.environments
        form = format_instructions(manager.prompt_format, max_actions=manager.max_actions_per_turn)
        for number, slot in enumerate(manager.open(starts)):
            instructions = f"{getattr(slot.env.unwrapped, 'instructions', '')} {form}".strip()
            trajectory = Trajectory(
                group=slot.start.group, member=slot.start.member, seed=slot.start.seed, turns=[],
                status=EpisodeStatus.FAILED, success=False, difficulty=slot.difficulty, error=slot.error,
            )  # fmt: skip
            conversation = self.context.start(instructions)
            trajectory.head = len(conversation.head_ids)
            episode = Episode(number, slot, conversation, trajectory, done=slot.error is not None)
            if not episode.done:
                self._show(episode)
            episodes.append(episode)
        return episodes

    def _show(self, episode: Episode) -> None:
        """Make the prompt of the next turn, or end the trajectory where no room is left for it."""
        assert episode.slot.observation is not None
        prompt = self.context.observe(
            episode.conversation, episode.slot.observation, max_turns=self.environments.max_turns
        )
        if len(prompt.ids) + self.max_response_tokens > self.context.max_tokens:
            if not episode.trajectory.turns:
                raise RolloutError(
                    f"the first prompt has {len(prompt.ids)} tokens and a response may have {self.max_response_tokens}, "
                    f"more than context.max_tokens={self.context.max_tokens}; raise it"
                )
            self._end(episode, EpisodeStatus.TRUNCATED, prompt)
        episode.prompt = prompt

    def _turn(
        self,
        engine: RolloutEngine,
        playing: list[Episode],
        *,
        seed_key: Sequence[int | str],
        greedy: bool,
    ) -> None:
        generations = self._generate(engine, playing, seed_key, greedy)
        responses, pieces = [], []
        for episode, generation in zip(playing, generations, strict=True):
            parts = self.context.pieces(generation.ids)
            pieces.append(parts)
            responses.append(self._parse(episode, "".join(parts), generation))
        slots = [episode.slot for episode in playing]
        known = [{"truth": slot.truth, "state_key": slot.state} for slot in slots]
        results = self.environments.step(slots, responses)
        for episode, generation, response, parts, facts, result in zip(
            playing, generations, responses, pieces, known, results, strict=True
        ):
            turn = self._record(episode, generation, response, parts, result)
            if greedy:  # what the engine tells of a greedy response is the distribution at 1
                turn.temperature = 1.0
            turn.info |= {name: fact for name, fact in facts.items() if fact is not None}
            self._go_on(episode, turn, result)

    def _generate(
        self,
        engine: RolloutEngine,
        playing: list[Episode],
        seed_key: Sequence[int | str],
        greedy: bool,
    ) -> list[Generation]:
        if self.context.leave_out:
            self._leave_out(engine, playing)
        requests = [self._request(episode, seed_key, greedy) for episode in playing]
        return generate(engine, requests, keep=self.context.grows)

    def _leave_out(self, engine: RolloutEngine, playing: Sequence[Episode]) -> None:
        """Take what matters least out of the prompts."""
        prompts = [episode.prompt for episode in playing if episode.prompt is not None]
        parts = [self.context.candidates(episode.conversation) for episode in playing]
        scores = occlusion_scores(
            self.context.bundle, engine, prompts, parts, max_tokens=self.max_response_tokens
        )
        for episode, found in zip(playing, scores, strict=True):
            episode.prompt = self.context.narrow(episode.conversation, found)

    def _request(
        self, episode: Episode, seed_key: Sequence[int | str], greedy: bool
    ) -> GenerationRequest:
        assert episode.prompt is not None
        start = episode.slot.start
        seed = derive_seed(*seed_key, start.group, start.member, episode.slot.turn)
        return GenerationRequest(
            session=episode.number, prompt=episode.prompt, max_tokens=self.max_response_tokens,
            temperature=0.0 if greedy else self._warmth(episode), seed=seed,
        )  # fmt: skip

    def _warmth(self, episode: Episode) -> float:
        """Return the temperature of the turn that an episode stands at."""
        if self.adaptive_temperature is None:
            return self.temperature
        return self.adaptive_temperature(self.temperature, episode.trajectory.turns)

    def _parse(self, episode: Episode, text: str, generation: Generation) -> ParsedResponse:
        response = parse_response(
            text, episode.slot.action_names, max_actions=self.environments.max_actions_per_turn,
            prompt_format=self.environments.prompt_format,
        )  # fmt: skip
        if (
            generation.hit_length_limit
        ):  # a response without its end is not an answer, whatever it happens to look like
            response.actions = []
        return response

    def _record(
        self,
        episode: Episode,
        generation: Generation,
        response: ParsedResponse,
        pieces: list[str],
        result: TurnResult,
    ) -> Turn:
        observation = episode.conversation.exchanges[-1]
        assert episode.prompt is not None
        ends = np.cumsum([len(piece) for piece in pieces])
        turn = Turn(
            observation=Observation(text=observation.text, images=observation.images),
            prompt_ids=episode.prompt.ids,
            prompt_images=episode.prompt.images,
            response_ids=generation.ids,
            response_logprobs=generation.logprobs,
            response_entropy=generation.entropy,
            spans=label_tokens(
                response, ends.tolist(), end_sampled=not generation.hit_length_limit
            ),
            response_text="".join(pieces),
            think=response.think,
            actions=result.carried_out,
            action_is_valid=response.valid,
            action_is_effective=result.effective,
            hit_length_limit=generation.hit_length_limit,
            reward=result.reward,
            temperature=self._warmth(episode),  # the turn is not in the trajectory yet
            info=result.info,
            reward_terms=result.reward_terms,
            statements=result.statements,
            prompt_patches=episode.prompt.patches,
            turns_left_out=episode.prompt.left_out,
        )
        episode.trajectory.turns.append(turn)
        return turn

    def _go_on(self, episode: Episode, turn: Turn, result: TurnResult) -> None:
        trajectory = episode.trajectory
        trajectory.success = result.success
        self.context.response(
            episode.conversation,
            ids=turn.response_ids,
            text=turn.response_text,
            actions=turn.actions,
        )
        if result.error is not None:
            trajectory.error = episode.slot.error = result.error
        if result.status is None or (
            result.status is EpisodeStatus.TRUNCATED and result.observation is not None
        ):
            self._show(episode)
        if result.status is not None and not episode.done:
            self._end(episode, result.status, episode.prompt)

    def _end(self, episode: Episode, status: EpisodeStatus, prompt: Prompt | None) -> None:
        """Close the trajectory; a truncated one keeps the state after its last turn to bootstrap from."""
        episode.done = True
        episode.trajectory.status = status
        if status is EpisodeStatus.TRUNCATED and prompt is not None:
            episode.trajectory.final_prompt_ids = prompt.ids
            episode.trajectory.final_images = prompt.images
            episode.trajectory.final_patches = prompt.patches
