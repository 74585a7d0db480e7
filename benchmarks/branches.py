"""Variance of the policy gradient with branches from a turn, at an equal number of sampled turns.

A branch (BPO, arXiv 2607.14171) plays an episode again from its state before some turn. The question is asked here
before anything of a rollout is built: does a group of a few episodes and their branches give a better gradient than a
group of whole episodes with a leave-one-out baseline? Decision trees are small, so the policy is exact and only the
sampling is random.

Branches are unbiased under three conditions. The turn of a fork is drawn before the episode is played, so it does not
depend on it. A turn that is covered by an episode and n branches has weight 1 / (1 + n). The baseline of a turn is the
mean return of those that share the last fork before it, without its own; before the first fork, that of the group's
other episodes. A turn before a fork has the mean return of those that continue from it.

    python benchmarks/branches.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
_FEATURES = 6


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Task of a fixed number of turns, each with the same number of actions. A state is all actions before it.

    Attributes:
        actions: Number of actions of a turn.
        policy: Of each turn the probabilities `[states, actions]`.
        features: Of each turn those of its logits `[states, actions, features]`, which all turns' weights share.
        returns: Of each leaf.
        chance: Whether the environment and not the policy draws the first turn's action.
    """

    actions: int
    policy: Sequence[Array]
    features: Sequence[Array]
    returns: Array
    chance: bool = False

    @property
    def turns(self) -> int:
        """Number of turns."""
        return len(self.policy)

    def play(
        self, states: Array, turn: int, random: np.random.Generator
    ) -> tuple[list[Array], Array]:
        """Play on from a turn.

        Args:
            states: int64 `[episodes]`, the states before the turn.
            turn: Number of the turn.
            random: Draws the actions.

        Returns:
            The states before each turn from this one on and after the last, and the returns `[episodes]`.
        """
        visited = [states]
        for policy in self.policy[turn:]:
            bounds = policy[visited[-1]].cumsum(1)[:, :-1]
            action = (random.random((len(states), 1)) > bounds).sum(1)
            visited.append(visited[-1] * self.actions + action)
        return visited, self.returns[visited[-1]]

    def score(self, turn: int, before: Array, after: Array) -> Array:
        """Return the gradients of the log-probs of a turn's actions, `[episodes, features]`."""
        features = self.features[turn][before]
        if self.chance and turn == 0:
            return np.zeros_like(features[:, 0])
        expected = (self.policy[turn][before][..., None] * features).sum(1)
        return features[np.arange(len(before)), after % self.actions] - expected


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Sampled gradients of groups.

    Attributes:
        values: `[groups, features]`.
        turns: Mean number of turns that a group has sampled.
    """

    values: Array
    turns: float

    @property
    def cost(self) -> float:
        """Variance of a group's gradient, summed over the features, times its sampled turns."""
        return float(self.values.var(0).sum()) * self.turns


def build_tree(
    reward: Callable[[Array], Array],
    *,
    turns: int,
    actions: int,
    chance: bool,
    random: np.random.Generator,
) -> Tree:
    """Return a tree with a random policy.

    Args:
        reward: Returns of leaves from their actions, int64 `[leaves, turns]`.
        turns: Number of turns.
        actions: Number of actions of a turn.
        chance: As in `Tree`.
        random: Draws the policy.
    """
    weights = random.normal(size=_FEATURES) * 0.7
    features = [random.normal(size=(actions**turn, actions, _FEATURES)) for turn in range(turns)]
    logits = [one @ weights for one in features]
    policy = [np.exp(one) / np.exp(one).sum(1, keepdims=True) for one in logits]
    if chance:
        policy[0] = np.full((1, actions), 1 / actions)
    leaves = np.arange(actions**turns)
    taken = leaves[:, None] // actions ** np.arange(turns)[::-1] % actions
    return Tree(
        actions=actions, policy=policy, features=features, returns=reward(taken).astype(float), chance=chance
    )  # fmt: skip


def leave_one_out(
    tree: Tree, *, episodes: int, groups: int, random: np.random.Generator
) -> Gradients:
    """Return the gradients of whole episodes, each with the mean return of the group's others as its baseline."""
    start = np.zeros(groups, dtype=np.int64)
    played = [tree.play(start, 0, random) for _ in range(episodes)]
    total = sum(returns for _, returns in played)
    gradient = np.zeros((groups, _FEATURES))
    for states, returns in played:
        advantage = returns - (total - returns) / (episodes - 1)
        for turn in range(tree.turns):
            gradient += (
                tree.score(turn, states[turn], states[turn + 1]) * advantage[:, None] / episodes
            )
    return Gradients(values=gradient, turns=episodes * tree.turns)


def branched(
    tree: Tree,
    *,
    episodes: int,
    forks: int,
    groups: int,
    weighted: bool,
    random: np.random.Generator,
) -> Gradients:
    """Return the gradients of episodes and of branches from each of them.

    Args:
        tree: Task.
        episodes: Episodes of a group that are played from its first turn.
        forks: Branches of each.
        groups: Number of groups. They share the turns of their forks.
        weighted: Whether a turn has the weight 1 / (1 + branches that cover it), and not 1.
        random: Draws turns and actions.
    """
    start = np.zeros(groups, dtype=np.int64)
    played = [tree.play(start, 0, random) for _ in range(episodes)]
    fork_turns = random.integers(1, tree.turns, size=(episodes, forks))
    sampled = episodes * tree.turns + int((tree.turns - fork_turns).sum())
    branches = [
        [(turn, *tree.play(states[turn], turn, random)) for turn in chosen]
        for (states, _), chosen in zip(played, fork_turns, strict=True)
    ]
    # of each episode the mean return over all that continue from it, by the first turn that it counts from
    means: list[dict[int, Array]] = []
    for (_, returns), own in zip(played, branches, strict=True):
        mean, by_turn = returns, {tree.turns: returns}
        for turn in sorted({turn for turn, *_ in own}, reverse=True):
            siblings = [other for at, _, other in own if at == turn]
            mean = (mean + sum(siblings)) / (1 + len(siblings))
            by_turn[turn] = mean
        means.append(by_turn)
    total = sum(by_turn[min(by_turn)] for by_turn in means)
    gradient = np.zeros((groups, _FEATURES))

    def add(states: list[Array], turn: int, first: int, advantage: Array, weight: float) -> None:
        step = tree.score(turn, states[turn - first], states[turn - first + 1])
        gradient[:] += step * advantage[:, None] * weight / episodes

    for (states, _), own, by_turn in zip(played, branches, means, strict=True):
        weights = [
            1 / (1 + sum(turn <= at for turn, *_ in own)) if weighted else 1.0
            for at in range(tree.turns)
        ]
        baseline = (total - by_turn[min(by_turn)]) / (episodes - 1)
        for turn in range(tree.turns):
            siblings = [returns for at, _, returns in own if at == turn]
            if siblings:
                baseline = sum(siblings) / len(siblings)
            following = by_turn[min(at for at in by_turn if at > turn)]
            add(states, turn, 0, following - baseline, weights[turn])
        for first, branch, returns in own:
            siblings = [other for at, _, other in own if at == first]
            following = by_turn[min(at for at in by_turn if at > first)]
            others = (following + sum(siblings) - returns) / len(siblings)
            for turn in range(first, tree.turns):
                add(branch, turn, first, returns - others, weights[turn])
    return Gradients(values=gradient, turns=sampled)


def joined(parts: Sequence[Gradients]) -> Gradients:
    """Return the gradients of all groups."""
    return Gradients(
        values=np.concatenate([part.values for part in parts]),
        turns=float(np.mean([part.turns for part in parts])),
    )


REWARDS: dict[str, tuple[Callable[[Array], Array], bool]] = {
    "all turns but one must be right": (lambda taken: (taken == 0).sum(1) >= taken.shape[1] - 1, False),
    "each turn pays": (lambda taken: (taken == 0).mean(1), False),
    "a walk must reach a place": (lambda taken: (taken == 0).sum(1) - (taken == 1).sum(1) >= 2, False),
    "each turn pays, chance pays as much": (lambda taken: (taken[:, 0] == 0) + (taken[:, 1:] == 0).mean(1), True),
    "each turn pays, chance pays three times": (
        lambda taken: 3 * (taken[:, 0] == 0) + (taken[:, 1:] == 0).mean(1), True,
    ),
}  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--actions", type=int, default=2)
    args = parser.parse_args()
    chunk = 1000
    print("| return | episodes + branches of each | variance | direction | direction, weight 1 |")
    print("|---|---|---|---|---|")
    for name, (reward, chance) in REWARDS.items():
        tree = build_tree(
            reward, turns=args.turns, actions=args.actions, chance=chance, random=np.random.default_rng(5)
        )  # fmt: skip
        random = np.random.default_rng(0)
        chunks = range(args.groups // chunk)
        whole = joined(
            [leave_one_out(tree, episodes=8, groups=chunk, random=random) for _ in chunks]
        )
        for episodes, forks in ((6, 1), (4, 2), (2, 6)):
            fair, unweighted = (
                joined(
                    [
                        branched(tree, episodes=episodes, forks=forks, groups=chunk, weighted=weighted, random=random)
                        for _ in chunks
                    ]
                )
                for weighted in (True, False)
            )  # fmt: skip
            print(
                f"| {name} | {episodes} + {forks} | {fair.cost / whole.cost:.2f} | {_cosine(fair, whole):.4f} "
                f"| {_cosine(unweighted, whole):.4f} |"
            )


def _cosine(some: Gradients, others: Gradients) -> float:
    """Return the cosine of the mean gradients."""
    mean, other = some.values.mean(0), others.values.mean(0)
    return float(mean @ other / np.linalg.norm(mean) / np.linalg.norm(other))


if __name__ == "__main__":
    main()
