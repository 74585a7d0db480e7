"""Shaping by a potential: the reference cases, and advantages that it does not change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.reference_cases import reference_cases
from support.episodes.trajectories import make_trajectory, make_turn
from support.runs.composing import composed

import envs  # noqa: F401 - registers the environments
from envs.policies import NoisyPolicy, OptimalPolicy
from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.advantages.turn import TurnGAE
from ragen_pl.algorithms.credit import Credit
from ragen_pl.assembly.component_checks import check_components
from ragen_pl.config import ConfigError
from ragen_pl.environments.calls import make_environment
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rewards.potential import PotentialShaping, shaping_terms
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.trajectory import EpisodeStatus

CASES = reference_cases("potential_shaping")
numbers = st.floats(-2, 2, width=32)


def returns_to_go(rewards, gamma):
    values = [0.0]
    for reward in reversed(rewards):
        values.append(reward + gamma * values[-1])
    return values[:0:-1]


def shaped(rewards, potential, *, gamma, status, scale=1.0):
    """Return an episode with these rewards and potentials, shaped."""
    turns = [make_turn(reward=reward) for reward in rewards]
    for turn, value in zip(turns, potential, strict=False):
        turn.potential = value
    episode = make_trajectory(*turns, status=EpisodeStatus(status))
    episode.final_potential = potential[-1]
    PotentialShaping(gamma=gamma, scale=scale)([episode], gather=lambda own: [own])
    return episode


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_rewards_are_those_of_the_reference_cases(case):
    episode = shaped(**case["inputs"])
    rewards, gamma = [turn.reward for turn in episode.turns], case["inputs"]["gamma"]
    outputs = case["outputs"]
    assert rewards == pytest.approx(outputs["shaped"], abs=1e-9)
    assert returns_to_go(rewards, gamma) == pytest.approx(outputs["shaped_return_to_go"], abs=1e-9)
    plain = returns_to_go(case["inputs"]["rewards"], gamma)
    assert plain == pytest.approx(outputs["return_to_go"], abs=1e-9)


@settings(max_examples=60, database=None, derandomize=True)
@given(
    st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), min_size=1, max_size=6),
    numbers,
    st.sampled_from([1.0, 0.9]),
    st.booleans(),
)
def test_advantages_are_those_without_it_where_the_critic_knows_the_potential(
    drawn, bootstrap, gamma, truncated
):
    """V' = V - Phi; also with turns that do not advance, and after a truncation."""
    columns = list(zip(*drawn, strict=True))
    rewards, values, potentials = (torch.tensor([column]) for column in columns[:3])
    advances = torch.tensor([columns[3]])
    final, boot = (0.5, bootstrap) if truncated else (0.0, 0.0)
    discounts = [gamma if advance else 1.0 for advance in columns[3]]
    terms = torch.tensor([shaping_terms(columns[2], final, discounts=discounts)])
    everywhere = torch.ones_like(rewards, dtype=torch.bool)

    def advantages(estimator, rewards, values, boot):
        credit = Credit(
            rewards=rewards.float(),
            values=values.float(),
            advantage_mask=everywhere,
            loss_mask=everywhere,
            turn=torch.arange(rewards.shape[1])[None],
            group=torch.zeros(1, dtype=torch.int64),
            bootstrap=torch.tensor([boot]),
            returns=rewards.float().sum(1),
            advances=advances,
        )
        return estimator(credit).advantages

    for estimator in (
        TurnGAE(gamma=gamma, lam=0.8),
        BilevelGAE(gamma_turn=gamma, gamma_token=1.0, lam_turn=0.8, lam_token=1.0),
    ):
        assert estimator.turn_discount == gamma
        plain = advantages(estimator, rewards, values, boot)
        with_it = advantages(estimator, rewards + terms, values - potentials, boot - final)
        assert torch.allclose(plain, with_it, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "kwargs"),
    [
        ("ragen/FrozenLake-v0", {}),
        ("ragen/Sokoban-v0", {}),
    ],
)
def test_a_solver_gets_nearer_and_ends_with_no_potential(lm, target, kwargs):
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target=target, kwargs=kwargs, max_turns=30, record_potentials=True
        ),
        context=ContextManager(lm, window=1),
    )
    specs = [EpisodeSpec(group=group, member=0, seed=group) for group in range(6)]
    for policy in (OptimalPolicy(), NoisyPolicy(noise=0.5, base="optimal")):
        played = proxy.rollout(ScriptedResponder(policy=policy), specs, seed_key=(0,))
        plain = [returns_to_go([turn.reward for turn in one.turns], 0.9) for one in played]
        starts = [[turn.potential for turn in one.turns] for one in played]
        PotentialShaping(scale=0.5, gamma=0.9)(played, gather=lambda own: [own])
        for one, before, potentials in zip(played, plain, starts, strict=True):
            after = returns_to_go([turn.reward for turn in one.turns], 0.9)
            expected = [value - 0.5 * phi for value, phi in zip(before, potentials, strict=True)]
            assert after == pytest.approx(expected)
            if isinstance(policy, OptimalPolicy):
                assert one.success and potentials == sorted(potentials) and potentials[0] <= -1
                assert potentials[-1] == -1.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=grpo"], "GroupRelative reads returns of whole episodes"),
        (["algorithm=turn_ppo", "gamma=0.5"], r"shaping.gamma=0.5: TurnGAE discounts a turn by"),
        (["algorithm=turn_ppo", "env=bandit"], r"has no potential\(\)"),
    ],
)
def test_shaping_that_would_change_the_task_is_refused(overrides, message):
    gamma = "gamma: 0.5" if "gamma=0.5" in overrides else "gamma: 1.0"
    shaping = "algorithm.rewards.shaping={_target_: ragen_pl.rewards.potential.PotentialShaping, "
    chosen = [one for one in overrides if one != "gamma=0.5"]
    cfg = composed("env=frozenlake", *chosen, f"{shaping}{gamma}}}")
    with pytest.raises(ConfigError, match=message):
        check_components(cfg, {cfg.env.name: make_environment(cfg.env).unwrapped})
