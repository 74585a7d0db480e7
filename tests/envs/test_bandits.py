"""The two bandits: payoffs by count, names, and the exact returns with and without memory."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import numpy as np
import pytest

import envs.bandit_memory
import envs.base
import envs.frozen_lake_map
import envs.sokoban_rules
from envs.bandit import NAME_PAIRS, Bandit, BanditNames
from envs.bandit_memory import BanditMemory, memoryless_return, remembering_return
from envs.policies import OptimalPolicy, RandomPolicy


def test_arm_payoffs() -> None:
    environment = Bandit()
    paid: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(4000):
        environment.reset(seed=seed)
        action = seed % 2
        risky = action == environment.risky_arm
        _, reward, terminated, _, info = environment.step(action)
        assert terminated and info["success"] is risky
        paid[risky].append(reward)
    assert set(paid[False]) == {0.15} and set(paid[True]) == {0.0, 1.0}
    assert np.mean(paid[True]) == pytest.approx(0.25, abs=0.05)  # 5 deviations of the mean


def test_arm_names_are_shuffled_and_name_the_actions() -> None:
    environment, orders = Bandit(), set()
    for seed in range(200):
        text, _ = environment.reset(seed=seed)
        assert text == f"arms {environment.action_names[0]} {environment.action_names[1]}"
        orders.add(environment.action_names)
        best = OptimalPolicy().act(environment, np.random.default_rng(0))
        # the risky arm pays 0.25 on average, the safe arm 0.15
        assert best == environment.risky_arm
    assert ("Dragon", "Phoenix") in orders and ("Phoenix", "Dragon") in orders
    assert len(orders) == 2 * len(NAME_PAIRS[BanditNames.TRAIN])


def test_name_sets_are_disjoint_and_misleading_pairs_are_swapped() -> None:
    train, held_out, misleading = (NAME_PAIRS[names] for names in BanditNames)
    assert not {name for pair in train for name in pair} & {n for pair in held_out for n in pair}
    assert {pair[::-1] for pair in misleading} == set(held_out)
    environment = Bandit(names="misleading")
    bold = {pair[0] for pair in held_out}
    for seed in range(20):
        environment.reset(seed=seed)
        assert environment.action_names[environment.risky_arm] not in bold


def test_success_depends_on_the_expected_payoff() -> None:
    environment = Bandit(safe_reward=0.5)
    environment.reset(seed=0)
    assert environment.step(1 - environment.risky_arm)[4]["success"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": "test"}, "names: found 'test', expected one of train, held_out, misleading"),
        ({"risky_probability": 1.5}, "risky_probability: found 1.5"),
        ({"safe_reward": 0.25}, "set another safe_reward"),
        # 3 * 0.1 is more than 0.3 by rounding
        (
            {"safe_reward": 0.3, "risky_reward": 3.0, "risky_probability": 0.1},
            "set another safe_reward",
        ),
    ],
)
def test_invalid_bandit_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bandit(**arguments)


def episode_return(environment: BanditMemory, policy: Any, *, seed: int | None) -> float:
    observation, _ = environment.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        observation, reward, over, _, _ = environment.step(policy(observation))
        total += reward
    return total


def test_observations_hide_the_pulled_arm() -> None:
    environment = BanditMemory()
    observation, _ = environment.reset(seed=0)
    assert observation == "turn 1 of 6 last none"
    wrong = [arm for arm in range(4) if arm != environment.good_arm]
    first = environment.step(wrong[0])
    environment.reset(seed=0)
    second = environment.step(wrong[1])
    assert first == second and first[0] == "turn 2 of 6 last 0" and first[1] == 0.0
    observation, reward, *_ = environment.step(environment.good_arm)
    assert (observation, reward) == ("turn 3 of 6 last 1", 1.0)


def test_success_is_that_of_the_last_pull() -> None:
    environment = BanditMemory(arms=3, turns=3)
    environment.reset(seed=0)
    assert not environment.step(environment.good_arm)[4]["success"]
    environment.step((environment.good_arm + 1) % 3)
    _, _, terminated, _, info = environment.step(environment.good_arm)
    assert terminated and info["success"]


def test_optimal_policy_reaches_the_remembering_return() -> None:
    rng, environment = np.random.default_rng(0), BanditMemory()
    returns = [
        episode_return(environment, lambda _: environment.optimal_action(rng), seed=seed)
        for seed in range(4000)
    ]
    assert np.mean(returns) == pytest.approx(remembering_return(arms=4, turns=6), abs=0.1)
    assert remembering_return(arms=3, turns=4) == pytest.approx((4 + 3 + 2) / 3)


@pytest.mark.parametrize(("arms", "turns"), [(2, 3), (2, 5), (3, 3), (3, 4), (4, 3)])
def test_no_memoryless_policy_exceeds_the_computed_return(arms: int, turns: int) -> None:
    """Play every deterministic map from observation to arm in every environment."""
    environment = BanditMemory(arms=arms, turns=turns)
    seeds = {}
    for seed in itertools.count():
        environment.reset(seed=seed)
        seeds.setdefault(environment.good_arm, seed)
        if len(seeds) == arms:
            break
    seen = ["turn 1 last none"]
    seen += [f"turn {turn} last {paid}" for turn in range(2, turns + 1) for paid in (0, 1)]
    best = 0.0
    # Arms are interchangeable: the first pull may be fixed.
    for choice in itertools.product(range(arms), repeat=len(seen) - 1):
        policy = dict(zip(seen, (0, *choice), strict=True))
        total = 0
        for good in range(arms):
            last: int | str = "none"
            for turn in range(1, turns + 1):
                last = int(policy[f"turn {turn} last {last}"] == good)
                total += last
        best = max(best, total / arms)
    assert best == pytest.approx(memoryless_return(arms=arms, turns=turns))
    assert best < remembering_return(arms=arms, turns=turns) - 0.1


def test_best_memoryless_policy_reaches_the_computed_return() -> None:
    """A policy that wins 6, 3 and 2 pulls where arm 0, 1 or 2 pays: 11 over 4 environments."""
    environment = BanditMemory()

    def policy(observation: str) -> int:
        turn, last = observation.split()[1], observation.split()[5]
        if turn == "1" or last == "1":
            return 0
        return 1 if turn in "246" else 2

    returns = [episode_return(environment, policy, seed=seed) for seed in range(4000)]
    assert np.mean(returns) == pytest.approx(memoryless_return(arms=4, turns=6), abs=0.15)


def test_random_policy_is_worse_than_memoryless() -> None:
    rng, environment = np.random.default_rng(0), BanditMemory()
    policy = RandomPolicy()
    returns = [
        episode_return(environment, lambda _: policy.act(environment, rng), seed=seed)
        for seed in range(2000)
    ]
    assert np.mean(returns) == pytest.approx(6 / 4, abs=0.1)


@pytest.mark.parametrize(("arms", "turns"), [(1, 6), (9, 6), (4, 2), (4, 21)])
def test_invalid_memory_bandit_arguments_raise(arms: int, turns: int) -> None:
    with pytest.raises(ValueError, match=r"(arms|turns): found \d+, expected"):
        BanditMemory(arms=arms, turns=turns)


@pytest.mark.parametrize(
    "module", [envs.base, envs.bandit_memory, envs.frozen_lake_map, envs.sokoban_rules]
)
def test_doctests(module: Any) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0 and outcome.failed == 0
