"""Rewards for saying truly where things are (state estimation) and will be (transition prediction).

After VAGEN's world-model reasoning (Wang et al., 2025). Statements are read and compared by rule in
`rollout.relations`; here they are judged over a whole rollout and their worth is added to the turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ragen_pl.rollout.formats import OBSERVATION, PREDICTION
from ragen_pl.rollout.relations import Axis, Claims, read, truth
from ragen_pl.trajectory import Relation, Statement, Trajectory, Turn

Gather = Callable[[list[list[Relation]]], Sequence[list[list[Relation]]]]
"""Returns every rank's list; see `distributed.gather_over_ranks`."""


class StateJudge(Protocol):
    """Says what statements are worth: a rule, or a language model behind the same call."""

    def __call__(
        self, statements: Sequence[Statement], *, references: Sequence[Sequence[Relation]]
    ) -> Sequence[float]:
        """Judge statements of one part, all observations or all predictions of a rollout.

        Args:
            statements: this rank's, each with its text and the truth it is about. The texts are
                untrusted: they are to be judged, never obeyed.
            references: the truths that all ranks' statements of this part are about. A judge corrects
                for chance with them: a text that ignores its state must earn 0 over all of them.

        Returns:
            A score for each statement, 1 for one that is wholly true.
        """
        ...


class Reader(Protocol):
    """Turns a statement's text into claims; a language model that only extracts stands here."""

    def __call__(self, text: str, names: Sequence[str], /) -> Claims:
        """Return what the text claims about the things named."""
        ...


@dataclass(frozen=True, kw_only=True)
class RelationJudge:
    """F1 of the relations told, corrected for chance as Cohen's kappa is.

    `score(c, s) = (F1(c, s) - b(c)) / max(1 - b(c), floor)` where `b(c)`, the mean of `F1(c, s')` over all
    reference states s', is what the claims c earn by chance. b depends on the claims alone, so that the
    scores of a constant answer sum to exactly 0 over the references, whatever states they are; a true
    answer scores 1 (less where b exceeds 1 - floor); a wrong one scores below 0.

    Attributes:
        floor: of the divisor, which bounds what one wrong statement can cost by 1 / floor.
        reader: how claims are read out of a text.
    """

    floor: float = 0.25
    reader: Reader = read

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0.0 < self.floor <= 1.0:
            raise ValueError(
                f"world_model.judge.floor={self.floor}: expected above 0 and at most 1; set 0.25"
            )

    def __call__(
        self, statements: Sequence[Statement], *, references: Sequence[Sequence[Relation]]
    ) -> list[float]:
        """Judge statements; see `StateJudge`."""
        said = [self.reader(one.text, one.names) for one in statements]
        about = [truth(one.truth) for one in statements]
        known = [truth(reference) for reference in references]
        # in a fixed order: sums of floats depend on it, and every run and rank must get the same ones
        kinds = sorted({claim for one in said + about + known for claim in one}, key=str)
        places = {claim: number for number, claim in enumerate(kinds)}
        claims, truths, all_truths = (_counts(part, places) for part in (said, about, known))
        own = _f1(claims, truths)
        distinct, times = np.unique(all_truths, axis=0, return_counts=True)
        chance = np.zeros(len(statements))
        for row, count in zip(distinct, times / max(1, len(known)), strict=True):
            chance += count * _f1(claims, row[None, :])
        return [float(one) for one in (own - chance) / np.maximum(1.0 - chance, self.floor)]


@dataclass(frozen=True, kw_only=True)
class WorldModelReward:
    """Add what statements are worth to the rewards of their turns.

    Attributes:
        grounding_weight: of the score of a turn's observation; 0 is off.
        worldmodeling_weight: of the score of its prediction; 0 is off.
        judge: scores the statements.
    """

    grounding_weight: float = 0.0
    worldmodeling_weight: float = 0.0
    judge: StateJudge = field(default_factory=RelationJudge)

    def settle(self, trajectories: Sequence[Trajectory], *, gather: Gather) -> None:
        """Score the statements of a rollout and add the weighted scores to `Turn.reward`, part by part.

        A response without the required form has no statements and gets nothing here. All ranks must call
        this together.
        """
        for part, name, weight in (
            (OBSERVATION, "state_estimation", self.grounding_weight),
            (PREDICTION, "transition_prediction", self.worldmodeling_weight),
        ):
            if weight:
                self._settle_part(part, trajectories, gather=gather, name=name, weight=weight)

    def _settle_part(
        self,
        part: str,
        trajectories: Sequence[Trajectory],
        *,
        gather: Gather,
        name: str,
        weight: float,
    ) -> None:
        found: list[tuple[Turn, Statement]] = [
            (turn, statement)
            for trajectory in trajectories
            for turn in trajectory.turns
            for statement in turn.statements
            if statement.part == part
        ]
        references = [
            relations for rank in gather([one.truth for _, one in found]) for relations in rank
        ]
        scores = self.judge([one for _, one in found], references=references) if found else []
        for (turn, statement), score in zip(found, scores, strict=True):
            statement.score = float(score)
            turn.reward_terms[name] = weight * statement.score
            turn.reward += turn.reward_terms[name]


def _counts(parts: Sequence[Claims], places: dict[tuple[str, Axis, int | None], int]) -> np.ndarray:
    """Return claims as counts, int64 `[statements, kinds of claim]`."""
    counts = np.zeros((len(parts), len(places)), dtype=np.int64)
    for row, claims in enumerate(parts):
        for claim, times in claims.items():
            counts[row, places[claim]] = times
    return counts


def _f1(said: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return F1 per row, float64 `[statements]`; 0 where nothing is said."""
    common = np.minimum(said, true).sum(axis=1)
    total = said.sum(axis=1) + true.sum(axis=1)
    spoken = said.sum(axis=1) > 0
    return np.where(spoken, 2 * common / np.maximum(total, 1), 0.0)
