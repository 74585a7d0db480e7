"""Step advantages from distances in the graph of states that a group has visited."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.episodes.reference_cases import reference_cases

from ragen_pl.algorithms.advantages.graphgpo import GraphRelative, goal_distances, graphgpo
from ragen_pl.algorithms.credit import AdvantageInputs


@pytest.mark.parametrize("case", reference_cases("graphgpo"))
def test_distances_and_advantages_of_the_reference(case) -> None:
    given, expected = case["inputs"], case["outputs"]
    names = ("state", "final_state", "success", "group", "turns")
    state, final, success, group, turns = (torch.tensor(given[name]) for name in names)
    distance = goal_distances(state, final, success, group, turns)
    assert distance.tolist() == expected["next_distance"]
    rewards = torch.tensor(given["turn_rewards"], dtype=torch.float64)
    settings = {
        "omega": given["omega"], "goal_reward": given["goal_reward"], "scale_by_std": given["scale_by_std"],
        "counts_turn": given["convention"] == "paper",
    }  # fmt: skip
    inside = torch.arange(state.shape[1]) < turns[:, None]
    for name, weights in {
        "step": {"step_weight": 1.0, "episode_weight": 0.0},
        "advantages": {name: given[name] for name in ("step_weight", "episode_weight")},
    }.items():
        found = graphgpo(rewards.sum(1), distance, state, group, **settings, **weights) * inside
        torch.testing.assert_close(found, torch.tensor(expected[name]), rtol=1e-5, atol=1e-5)


@st.composite
def graphs(draw):
    """States, final states, successes and numbers of turns of episodes of two groups."""
    episodes, longest = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    number = st.integers(-1, 4)
    state = torch.tensor(
        draw(
            st.lists(
                st.lists(number, min_size=longest, max_size=longest),
                min_size=episodes,
                max_size=episodes,
            )
        )
    )
    columns = [
        torch.tensor(draw(st.lists(values, min_size=episodes, max_size=episodes)))
        for values in (number, st.booleans(), st.integers(0, 1), st.integers(1, longest))
    ]
    final, success, group, turns = columns
    state[torch.arange(longest) >= turns[:, None]] = -1
    return state, final, success, group, turns


@given(graphs())
def test_distances_are_those_of_shortest_paths(graph) -> None:
    state, final, success, group, turns = graph
    found = goal_distances(state, final, success, group, turns)
    for one in group.unique().tolist():
        rows = (group == one).nonzero().flatten().tolist()
        # nodes after each turn and before it, by name
        edges, name = [], {}
        for row in rows:
            count = int(turns[row])
            path = [*state[row, :count].tolist(), int(final[row])]
            nodes = [node if node >= 0 else (row, place) for place, node in enumerate(path)]
            if success[row]:
                nodes[-1] = "goal"
            name[row] = nodes
            edges += itertools.pairwise(nodes)
        distance, border = {"goal": 0}, {"goal"}
        while border:
            border = {a for a, b in edges if b in border and a not in distance}
            distance |= dict.fromkeys(border, max(distance.values()) + 1)
        solved = any(bool(success[row]) for row in rows)
        for row in rows:
            farthest = max(distance.values())
            expected = [
                distance.get(node, farthest + 1) if solved else -1 for node in name[row][1:]
            ]
            assert found[row].tolist() == expected + [0] * (state.shape[1] - len(expected))


def test_groups_without_a_solved_episode_have_the_advantage_of_the_episode_alone() -> None:
    turn = torch.tensor([[0, 1], [0, 1]])
    mask = torch.ones(2, 2, dtype=torch.bool)

    def credit(success: list[int], final: list[int]) -> AdvantageInputs:
        return AdvantageInputs(
            rewards=torch.tensor([[0.0, 1.0], [0.0, 0.0]]), values=None, advantage_mask=mask, loss_mask=mask, turn=turn,
            group=torch.tensor([0, 0]), bootstrap=torch.zeros(2), returns=torch.tensor([1.0, 0.0]),
            state=torch.tensor([[5, 6], [5, 7]]), final_state=torch.tensor(final),
            success=torch.tensor(success, dtype=torch.int8),
        )  # fmt: skip

    estimator = GraphRelative(scale_by_std=False)
    assert estimator(credit([0, 0], [8, 8])).advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    # the second turn of the first episode ends at the goal; in state 7 and its end nobody has found a way
    solved = estimator(credit([1, 0], [8, 8])).advantages
    step = (0.95 - 0.95**3) / 2
    assert solved[:, 0].tolist() == pytest.approx([0.5 + step, -0.5 - step])
    # the second episode ends where the first went on to the goal
    nearer = estimator(credit([1, 0], [8, 6])).advantages
    assert nearer[1, 0] == pytest.approx(-0.5 - (0.95 - 0.95**2) / 2)
    with pytest.raises(ValueError, match="no episode that says whether the task is solved"):
        estimator(credit([-1, -1], [8, 8]))


def test_turns_that_do_not_advance_are_compared_with_no_step() -> None:
    """The first episode begins with a summary; both then take the step to the goal."""
    turn = torch.tensor([[0, 1], [0, -1]])
    mask = turn >= 0
    inputs = AdvantageInputs(
        rewards=torch.zeros(2, 2), values=None, advantage_mask=mask, loss_mask=mask, turn=turn,
        group=torch.tensor([0, 0]), bootstrap=torch.zeros(2), returns=torch.zeros(2),
        state=torch.tensor([[5, 5], [5, -1]]), final_state=torch.tensor([6, 6]),
        success=torch.tensor([1, 1], dtype=torch.int8), advances=torch.tensor([[False, True], [True, True]]),
    )  # fmt: skip
    assert not GraphRelative()(inputs).advantages.any()
