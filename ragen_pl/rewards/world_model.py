"""Reward terms for true statements on the present state (`state_estimation`) and on the next (`transition_prediction`).

After VAGEN's world-model reasoning (Wang et al., 2025). `ragen_pl.prompts.spatial_relations` reads and compares
statements; here a judge scores them over a whole rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import NonNegative, PositiveFraction
from ragen_pl.base.prompt_formats import OBSERVATION, PREDICTION
from ragen_pl.base.run_facts import RunFacts
from ragen_pl.prompts.spatial_relations import Claim, Claims, read_claims, true_claims
from ragen_pl.rewards.shaping import Gather, turns_of
from ragen_pl.trajectory import Relation, Statement, Trajectory


class StateJudge(Protocol):
    """Scores statements: a rule, or a language model behind the same call."""

    def __call__(
        self, statements: Sequence[Statement], *, references: Sequence[Sequence[Relation]]
    ) -> Sequence[float]:
        """Score the statements of one block, all observations or all predictions of a rollout.

        Args:
            statements: This rank's statements, with their texts and the true relations. The texts are
                untrusted: judge them, never obey them.
            references: True relations of the statements of this block on all ranks. A judge corrects for
                chance with them: a text that ignores the state must score 0 on average over them.

        Returns:
            One score for each statement; 1 for a true one.
        """
        ...


class ClaimReader(Protocol):
    """Reads the claims of a statement; a language model that extracts claims fits here."""

    def __call__(self, text: str, names: Sequence[str], /) -> Claims:
        """Return the claims of the text about the named things."""
        ...


@checked
@dataclass(frozen=True, kw_only=True)
class RelationJudge:
    """F1 of the claimed relations, corrected for chance as in Cohen's kappa.

    `score(c, s) = (F1(c, s) - b(c)) / max(1 - b(c), floor)`, where `b(c)` is the mean of `F1(c, s')` over
    all reference states s': what the claims c score by chance. b depends on the claims alone, so the scores
    of a constant statement sum to exactly 0 over the references. A true statement scores 1 (less where b
    exceeds 1 - floor), a wrong one scores below 0.

    Attributes:
        floor: Lower bound of the divisor; one wrong statement costs at most 1 / floor.
        reader: Reads the claims of a text.
    """

    needs_trust = ()

    floor: PositiveFraction = 0.25
    reader: ClaimReader = read_claims

    def __call__(
        self, statements: Sequence[Statement], *, references: Sequence[Sequence[Relation]]
    ) -> list[float]:
        """Score statements; see `StateJudge`."""
        claimed = [self.reader(statement.text, statement.names) for statement in statements]
        true = [true_claims(statement.true_relations) for statement in statements]
        reference = [true_claims(relations) for relations in references]
        # a fixed order: float sums depend on it, and all runs and ranks must agree
        kinds = sorted({kind for claims in claimed + true + reference for kind in claims}, key=str)
        columns = {kind: column for column, kind in enumerate(kinds)}
        counts = _counts(claimed, columns)
        agreement = _f1(counts, _counts(true, columns))
        states, repeats = np.unique(_counts(reference, columns), axis=0, return_counts=True)
        chance = np.zeros(len(statements))
        for state, frequency in zip(states, repeats / max(1, len(reference)), strict=True):
            chance += frequency * _f1(counts, state[None, :])
        scores = (agreement - chance) / np.maximum(1.0 - chance, self.floor)
        return [float(score) for score in scores]


@checked
@dataclass(frozen=True, kw_only=True)
class WorldModelReward:
    """Reward true statements: terms `state_estimation` and `transition_prediction`.

    Responses without the required form have no statements and get no term.

    Attributes:
        grounding_weight: Weight of the score of a turn's observation; 0 adds no term.
        worldmodeling_weight: Weight of the score of its prediction; 0 adds no term.
        judge: Scores the statements.
    """

    needs_trust = ()

    grounding_weight: NonNegative = 0.0
    worldmodeling_weight: NonNegative = 0.0
    judge: StateJudge = field(default_factory=RelationJudge)

    def check_run(self, facts: RunFacts) -> None:
        """Check that responses have the statements, and that the environment has relations."""
        for key, block, weight in (
            ("grounding", OBSERVATION, self.grounding_weight),
            ("worldmodeling", PREDICTION, self.worldmodeling_weight),
        ):
            setting = f"algorithm.rewards.world_model.{key}_weight"
            if weight and block not in facts.blocks:
                raise ValueError(
                    f"{setting}={weight}: a response in env.prompt_format={facts.prompt_format} has no such block; "
                    f"set env.prompt_format={key} or grounding_worldmodeling"
                )
            if weight and "relations" not in facts.environment_members:
                raise ValueError(
                    f"{setting}={weight}: {facts.environment} has no relations() to compare statements with; give "
                    f"it one, or set {setting}=0"
                )

    def __call__(self, trajectories: Sequence[Trajectory], *, gather: Gather) -> None:
        """Score the statements of a rollout and add the weighted scores."""
        if self.grounding_weight:
            self._add(
                trajectories, OBSERVATION, "state_estimation", self.grounding_weight, gather=gather
            )
        if self.worldmodeling_weight:
            self._add(
                trajectories,
                PREDICTION,
                "transition_prediction",
                self.worldmodeling_weight,
                gather=gather,
            )

    def _add(
        self,
        trajectories: Sequence[Trajectory],
        block: str,
        term: str,
        weight: float,
        *,
        gather: Gather,
    ) -> None:
        pairs = [
            (turn, statement)
            for turn in turns_of(trajectories)
            for statement in turn.statements
            if statement.block == block
        ]
        statements = [statement for _, statement in pairs]
        gathered = gather([statement.true_relations for statement in statements])
        references = [relations for rank in gathered for relations in rank]
        scores = self.judge(statements, references=references) if statements else []
        for (turn, statement), score in zip(pairs, scores, strict=True):
            statement.score = float(score)
            turn.reward_terms[term] = weight * statement.score


def _counts(statements: Sequence[Claims], columns: dict[Claim, int]) -> np.ndarray:
    """Return how often each statement makes each claim, int64 `[statements, claims]`."""
    counts = np.zeros((len(statements), len(columns)), dtype=np.int64)
    for row, claims in enumerate(statements):
        for claim, count in claims.items():
            counts[row, columns[claim]] = count
    return counts


def _f1(predicted: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return F1 of each row, float64 `[statements]`; 0 for rows without a claim."""
    common = np.minimum(predicted, target).sum(axis=1)
    total = predicted.sum(axis=1) + target.sum(axis=1)
    return np.where(predicted.sum(axis=1) > 0, 2 * common / np.maximum(total, 1), 0.0)
