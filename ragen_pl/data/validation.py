"""Validation sets: fixed lists of evaluation episodes, the same on every machine and in every run."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ragen_pl.base.distributed import rank, world_size
from ragen_pl.base.phases import phase
from ragen_pl.base.seeding import derive_seed
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import RolloutEngine
from ragen_pl.environments.manager import EpisodeSpec
from ragen_pl.rollout.proxy import AgentProxy, Progress
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.rollout.scripted import ScriptedPolicy, ScriptedResponder
from ragen_pl.trajectory import Trajectory

if TYPE_CHECKING:
    from ragen_pl.rollout.endpoint import ChatEndpoint

log = logging.getLogger(__name__)

# of the validation set's initial states, those that occur more than once; as likely is it that training draws any of
# the set (Good, 1953)
_LIKELY = 0.3
# fraction of initial states that differ, below which a line says so, and the number of states from which on it does
_DISTINCT, _COUNTED = 0.9, 64
# These words are part of the seeds; other words would give other episodes.
VALIDATION_PURPOSE = "panel"
_SCRIPTED_PURPOSE = "player"

HELD_OUT = "held_out"
"""Name and key of a run's own validation set."""


def initial_state_seed(key: str, number: int) -> int:
    """Return the seed of an initial state of the validation sets with this key."""
    return derive_seed(VALIDATION_PURPOSE, key, number)


class ValidationSet:
    """A named list of episodes and the proxy that plays them.

    Args:
        name: Name; the metrics of the first set are logged as `val/…`, those of others as `val_<name>/…`.
        proxy: Plays the episodes (its environments may show blanked images, larger maps …).
        episodes: Number of initial states.
        key: Part of the episodes' seeds; sets with the same key play the same initial states.
        members: Number of episodes from each initial state, for pass@k with sampled responses.
        greedy: Take the most probable tokens.
        options: Reset options of every episode.
        keeps_states: Whether training leaves out the set's initial states.
        environment: Whether the set is that of an environment of a mixture, after which it is named. Its metrics are
            logged as `val/<name>/…`.
    """

    def __init__(
        self,
        name: str,
        proxy: AgentProxy[Any],
        *,
        episodes: int,
        key: str = HELD_OUT,
        members: int = 1,
        greedy: bool = True,
        options: dict[str, object] | None = None,
        keeps_states: bool = True,
        environment: bool = False,
    ) -> None:
        self.name, self.proxy, self.greedy = name, proxy, greedy
        self.keeps_states, self.environment = keeps_states, environment
        self.episode_specs = [
            EpisodeSpec(
                group=number,
                member=member,
                seed=initial_state_seed(key, number),
                options=options,
                held_out=True,
                environment=name if environment else None,
            )
            for number in range(episodes)
            for member in range(members)
        ]

    def play(
        self,
        engine: RolloutEngine,
        *,
        version: int,
        episode_specs: Sequence[EpisodeSpec] | None = None,
        seed_key: Sequence[int | str] = (VALIDATION_PURPOSE,),
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Play episodes with the weights that an engine has.

        Args:
            engine: Samples the responses.
            version: Number of optimizer steps that the weights have taken.
            episode_specs: Some of the set's episodes; None for all.
            seed_key: Counters that the seeds of sampled responses start with.
            progress: See `AgentProxy.rollout`.
        """
        engine.release()
        responder = EngineResponder(
            engine=engine, context=self.proxy.context, greedy=self.greedy, version=version
        )
        specs = self.episode_specs if episode_specs is None else episode_specs
        return self.proxy.rollout(responder, specs, seed_key=seed_key, progress=progress)

    def play_endpoint(
        self,
        endpoint: ChatEndpoint,
        *,
        seed_key: Sequence[int | str],
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Play all episodes with a model behind an API; the proxy's context is the endpoint's."""
        from ragen_pl.rollout.endpoint import EndpointResponder

        responder = EndpointResponder(endpoint=endpoint, greedy=self.greedy)
        return self.proxy.rollout(
            responder, self.episode_specs, seed_key=seed_key, progress=progress
        )

    def play_scripted(
        self, policy: ScriptedPolicy, *, name: str, progress: Progress | None = None
    ) -> list[Trajectory]:
        """Play all episodes with a scripted policy. Its random draws depend on its name."""
        responder = ScriptedResponder(policy=policy)
        seed_key = (_SCRIPTED_PURPOSE, name)
        return self.proxy.rollout(
            responder, self.episode_specs, seed_key=seed_key, progress=progress
        )

    def state_keys(self) -> list[str]:
        """Return the initial state of every episode. Training leaves these states out.

        Raises:
            RolloutError: A reset failed.
            ValueError: The environment has no `state_key()`.
        """
        environments, count = self.proxy.environments, len(self.episode_specs)
        keys: list[str | None] = []
        errors: list[str] = []
        label = f"initial states of validation set {self.name}"
        with phase(label, count, shown=rank() == 0) as progress:
            # no more environments at once than a rollout has
            for first in range(0, count, self.proxy.num_envs):
                slots = environments.open(self.episode_specs[first : first + self.proxy.num_envs])
                keys += environments.state_keys([slot for slot in slots if slot.error is None])
                errors += [slot.error for slot in slots if slot.error is not None]
                environments.close(slots)
                progress(min(first + self.proxy.num_envs, count), count)
        if errors:
            raise RolloutError(
                f"{len(errors)} of {count} episodes of validation set {self.name!r} failed before their first turn; "
                f"the first with {errors[0]}"
            )
        if None in keys:
            raise ValueError(
                f"the environment of validation set {self.name!r} has no state_key(); set validation.held_out=false"
            )
        return [str(key) for key in keys]

    def held_out_keys(self) -> list[str]:
        """Return the key of each initial state, with a line where many are equal, or training loses likely ones."""
        pairs = zip(self.state_keys(), self.episode_specs, strict=True)
        keys = [key for key, spec in pairs if spec.member == 0]
        distinct = len(set(keys))
        if len(keys) >= _COUNTED and distinct < _DISTINCT * len(keys):
            log.info(
                "validation set %s: %d of the %d initial states are distinct; episodes from equal ones depend on each "
                "other, so its intervals are wider than they are shown; ragen_pl.evaluate counts the distinct ones",
                self.name,
                distinct,
                len(keys),
            )
        often = sum(count for count in Counter(keys).values() if count > 1) / len(keys)
        if often > _LIKELY:
            log.warning(
                "validation.held_out=true: takes about %.0f%% of the initial states that training would draw, the "
                "likely ones first, so that training has other ones than validation; set env.held_out_fraction=0.2, "
                "which holds out a fraction of all states instead",
                100 * often,
            )
        return keys

    def digest(self) -> str:
        """Return a hash of the seeds, and of the held-out fraction where there is one, logged with the metrics."""
        fraction = self.proxy.environments.held_out_fraction
        seeds = [(spec.seed, spec.member) for spec in self.episode_specs]
        text = repr(seeds) if fraction is None else f"{seeds} {fraction}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class ValidationChunk:
    """Episodes of one validation step."""

    def __init__(self, validation_set: ValidationSet, episode_specs: list[EpisodeSpec]) -> None:
        self.validation_set, self.episode_specs = validation_set, episode_specs


class ValidationLoader:
    """Yield this rank's part of a validation set in chunks of `num_envs` episodes."""

    def __init__(self, validation_set: ValidationSet) -> None:
        self.validation_set = validation_set
        self._episode_specs = validation_set.episode_specs[rank() :: world_size()]

    def __len__(self) -> int:
        # that of the first rank, which has the most: ranks that share an engine play together
        episodes = len(self.validation_set.episode_specs[:: world_size()])
        return max(1, -(-episodes // self.validation_set.proxy.num_envs))

    def __iter__(self) -> Iterator[ValidationChunk]:
        size = self.validation_set.proxy.num_envs
        for chunk in range(len(self)):
            episode_specs = self._episode_specs[chunk * size : (chunk + 1) * size]
            yield ValidationChunk(self.validation_set, episode_specs)
