"""RecordDataModule: recorded episodes and conversations for the warm start; `check_records` before a model is built."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ragen_pl.base.checked import checked
from ragen_pl.base.distributed import rank, sum_over_ranks, world_size
from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.base.records import image_digest, read_image
from ragen_pl.base.rgb import rgb_array
from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.data.demonstrations import WarmStartDataModule, set_discounted_returns
from ragen_pl.data.initial_states import HeldOutStates, InitialState, initial_states
from ragen_pl.data.recorded_episodes import (
    RECORDS,
    RecordedEpisode,
    RecordedTurn,
    known_as_held_out,
    learns,
    read_episodes,
    weights_of,
    without_held_out,
)
from ragen_pl.data.settings import RecordSettings, UpdateSettings, WarmStartSettings
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import Conversation, Exchange
from ragen_pl.prompts.parsing import label_tokens, parse_response
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.trajectory import EpisodeStatus, Observation, ProgramCall, Trajectory, Turn

log = logging.getLogger(__name__)

_FORMATS = ("PNG", "JPEG")
# characters of a prompt in a message
_SHOWN = 60
# initial states that are compared before there is a model
_COMPARED = 16


def check_records(
    settings: RecordSettings,
    environments: EnvironmentManager,
    *,
    states: int,
    template: str,
    stages: Sequence[Mapping[str, object]] | None,
    learns_values: bool,
    ranks: int,
    seed: int,
) -> None:
    """Check records before a model is built: their files, origin, environment and weights.

    Args:
        settings: Where they are, and what is learned of them.
        environments: Environments that hold out nothing.
        states: Number of the run's held-out initial states.
        template: `context.turn_template`.
        stages: `warm_start.stages`.
        learns_values: Whether a critic learns the returns.
        ranks: Number of processes.
        seed: Seed of the run.

    Raises:
        ValueError: With the first thing that is wrong.
    """
    episodes = read_episodes(settings)
    held_out = known_as_held_out(episodes, states=states)
    episodes = without_held_out(
        episodes, held_out, settings, found="are of the held-out validation set"
    )
    silent = [one.place for one in episodes if not one.has_return]
    if learns_values and silent:
        raise ValueError(
            f'{RECORDS}: the critic learns returns, and {silent[0]} has no "return"; add it, or set '
            "warm_start.value_coefficient=0"
        )
    if len(weights_of(episodes, settings, seed=seed)) < ranks:
        raise ValueError(f"{RECORDS}: {len(episodes)} episodes are fewer than the {ranks} ranks")
    # the others when the model is there: a reset may take long
    some = episodes[:: max(1, len(episodes) // _COMPARED)]
    initial_states(some, environments, template=template, stages=stages, at_once=_COMPARED)


class RecordDataModule(WarmStartDataModule):
    """Read recorded episodes once and serve their turns as minibatches.

    Samples are those that demonstrations with the same prompts and responses would give. A prompt is made again by the
    run's context, and one that differs from the recorded one is refused. The policy learns the turns of the episodes
    with a weight (`RecordSettings`), the critic the returns of all.

    Args:
        proxy: Its environments hold out nothing; they tell which records are theirs.
        records: Files, and what is learned of them.
        validation_set: The run's own, whose initial states are held out; None where nothing is.
        states: Number of the run's own held-out initial states, by whose seeds records are known.
        learns_values: Whether a critic learns the returns; otherwise episodes without a weight are left out.
        settings: Numbers of steps and samples, and the discount; None for the defaults.
        update: Sizes of microbatches; None for the defaults.
        seed: Seed of the run.
    """

    @checked
    def __init__(
        self,
        proxy: AgentProxy[ContextManager],
        *,
        records: RecordSettings,
        validation_set: ValidationSet | None,
        states: int,
        learns_values: bool,
        settings: WarmStartSettings | None = None,
        update: UpdateSettings | None = None,
        seed: int,
    ) -> None:
        super().__init__(proxy, settings=settings, update=update, seed=seed)
        self.records, self.validation_set = records, validation_set
        self.states, self.learns_values = states, learns_values
        self._digest = ""
        self._images: dict[Path, np.ndarray] = {}

    def setup(self, stage: str) -> None:
        """Read the records and build this rank's samples.

        Raises:
            ValueError: A record is none, of another environment or held out, or has other prompts than the run.
        """
        super().setup(stage)
        if self.batch is not None:
            return
        episodes, states = self._admitted()
        weights = weights_of(episodes, self.records, seed=self.seed)
        kept = [n for n, weight in weights.items() if weight > 0 or self.learns_values]
        if len(kept) < world_size():
            raise RolloutError(
                f"warm_start.records: {len(kept)} episodes are left, fewer than the {world_size()} ranks"
            )
        parts = [f"{episodes[n].digest} {weights[n]!r}" for n in kept]
        self._digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        self._report([episodes[n] for n in kept], [weights[n] for n in kept])
        own = kept[rank() :: world_size()]
        trajectories = [
            self._trajectory(number, episodes[number], states[number]) for number in own
        ]
        self.report_long(trajectories)
        self.batch = collate(trajectories, self.proxy.context.bundle)
        set_discounted_returns(self.batch, gamma=self.settings.gamma)
        self._weigh(self.batch, [weights[number] for number in own], [episodes[n] for n in own])
        tokens = int(sum_over_ranks(self.batch.samples.loss_mask.sum()))
        if not tokens:
            raise RolloutError(
                f"warm_start.records: no response is learned by turns={self.records.turns} (env.prompt_format="
                f"{self.proxy.environments.prompt_format}); give other records"
            )
        self._images.clear()

    def _admitted(self) -> tuple[list[RecordedEpisode], list[InitialState]]:
        """Return the episodes that begin in no held-out state, with their initial states."""
        template = self.proxy.context.turn_template
        episodes = read_episodes(self.records)
        episodes = without_held_out(
            episodes,
            known_as_held_out(episodes, states=self.states),
            self.records,
            found="are of the held-out validation set",
        )
        states = initial_states(
            episodes,
            self.proxy.environments,
            template=template,
            stages=self.settings.stages,
            at_once=self.proxy.num_envs,
        )
        held_out = HeldOutStates(self.validation_set, template=template)
        out = [held_out(*pair) for pair in zip(episodes, states, strict=True)]
        found = "begin in an initial state of the held-out validation set"
        admitted = without_held_out(episodes, out, self.records, found=found)
        return admitted, [state for state, is_out in zip(states, out, strict=True) if not is_out]

    def _report(self, episodes: Sequence[RecordedEpisode], weights: Sequence[float]) -> None:
        """Keep the metrics of the learned episodes, and say how many there are."""
        learned = [one for one, weight in zip(episodes, weights, strict=True) if weight > 0]
        self.statistics = {
            "episodes": float(len(learned)),
            "success": float(np.mean([bool(one.success) for one in learned])),
            "return": float(np.mean([one.reward for one in learned])),
            "turns": float(np.mean([len(one.turns) for one in learned])),
        }
        if rank() == 0:
            log.info(
                "records: the policy learns %d episodes, success %.3f, mean return %.3g%s",
                len(learned),
                self.statistics["success"],
                self.statistics["return"],
                f"; the critic learns {len(episodes)}" if self.learns_values else "",
            )

    def _trajectory(self, number: int, episode: RecordedEpisode, state: InitialState) -> Trajectory:
        """Return an episode with prompts of the run's context."""
        context = self.proxy.context
        conversation = context.start(state.instructions, tools=state.tools)
        if episode.system is not None and episode.system != conversation.system:
            raise ValueError(
                f"{episode.place}: its system message {episode.system[:_SHOWN]!r} is not the run's, "
                f"{(conversation.system or '')[:_SHOWN]!r}; set context.system_prompt to it, or leave it out"
            )
        turns = [
            self._turn(place, episode, turn, conversation, state)
            for place, turn in enumerate(episode.turns)
        ]
        return Trajectory(
            group=number,
            member=0,
            seed=episode.seed or 0,
            turns=turns,
            status=EpisodeStatus.TERMINATED,
            success=bool(episode.success),
            system_prompt_length=len(conversation.system_prompt_ids),
        )

    def _turn(
        self,
        number: int,
        episode: RecordedEpisode,
        recorded: RecordedTurn,
        conversation: Conversation,
        state: InitialState,
    ) -> Turn:
        context, place = self.proxy.context, f"{episode.place}, turn {number + 1}"
        images = [self._image(episode, name) for name in recorded.images]
        observation = Observation(text=recorded.text, images=images)
        if recorded.prompt_ids is None:
            self._read(recorded, conversation, state, place=place)
            ids, shown = self._prompt(conversation, observation)
        elif number == 0 or self._is_plain:
            # the recorded text is the template's, filled
            conversation.exchanges.append(Exchange.of(observation, recorded.text))
            prompt = context.prompt(conversation)
            ids, shown = prompt.ids, prompt.images
            self._compare(ids, shown, recorded, place=place)
        else:
            ids = recorded.prompt_ids
            shown = [self._image(episode, name) for name in recorded.prompt_images]
            self._check_slots(ids, shown, place=place)
        assert recorded.response_ids is not None and recorded.spans is not None
        self._check_response(recorded, place=place)
        if len(ids) + len(recorded.response_ids) > context.max_tokens:
            raise ValueError(
                f"{place}: prompt and response have {len(ids) + len(recorded.response_ids)} tokens, more than "
                f"context.max_tokens={context.max_tokens}; raise it"
            )
        if number == 0 or self._is_plain:
            conversation.respond(
                ids=recorded.response_ids, text=recorded.response, actions=recorded.actions
            )
        return Turn(
            observation=observation,
            prompt_ids=ids,
            prompt_images=shown,
            response_ids=recorded.response_ids,
            response_logprobs=np.zeros(len(recorded.response_ids), np.float32),
            response_entropy=0.0,
            spans=recorded.spans,
            response_text=recorded.response,
            think=None,
            actions=recorded.actions,
            action_is_valid=recorded.valid,
            action_is_effective=recorded.effective,
            hit_length_limit=recorded.hit_length_limit,
            # that of demonstrations
            temperature=1.0,
            reward_terms={"environment": recorded.reward},
            kind=ProgramCall(is_task_step=recorded.advances, trained=recorded.trained),
        )

    @property
    def _is_plain(self) -> bool:
        """Whether texts and responses alone determine the prompts. Tool results and summaries do too."""
        is_native = self.proxy.environments.prompt_format is PromptFormat.NATIVE
        return not is_native and self.proxy.context.compaction is None

    def _prompt(
        self, conversation: Conversation, observation: Observation
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the ids and the images of a conversation's next prompt."""
        max_turns = self.proxy.environments.max_turns
        prompt = self.proxy.context.observe(conversation, observation, max_turns=max_turns)
        return prompt.ids, prompt.images

    def _read(
        self, turn: RecordedTurn, conversation: Conversation, state: InitialState, *, place: str
    ) -> None:
        """Encode and parse the response of a conversation as a policy's."""
        context, environments = self.proxy.context, self.proxy.environments
        if not self._is_plain:
            raise ValueError(
                f"{place}: conversations are learned in tags, without env.prompt_format=native and context.compaction; "
                "give records of episodes"
            )
        turn.response_ids = context.encode_response(turn.response)
        pieces = context.pieces(turn.response_ids)
        turn.response = "".join(pieces)
        text = context.generation_prefix + turn.response
        parsed = parse_response(
            text,
            state.action_names,
            max_actions=environments.max_actions_per_turn,
            prompt_format=environments.prompt_format,
            start=context.words_start(text),
        )
        ends = len(context.generation_prefix) + np.cumsum([len(piece) for piece in pieces])
        turn.spans = label_tokens(parsed, ends.tolist(), end_sampled=True)
        turn.valid = turn.effective = parsed.valid
        names = state.action_names or ()
        turn.actions = [
            action if isinstance(action, str) else names[action] for action in parsed.actions
        ]

    def _compare(
        self, ids: np.ndarray, images: Sequence[np.ndarray], turn: RecordedTurn, *, place: str
    ) -> None:
        """Check that a prompt is the recorded one."""
        assert turn.prompt_ids is not None
        remedy = (
            "set context, env.prompt_format, env.max_actions_per_turn and the model's tokenizer as they were, or give "
            "records of this run's settings"
        )
        if not np.array_equal(ids, turn.prompt_ids):
            length = min(len(ids), len(turn.prompt_ids))
            differs = np.append(ids[:length] != turn.prompt_ids[:length], True)
            first = int(differs.argmax())
            texts = [self._text(tokens[first:]) for tokens in (turn.prompt_ids, ids)]
            raise ValueError(
                f"{place}: its prompt is not the one that the run would have: from token {first} on it is "
                f"{texts[0]!r}, the run's {texts[1]!r}; {remedy}"
            )
        if [image_digest(image) for image in images] != [
            Path(one).stem for one in turn.prompt_images
        ]:
            raise ValueError(
                f"{place}: its prompt has other images than the run's would have; {remedy}"
            )

    def _text(self, ids: np.ndarray) -> str:
        tokenizer = self.proxy.context.bundle.tokenizer
        known = [token for token in ids[:_SHOWN].tolist() if token < len(tokenizer)]
        return str(tokenizer.decode(known))[:_SHOWN]

    def _check_slots(self, ids: np.ndarray, images: Sequence[np.ndarray], *, place: str) -> None:
        """Check the ids of a prompt, and that its image slots are those of its images."""
        bundle = self.proxy.context.bundle
        slots = 0
        if bundle.image_token_id is not None:
            slots = int((ids == bundle.image_token_id).sum())
        expected = sum(bundle.num_image_tokens(image) for image in images)
        if slots != expected or not len(ids) or ids.max() >= bundle.logit_count:
            raise ValueError(
                f"{place}: its prompt has {slots} image tokens for {len(images)} images of {expected}, or ids that the "
                "model has not; give records of the same model"
            )

    def _check_response(self, turn: RecordedTurn, *, place: str) -> None:
        """Check that a policy can have sampled a response, and that the tokenizer reads it as the record does."""
        context, ids = self.proxy.context, turn.response_ids
        assert ids is not None
        banned = ~context.bundle.can_sample(torch.from_numpy(ids)).numpy()
        text = None if banned.any() else "".join(context.pieces(ids))
        if text != turn.response:
            found = (
                f"token {int(ids[banned][0])}" if text is None else f"the text {text[:_SHOWN]!r}"
            )
            raise ValueError(
                f"{place}: its response {turn.response[:_SHOWN]!r} has {found} for this model; give records of a model "
                "with the same tokenizer"
            )

    def _image(self, episode: RecordedEpisode, name: str) -> np.ndarray:
        """Return an image of an episode, uint8 `[height, width, 3]`; the same array for the same file."""
        file = episode.folder / name
        if file not in self._images:
            data = read_image(episode.folder, name, formats=_FORMATS)
            if data is None:
                raise ValueError(
                    f"{episode.place}: {name} is no PNG or JPEG of at most 16 MiB and 4096 x 4096 pixels in "
                    f"{episode.folder}, or a link leads to it"
                )
            with Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
                image = rgb_array(picture).copy()
            if episode.seed is not None and image_digest(image) != Path(name).stem:
                raise ValueError(f"{episode.place}: {name} has other pixels than were recorded")
            self._images[file] = image
        return self._images[file]

    def _weigh(
        self, batch: TrajectoryBatch, weights: Sequence[float], episodes: Sequence[RecordedEpisode]
    ) -> None:
        """Set the weights of the rows, and leave turns and episodes that the policy does not learn out of M_loss."""
        samples, of_episode = batch.samples, torch.tensor(weights, dtype=torch.float32)
        learned = torch.zeros(batch.episodes.turn_rewards.shape, dtype=torch.bool)
        for row, (weight, episode) in enumerate(zip(of_episode.tolist(), episodes, strict=True)):
            turns = [learns(turn, self.records) for turn in episode.turns if turn.trained]
            learned[row, : len(turns)] = torch.tensor(turns) & (weight > 0)
        samples.loss_mask &= learned[samples.episode[:, None], samples.turn.clamp(min=0)]
        samples.loss_weight = samples.loss_mask.float()
        # the critic learns at the others
        of_row = of_episode[samples.episode]
        samples.weight = torch.where(of_row > 0, of_row, 1.0)
        batch.episodes.weight = of_episode

    def state_dict(self) -> dict[str, Any]:
        """Return a hash of the learned records."""
        return {"records": self._digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the records are those that the warm start began with.

        Raises:
            RolloutError: They are others.
        """
        if state_dict["records"] != self._digest:
            raise RolloutError(
                f"warm_start.records.path={self.records.path}: the records or their settings are not those that the "
                "warm start began with; restore them, or start another run"
            )
