"""Initial states of recorded episodes: which reset shows what a record shows, and whether training may begin there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ragen_pl.base.records import image_digest
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data.recorded_episodes import RECORDS, RecordedEpisode
from ragen_pl.data.validation import ValidationSet
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec, is_held_out
from ragen_pl.prompts.conversation import Conversation, fill_template
from ragen_pl.trajectory import Observation

T = TypeVar("T")

# states that a reset may have drawn before the one that it began in; see `EnvironmentManager`
_REDRAWS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialState:
    """Observation and description of an initial state after a reset.

    Attributes:
        instructions: Rules of the environment.
        tools: Schemas of its tools; None where responses are not in the model's own format.
        action_names: Names of its actions; None for free text.
        state_key: Key of the state, None where the environment has none.
    """

    instructions: str
    tools: Sequence[Mapping[str, Any]] | None
    action_names: Sequence[str] | None
    state_key: str | None


def _shown(observation: Observation, *, template: str, max_turns: int) -> tuple[str, ...]:
    """Return the text of a first observation as a prompt shows it, and the names of its images."""
    text = fill_template(template, Conversation(system=None), observation, max_turns=max_turns)
    return (text, *map(image_digest, observation.images))


def _recorded(episode: RecordedEpisode) -> tuple[str, ...]:
    first = episode.turns[0]
    return (first.text, *(Path(image).stem for image in first.images))


def initial_states(
    episodes: Sequence[RecordedEpisode],
    environments: EnvironmentManager,
    *,
    template: str,
    stages: Sequence[Mapping[str, object]] | None,
    at_once: int,
) -> list[InitialState]:
    """Return the initial state of each episode: that of a reset with its seed that shows what the record shows.

    Seeds of later draws are tried too, which a reset takes where a state is held out. A conversation has no seed, and
    gets the rules of a reset with another one.

    Args:
        episodes: Recorded episodes.
        environments: Environments that hold out nothing.
        template: Text of the user's block, `context.turn_template`.
        stages: Reset options that an episode may have begun with; None for none.
        at_once: Largest number of environments at once.

    Raises:
        ValueError: No reset shows what a record shows.
    """
    keys = [(one.seed, *_recorded(one)) if one.seed is not None else (None,) for one in episodes]
    first = dict(zip(reversed(keys), reversed(episodes), strict=True))
    found: dict[tuple[object, ...], InitialState] = {}
    for draw in range(_REDRAWS):
        for options in stages or [{}]:
            for some in _parts_of([key for key in first if key not in found], at_once):
                specs = [
                    EpisodeSpec(
                        group=number,
                        member=0,
                        seed=_seed(first[key].seed or 0, draw),
                        options=options or None,
                        held_out=False,
                    )
                    for number, key in enumerate(some)
                ]
                slots = environments.open(specs)
                try:
                    states = environments.state_keys(slots)
                    for key, slot, state in zip(some, slots, states, strict=True):
                        if slot.error is not None:
                            raise ValueError(
                                f"{first[key].place}: the reset failed with {slot.error}"
                            )
                        assert slot.observation is not None
                        shown = _shown(
                            slot.observation, template=template, max_turns=environments.max_turns
                        )
                        if key == (None,) or key[1:] == shown:
                            found[key] = InitialState(
                                instructions=environments.instructions(slot),
                                tools=environments.tools(slot),
                                action_names=slot.action_names,
                                state_key=state,
                            )
                finally:
                    environments.close(slots)
        # another environment shows none of them
        if not found or len(found) == len(first):
            break
    if (other := next((key for key in keys if key not in found), None)) is not None:
        count = sum(key not in found for key in keys)
        raise ValueError(
            f"{RECORDS}: {count} of {len(keys)} episodes begin in another state than a reset with their seed shows, "
            f"the first in {first[other].place}: {first[other].turns[0].text[:80]!r}; they are of another environment, "
            "of other env.kwargs, env.max_turns, context.turn_template or reset options (warm_start.stages); give "
            "others, or set these as they were"
        )
    return [found[key] for key in keys]


def _parts_of(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _seed(seed: int, draw: int) -> int:
    return derive_seed(seed, "redraw", draw) if draw else seed


class HeldOutStates:
    """Initial states that training must not begin in: those of a validation set, or a fraction of all.

    Args:
        validation_set: The run's own; None where it holds out nothing.
        template: Text of the user's block, `context.turn_template`.

    Raises:
        ValueError: An environment of it fails, or has no `state_key()`.
    """

    def __init__(self, validation_set: ValidationSet | None, *, template: str) -> None:
        self.keys: set[str] = set()
        self.fraction: float | None = None
        # key of each state by what is shown of it, None for what several states show
        self._shown: dict[tuple[str, ...], str | None] = {}
        if validation_set is None:
            return
        proxy = validation_set.proxy
        environments = proxy.environments
        self.fraction = environments.held_out_fraction
        for specs in _parts_of(validation_set.episode_specs, proxy.num_envs):
            slots = environments.open(specs)
            try:
                keys = environments.state_keys(slots)
                for slot, key in zip(slots, keys, strict=True):
                    if slot.error is not None or key is None:
                        error = slot.error or "no state_key(); set validation.held_out=false"
                        raise ValueError(f"the environment of the validation set has {error}")
                    assert slot.observation is not None
                    shown = _shown(
                        slot.observation, template=template, max_turns=environments.max_turns
                    )
                    same = self._shown.setdefault(shown, key)
                    self._shown[shown] = key if same == key else None
                    self.keys.add(key)
            finally:
                environments.close(slots)

    def __call__(self, episode: RecordedEpisode, state: InitialState) -> bool:
        """Return whether an episode begins in one of them; of a conversation, whether it shows what one shows."""
        if episode.seed is None:
            return self._shown.get(_recorded(episode)) is not None
        if state.state_key is None:
            return False
        by_fraction = self.fraction is not None and is_held_out(state.state_key, self.fraction)
        return by_fraction or state.state_key in self.keys
