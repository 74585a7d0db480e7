"""Earlier policies that play the other seats of a part of the games, and how often the policy wins against each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ragen_pl.algorithms.task_sampling import drawn_tasks, probabilities_of
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import (
    Count,
    CountOrZero,
    Fraction,
    FractionBelowOne,
    PositiveFraction,
)
from ragen_pl.base.distributed import sum_over_ranks
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data.rollout_module import RolloutModule
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import RolloutEngine
from ragen_pl.metrics.rollout import RolloutStatistics, episode_metrics
from ragen_pl.rollout.responders import Responder, Response
from ragen_pl.rollout.turns import Episode
from ragen_pl.trajectory import EpisodeStatus, Trajectory

_ONE_SEAT = (
    "opponents: the policy has one seat in this environment; take a game of two with env.kwargs.opponent=null, the "
    "support desk with env.kwargs.user=seat, or leave opponents out"
)

OpponentRule: TypeAlias = Literal["uniform", "squared", "variance"]


@runtime_checkable
class PlaysOpponents(RolloutModule, Protocol):
    """Module that can sample with earlier weights beside the present ones."""

    def trained_weights(self) -> dict[str, Tensor]:
        """Return copies of the policy's present trained weights on the host, by name."""
        ...

    def opponent_engine(self, weights: Mapping[str, Tensor]) -> RolloutEngine:
        """Return an engine that samples with these weights until the rollout ends. All ranks call it."""
        ...


@dataclass(kw_only=True, slots=True)
class Opponent:
    """An earlier policy.

    Attributes:
        name: Number of the iteration that began with these weights, or `file_0`, `file_1` … for those of files.
        weights: Trained weights by name, on the host.
        win_rate: Running average of the policy's score against it, a draw counted as half; None before a game.
    """

    name: str
    weights: dict[str, Tensor]
    win_rate: float | None = None


@checked
@dataclass(kw_only=True)
class Opponents:
    """Earlier policies in all seats but one of a part of the games; both are the present policy's in the others.

    One opponent is drawn for an iteration. In its games the policy has the seats in turn, and an opponent's responses
    are not trained on: its trajectories are dropped. A group plays against one opponent in one seat, so leave-one-out
    compares games with equal players.

    Opponents are drawn by the policy's win rate p against them (prioritized fictitious self-play, Vinyals et al., 2019,
    Nature 575, Methods), with probability floor / N + (1 - floor) w / sum of w:

    - `uniform`: w = 1 (fictitious self-play over snapshots, Heinrich et al., 2015).
    - `squared`: w = (1 - p)^2, which prefers those that the policy loses to.
    - `variance`: w = p (1 - p), which prefers those of its own strength.

    p is 0.5 before the first game. Where all weights are 0, all are equally likely.

    Attributes:
        fraction: Fraction of the groups of games with an opponent.
        every: Number of iterations between two snapshots of the policy; None for the run's initial weights alone.
        size: Number of snapshots that are kept; the oldest leaves. Checkpoints hold the weights of all.
        files: Checkpoints of the same model that stay in the pool.
        initial: Whether the run's initial weights are the first snapshot.
        seat: The policy's seat in games with an opponent; None for the seats in turn.
        rule: By which win rates become probabilities.
        floor: Part of a uniform distribution, without which one that was beaten once would not be played again.
        decay: Weight that a win rate keeps when games of an iteration are added.

    Raises:
        ValueError: There is no opponent: neither snapshots nor files.
    """

    needs_trust = ("files",)

    fraction: PositiveFraction = 0.5
    every: Count | None = None
    size: Count = 8
    files: Sequence[str] = ()
    initial: bool = True
    seat: CountOrZero | None = None
    rule: OpponentRule = "uniform"
    floor: Fraction = 0.1
    decay: FractionBelowOne = 0.5

    def __post_init__(self) -> None:
        if not self.initial and not self.files:
            raise ValueError(
                "opponents: initial=false without files, so the first iteration has no opponent; set initial=true, or "
                "give files"
            )
        self.pool: list[Opponent] = []
        """Opponents, those of files first, then snapshots from the oldest to the newest."""
        # of the present iteration: its number and opponent, number of groups of games, and the games against it with
        # their score
        self._iteration = 0
        self._present: Opponent | None = None
        self._groups = 1
        self._games, self._score = 0.0, 0.0
        self._episode_metrics: dict[str, float] = {}

    def add_file(self, weights: dict[str, Tensor]) -> None:
        """Add the weights of the next of `files`."""
        self.pool.append(Opponent(name=f"file_{len(self.pool)}", weights=weights))

    def check(self, *, seats: int | None, groups: int, others: Mapping[str, object]) -> None:
        """Check that a run can have opponents.

        Args:
            seats: Number of seats that the policy plays in training; None if it is not known yet.
            groups: Number of groups of games of a rollout.
            others: Settings that opponents do not work with, by key; those that are off are false.

        Raises:
            ValueError: The policy has one seat, no group is played against an opponent, another setting is on, or one
                of `files` is missing.
        """
        if seats == 1:
            raise ValueError(_ONE_SEAT)
        if seats is not None and self.seat is not None and self.seat >= seats:
            raise ValueError(
                f"opponents.seat={self.seat}: the environment has seats={seats}; give one from 0 to {seats - 1}"
            )
        if not self._games_before(groups):
            raise ValueError(
                f"opponents.fraction={self.fraction:g}: is less than one of rollout.groups={groups}, so no game would "
                "be played against an opponent; raise one of them"
            )
        wrong = next((key for key, value in others.items() if value), None)
        if wrong is not None:
            raise ValueError(
                f"opponents: do not work with {wrong}; leave it out, or leave opponents out"
            )
        for file in self.files:
            if not Path(file).expanduser().is_file():
                raise ValueError(
                    f"opponents.files: there is no file {file}; give a run's checkpoint"
                )

    def begin(
        self, iteration: int, module: PlaysOpponents, *, groups: int, seed: int
    ) -> Mapping[str, Tensor]:
        """Take a snapshot where one is due, and return the weights of the iteration's opponent.

        Args:
            iteration: Number of the iteration; one that is played again has its snapshot already.
            module: Module that trains.
            groups: Number of groups of games of a rollout.
            seed: Seed of the run.
        """
        first = (iteration == 0 and self.initial) or not self.pool
        later = iteration > 0 and self.every is not None and iteration % self.every == 0
        if (first or later) and all(one.name != str(iteration) for one in self.pool):
            self.pool.append(Opponent(name=str(iteration), weights=module.trained_weights()))
            if len(self.pool) - len(self.files) > self.size:
                del self.pool[len(self.files)]
        offset = derive_seed(seed, "opponent", iteration) / 2**48
        (number,) = drawn_tasks(self.probabilities(), draws=1, offset=offset)
        self._iteration, self._present, self._groups = iteration, self.pool[number], groups
        return self._present.weights

    def probabilities(self) -> list[float]:
        """Return the probability of each opponent of the pool."""
        rates = [0.5 if one.win_rate is None else one.win_rate for one in self.pool]
        weights = {
            "uniform": [1.0 for _ in rates],
            "squared": [(1.0 - rate) ** 2 for rate in rates],
            "variance": [rate * (1.0 - rate) for rate in rates],
        }[self.rule]
        return probabilities_of(weights, floor=self.floor)

    def seat_of(self, game: int, *, seats: int) -> int | None:
        """Return the policy's seat in a group of games of the present iteration, None where it has all.

        Args:
            game: Number of the group of games.
            seats: Number of seats of a game.
        """
        number = game % self._groups
        before = self._games_before(number)
        if self._games_before(number + 1) == before:
            return None
        # an odd number of games would have one seat more often in every iteration
        before += self._iteration * self._games_before(self._groups)
        return before % seats if self.seat is None else self.seat

    def _games_before(self, group: int) -> int:
        """Return how many of the groups before one are played against an opponent."""
        # less the noise of a product
        return int(self.fraction * group + 1e-9)

    def responder(self, policy: Responder, opponent: Responder) -> OpponentResponder:
        """Return the responder of a rollout of the present policy and of the iteration's opponent."""

        def is_opponents(episode: Episode) -> bool:
            seat = self.seat_of(episode.slot.spec.group, seats=len(episode.seats))
            return seat is not None and seat != episode.seat

        return OpponentResponder(policy=policy, opponent=opponent, is_opponents=is_opponents)

    def own(self, played: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the policy's trajectories of a rollout, with the name of the opponent in the other seats.

        Raises:
            RolloutError: The environment has one seat.
        """
        assert self._present is not None
        if any(one.seats == 1 and one.status is not EpisodeStatus.FAILED for one in played):
            raise RolloutError(_ONE_SEAT)
        found: list[Trajectory] = []
        for one in played:
            # where all episodes have failed, how many seats they have may not be known
            seat = None if one.seats == 1 else self.seat_of(one.game, seats=one.seats)
            if seat is not None:
                one.opponent = self._present.name
            if seat in (None, one.seat):
                found.append(one)
        return found

    def note(self, played: Sequence[Trajectory]) -> None:
        """Add the results of a rollout's games to the win rate. All ranks must call it.

        A game counts 1 if the policy has succeeded and no other seat has, 0 the other way round, and else 1/2. Games
        whose environment failed do not count.

        Args:
            played: All trajectories of this rank, those of the opponent too.
        """
        assert self._present is not None
        games = {
            (one.game, one.member): one for one in played if one.status is not EpisodeStatus.FAILED
        }
        seats = [(self.seat_of(one.game, seats=one.seats), one) for one in games.values()]
        scores = [_score(seat, one.seat_success) for seat, one in seats if seat is not None]
        counts = torch.tensor([len(scores), sum(scores)], dtype=torch.float64)
        self._games, self._score = sum_over_ranks(counts).tolist()
        # of all episodes, those that the opponent has ended, and those in which the policy had no turn
        statistics = RolloutStatistics()
        statistics.update(played)
        self._episode_metrics = episode_metrics(statistics.compute())
        if self._games:
            rate, before = self._score / self._games, self._present.win_rate
            keeps = 0.0 if before is None else self.decay
            self._present.win_rate = keeps * (before or 0.0) + (1.0 - keeps) * rate

    def metrics(self) -> dict[str, float]:
        """Return the games against the iteration's opponent, the win rate in them and that against each of the pool.

        Those of a simulated user and those that the environment names are of all episodes, whoever plays a seat.
        """
        metrics = {"opponent_games": self._games, **self._episode_metrics}
        if self._games:
            metrics["opponent_win_rate"] = self._score / self._games
        rates = {one.name: one.win_rate for one in self.pool if one.win_rate is not None}
        return metrics | {f"win_rate_{name}": rate for name, rate in rates.items()}

    def state_dict(self) -> dict[str, object]:
        """Return the state that a resumed run needs, with the weights of the pool."""
        return {
            "pool": [
                {"name": one.name, "weights": one.weights, "win_rate": one.win_rate}
                for one in self.pool
            ]
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`.

        Raises:
            RolloutError: The checkpoint has another number of opponents of files.
        """
        pool: list[dict[str, Any]] = state["pool"]  # type: ignore[assignment]
        saved = sum(one["name"].startswith("file_") for one in pool)
        if saved != len(self.files):
            raise RolloutError(
                f"opponents.files: the checkpoint has {saved} opponents of files, and {len(self.files)} are set; set "
                "those of the run, or start another"
            )
        # not in the checkpoint's file any more, which may be replaced
        self.pool = [
            Opponent(
                name=one["name"],
                weights={name: weight.clone() for name, weight in one["weights"].items()},
                win_rate=one["win_rate"],
            )
            for one in pool
        ]


def _score(seat: int, success: Sequence[bool]) -> float:
    """Return the score of a game for the player of a seat, by which seats have solved their tasks."""
    if not success:
        return 0.5
    others = any(one for number, one in enumerate(success) if number != seat)
    return 0.5 + 0.5 * (int(success[seat]) - int(others))


@dataclass(kw_only=True, slots=True)
class OpponentResponder:
    """Asks one of two responders, by whose turn it is.

    Attributes:
        policy: Answers for the present policy.
        opponent: Answers for another one.
        is_opponents: Whether the present turn of an episode is the other one's.
    """

    policy: Responder
    opponent: Responder
    is_opponents: Callable[[Episode], bool]

    @property
    def samples(self) -> bool:
        """As the policy's."""
        return self.policy.samples

    @property
    def continuous(self) -> bool:
        """Whether both are."""
        return self.policy.continuous and self.opponent.continuous

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Start on the present turns of these episodes."""
        parts: tuple[list[Episode], list[Episode]] = [], []
        for episode in episodes:
            parts[self.is_opponents(episode)].append(episode)
        for responder, part in zip(self._both, parts, strict=True):
            if part:
                responder.submit(part)

    @property
    def _both(self) -> tuple[Responder, Responder]:
        return self.policy, self.opponent

    def collect(self, *, wait: bool = True) -> list[tuple[int, Response]]:
        """Return the responses finished since the last call, each with its episode's number."""
        return [found for one in self._both for found in one.collect(wait=wait)]

    def release(self) -> None:
        """Free the state of the episodes submitted so far."""
        for one in self._both:
            one.release()

    def collective_rollout(self) -> AbstractContextManager[None]:
        """As the policy's."""
        return self.policy.collective_rollout()
