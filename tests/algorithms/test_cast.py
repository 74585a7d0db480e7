"""Advantages from a solver's values, in environments that have one."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.episodes.trajectories import make_trajectory, make_turn
from support.runs.composing import composed

from envs.policies import NoisyPolicy, OptimalPolicy
from ragen_pl.algorithms.advantages.cast import SolverTeacher, solver_advantages, standardized
from ragen_pl.algorithms.masks import sampled
from ragen_pl.assembly.component_checks import check_components
from ragen_pl.config import ConfigError
from ragen_pl.data.batch import CreditLayout
from ragen_pl.data.collate import collate
from ragen_pl.environments.calls import make_environment
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.modules.credit import assign_credit
from ragen_pl.modules.masking import Masks, compute_token_masks
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder


def played(lm, target, policy, **settings):
    environments = EnvironmentManager(target=target, record_potentials=True, **settings)
    proxy = AgentProxy(environments=environments, context=ContextManager(lm, window=1))
    specs = [
        EpisodeSpec(group=number // 2, member=number % 2, seed=number // 2) for number in range(12)
    ]
    return proxy.rollout(ScriptedResponder(policy=policy), specs, seed_key=(0,))


def advantages(lm, episodes, estimator):
    """Return the advantage of each turn of each episode, as training computes it."""
    batch = collate(episodes, lm)
    layout = CreditLayout.of(batch)
    masks = compute_token_masks(batch, layout, Masks(loss=sampled, advantage=sampled), kl=None)
    found = assign_credit(batch, layout, masks, estimator, whiten_advantages=False).advantages
    return [
        [float(found[row][layout.turn[row] == turn].unique()) for turn in range(len(one.turns))]
        for row, one in enumerate(episodes)
    ]


RAW = SolverTeacher(weight=1.0, compress=False, scale_by_rms=False)


@pytest.mark.parametrize(
    ("target", "moves"), [("ragen/FrozenLake-v0", True), ("ragen/Sokoban-v0", False)]
)
def test_the_solvers_steps_are_those_of_the_game(lm, target, moves):
    solved = played(lm, target, OptimalPolicy(), max_turns=40)
    assert all(one.success and one.final_potential == 0 for one in solved)
    # groups whose members have the same returns
    for one, found in zip(solved, advantages(lm, solved, RAW), strict=True):
        assert sum(found) == -one.turns[0].potential
        assert set(found) == {1.0} if moves else set(found) <= {0.0, 1.0}
    noisy = played(lm, target, NoisyPolicy(noise=0.6, base="optimal"), max_turns=8)
    both = advantages(lm, noisy, RAW), advantages(lm, noisy, SolverTeacher(weight=0.0))
    kinds = set()
    for one, found, episode in zip(noisy, *both, strict=True):
        steps = [with_it - without for with_it, without in zip(found, episode, strict=True)]
        known = [*(turn.potential for turn in one.turns), one.final_potential]
        expected = [after - before for before, after in itertools.pairwise(known)]
        assert steps == pytest.approx(expected, abs=1e-5)
        kinds |= set(expected)
    assert min(kinds) < 0 < max(kinds)


def test_turns_of_all_ranks_have_one_scale():
    random = torch.Generator().manual_seed(0)
    turns = torch.tensor([3, 1, 2, 3])
    potential = -torch.randint(0, 6, (4, 3), generator=random).float()
    steps = solver_advantages(potential, torch.tensor([0.0, -9.0, 0.0, -4.0]), turns)
    assert steps[1, 1:].tolist() == [0.0, 0.0]
    whole = standardized(steps, turns)
    sums = []
    for rows in (slice(0, 2), slice(2, 4)):
        standardized(steps[rows], turns[rows], all_reduce=lambda own: sums.append(own) or own)
    for rows in (slice(0, 2), slice(2, 4)):
        part = standardized(steps[rows], turns[rows], all_reduce=lambda own: sums[0] + sums[1])
        torch.testing.assert_close(part, whole[rows])
    inside = torch.arange(3) < turns[:, None]
    assert float(whole[inside].square().mean()) == pytest.approx(1.0)
    assert standardized(torch.zeros(0, 3), turns[:0]).shape == (0, 3)
    assert standardized(torch.zeros(1, 3), turns[:1]).tolist() == [[0.0, 0.0, 0.0]]


def test_an_environment_without_a_potential_is_refused():
    cfg = composed("env=bandit", "algorithm=cast", "rollout.group_size=8", "rollout.groups=2")
    with pytest.raises(ConfigError, match=r"SolverTeacher: .* has no potential\(\) that says how"):
        check_components(cfg, {cfg.env.name: make_environment(cfg.env).unwrapped})


def test_a_state_without_a_potential_is_refused(lm):
    turns = [make_turn(reward=1.0) for _ in range(2)]
    turns[0].potential = -1.0
    episodes = [make_trajectory(*turns), make_trajectory(*turns)]
    for one in episodes:
        one.final_potential = 0.0
    with pytest.raises(ValueError, match="SolverTeacher: a state has no potential; let the env"):
        advantages(lm, episodes, RAW)
    for one in episodes:
        one.final_potential = None
    with pytest.raises(ValueError, match="found potential=None"):
        advantages(lm, episodes, RAW)
