"""Gradients of estimators on a process that is enumerated: after each turn the policy goes on or stops.

How long an episode lasts is then the policy's own choice. A baseline that depends on it, such as a mean that includes
the episode's own later turns, changes the expected gradient.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from support.episodes.reference_cases import reference_cases
from torch import Tensor

from ragen_pl.algorithms.advantages.adaptive import AdaptiveBilevelGAE
from ragen_pl.algorithms.advantages.cast import SolverTeacher
from ragen_pl.algorithms.advantages.gagpo import GroupGAE
from ragen_pl.algorithms.advantages.gigpo import GroupInGroup, step_returns
from ragen_pl.algorithms.advantages.graphgpo import GraphRelative
from ragen_pl.algorithms.advantages.group import GroupRelative, LeaveOneOut
from ragen_pl.algorithms.advantages.reinforce import BatchRelative, ReinforcePlusPlus
from ragen_pl.algorithms.advantages.turn_baseline import (
    Absent,
    TurnLeaveOneOut,
    turn_leave_one_out,
)
from ragen_pl.algorithms.credit import AdvantageInputs, Estimator
from ragen_pl.config import config_dir
from ragen_pl.rewards.potential import shaping_terms

PRESETS = {
    file.stem: OmegaConf.load(file).algorithm.estimator
    for file in sorted((config_dir() / "algorithm").glob("*.yaml"))
    if OmegaConf.select(OmegaConf.load(file), "algorithm.estimator")
    and file.stem
    not in ("maxrl", "gdpo", "graphgpo", "cast")  # whose gradient is not that of the returns
}


@dataclass(frozen=True)
class Process:
    """Turn k pays `reward[k]` plus or minus `noise[k]`, stopping after it pays `final[k]`; the last turn stops."""

    continue_logit: list[float]
    reward: list[float]
    noise: list[float]
    final: list[float]

    @property
    def go_on(self) -> Tensor:
        """Probability to go on after each turn but the last."""
        return torch.tensor(self.continue_logit, dtype=torch.float64).sigmoid()

    def episodes(self) -> list[tuple[float, list[float]]]:
        """Return the probability and the turn rewards of each episode."""
        found = []
        for turns in range(1, len(self.reward) + 1):
            stops = 1.0 if turns == len(self.reward) else 1 - float(self.go_on[turns - 1])
            chance = float(self.go_on[: turns - 1].prod()) * stops
            signs = [(-1, 1) if self.noise[turn] else (0,) for turn in range(turns)]
            for drawn in itertools.product(*signs):
                rewards = [self.reward[k] + sign * self.noise[k] for k, sign in enumerate(drawn)]
                rewards[-1] += self.final[turns - 1]
                found.append((chance / len(list(itertools.product(*signs))), rewards))
        return found

    def values(self, gamma: float) -> list[float]:
        """Return the value of the state that each turn starts in, and 0 after the last."""
        values = [0.0] * (len(self.reward) + 1)
        for turn in reversed(range(len(self.reward))):
            c = 0.0 if turn == len(self.reward) - 1 else float(self.go_on[turn])
            after = c * gamma * values[turn + 1] + (1 - c) * self.final[turn]
            values[turn] = self.reward[turn] + after
        return values


# noisy rewards that change sign, and stopping that is better at first
MIXED = Process([0.4, -0.3], [1.0, -0.5, 0.7], [0.0, 0.5, 0.0], [0.2, 0.9, -0.4])
# all episodes are as likely as a power of a half
EVEN = Process([0.0, 0.0], [1.0, -0.5, 0.7], [0.0, 0.5, 0.0], [0.2, 0.9, -0.4])
EVERY_TURN_PAYS = Process([0.0, 0.0], [1.0] * 3, [0.0] * 3, [0.0] * 3)


class Groups:
    """All groups of a process with their probabilities, as one batch with one token a turn.

    Args:
        process: The process.
        members: Episodes of a group.
        gamma: Discount of the values.
        one_state: Whether all turns start in the same state; else there is one for each turn.
    """

    def __init__(self, process: Process, *, members: int, gamma: float, one_state: bool) -> None:
        self.process, self.members = process, members
        groups = list(itertools.product(process.episodes(), repeat=members))
        chances = [
            torch.tensor([chance for chance, _ in group]).double().prod() for group in groups
        ]
        self.chance = torch.stack(chances).repeat_interleave(members) / members
        rewards = [rewards for group in groups for _, rewards in group]
        most = len(process.reward)
        self.turns = torch.tensor([len(each) for each in rewards])
        place = torch.arange(most).expand(len(rewards), most)
        on = place < self.turns[:, None]
        self.rewards = torch.tensor([each + [0.0] * (most - len(each)) for each in rewards])
        self.score = torch.zeros(len(rewards), most, dtype=torch.float64)
        for turn, c in enumerate(process.go_on):
            went_on = self.turns > turn + 1
            self.score[:, turn] = torch.where(went_on, 1 - c, -c) * on[:, turn]
        values = torch.tensor(process.values(gamma))[:most].expand(len(rewards), most)
        self.credit = AdvantageInputs(
            rewards=self.rewards,
            values=torch.where(on, values, 0.0).float(),
            advantage_mask=on,
            loss_mask=on,
            turn=torch.where(on, place, -1),
            group=torch.arange(len(groups)).repeat_interleave(members),
            bootstrap=torch.zeros(len(rewards)),
            returns=self.rewards.sum(1),
            state=torch.where(on, 0 if one_state else place, -1),
        )

    def gradient(self, advantages: Tensor) -> Tensor:
        """Return the expected gradient for the logits to go on, `[turns - 1]`."""
        expected = self.chance[:, None] * self.score * advantages.double()
        return expected.sum(0)[:-1]

    def advantages(self, estimator: Estimator) -> Tensor:
        """Return the advantages of an estimator that compares all pairs of rows, and uses those of a group."""
        rows = torch.arange(len(self.turns)).split(200 * self.members)
        return torch.cat([estimator(self.rows(some)).advantages for some in rows])

    def repeated(self, times: Tensor) -> AdvantageInputs:
        """Return a batch with each episode this often."""
        return self.rows(torch.arange(len(times)).repeat_interleave(times))

    def rows(self, rows: Tensor) -> AdvantageInputs:
        parts = {field.name: getattr(self.credit, field.name) for field in fields(AdvantageInputs)}
        return AdvantageInputs(
            **{name: None if part is None else part[rows] for name, part in parts.items()}
        )

    def weighted(self, advantages: Tensor, times: Tensor) -> Tensor:
        """Return the gradient with the advantages of `repeated`, of which one copy of each episode is used."""
        return self.gradient(advantages[times.cumsum(0) - times])

    def true_gradient(self, gamma: float) -> Tensor:
        """Return the gradient with the discounted returns from each turn on."""
        rest = torch.zeros_like(self.rewards, dtype=torch.float64)
        for turn in reversed(range(self.rewards.shape[1])):
            after = rest[:, turn + 1] if turn + 1 < self.rewards.shape[1] else 0.0
            rest[:, turn] = self.rewards[:, turn] + gamma * after
        return self.gradient(rest)


def step_term(estimator: Estimator, groups: Groups) -> Tensor:
    """Return the gradient that the step advantage of `GroupInGroup` adds."""
    with_steps, without = (
        groups.gradient(groups.advantages(replace(estimator, step_weight=weight)))
        for weight in (1.0, 0.0)
    )
    return with_steps - without


def undiscounted(estimator: Estimator) -> bool:
    """Whether an estimator compares whole returns of episodes."""
    return not any(field.name.startswith("gamma") for field in fields(estimator))


def of_preset(name: str, gamma: float) -> Estimator:
    """Return a preset's estimator with this discount for each turn, and without division by a deviation of a group."""
    estimator = instantiate(PRESETS[name])
    wanted = {"gamma": gamma, "gamma_turn": gamma, "low": 0.0, "high": 1.0, "scale_by_std": False}
    names = {field.name for field in fields(estimator)}
    return replace(estimator, **{key: value for key, value in wanted.items() if key in names})


@pytest.mark.parametrize("one_state", [True, False])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("name", PRESETS)
def test_expected_gradient_is_that_of_the_returns(name, gamma, one_state) -> None:
    """Up to (N - 1) / N where an episode's own return is in the mean, and the deviation of the whole batch."""
    estimator = of_preset(name, gamma)
    by_batch = isinstance(estimator, BatchRelative | ReinforcePlusPlus)
    groups = EVEN if by_batch else MIXED
    groups = Groups(groups, members=1 if by_batch else 2, gamma=gamma, one_state=one_state)
    expected = groups.true_gradient(1.0 if undiscounted(estimator) else gamma)
    if isinstance(estimator, AdaptiveBilevelGAE):
        # whose discounts depend on values: equal to BilevelGAE where they are constant
        estimator = replace(estimator, beta=0.0)
    if isinstance(estimator, GroupGAE) and one_state:
        # whose value is that of no state, and must not stand for what follows
        estimator = replace(estimator, lam=1.0)
    if isinstance(estimator, GroupInGroup):
        episode = replace(estimator, step_weight=0.0)(groups.credit).advantages
        torch.testing.assert_close(groups.gradient(episode), groups.true_gradient(1.0) / 2)
        found = step_term(estimator, groups)
    elif by_batch:
        # all episodes as often as they are likely
        times = (groups.chance / groups.chance.min()).round().long()
        found = groups.weighted(estimator(groups.repeated(times)).advantages, times)
        assert float(found @ expected) > 0
        found = found * expected.norm() / found.norm()
    else:
        found = groups.gradient(estimator(groups.credit).advantages)
        found = found * 2 if isinstance(estimator, GroupRelative) else found
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_episodes_own_visits_and_deviations_bias_the_published_step_advantage() -> None:
    """Every turn pays, and going on is better: centered on all visits, the policy learns it less."""
    groups = Groups(EVERY_TURN_PAYS, members=3, gamma=1.0, one_state=True)
    published = GroupInGroup(gamma=1.0, step_baseline="all", scale_by_std=False)
    assert step_term(published, groups).tolist() == pytest.approx([0.3125, 0.0954], abs=1e-3)
    assert groups.true_gradient(1.0).tolist() == pytest.approx([0.375, 0.125])
    unbiased = replace(published, step_baseline="others")
    assert step_term(unbiased, groups).tolist() == pytest.approx([0.375, 0.125])


@pytest.mark.parametrize("case", reference_cases("stopping_bias"))
def test_gradients_of_the_reference(case: dict) -> None:
    """`gradient` by estimator, by exact enumeration, for `members` of a group and a discount `gamma` for each turn."""
    given = dict(case["inputs"])
    members, gamma = given.pop("members"), given.pop("gamma")
    groups = Groups(Process(**given), members=members, gamma=gamma, one_state=True)
    found = {"return_to_go": groups.true_gradient(gamma)}
    estimators = {
        "leave_one_out_per_turn_index": TurnLeaveOneOut(gamma=gamma),
        "leave_one_out_absent_zero": TurnLeaveOneOut(gamma=gamma, absent=Absent.ZERO),
        "episode_leave_one_out": LeaveOneOut(),
    }
    for name, estimator in estimators.items():
        found[name] = groups.gradient(groups.advantages(estimator))
    steps = GroupInGroup(gamma=gamma)
    found["anchor_leave_trajectory_out"] = step_term(steps, groups)
    found["anchor_mean"] = step_term(replace(steps, step_baseline="all"), groups)
    for name, gradient in found.items():
        expected = case["outputs"]["gradient"][name]
        assert gradient.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("case", reference_cases("turn_baseline"))
def test_turn_baseline_of_the_reference(case: dict) -> None:
    given = case["inputs"]
    rewards, turns = torch.tensor(given["turn_rewards"]), torch.tensor(given["turns"])
    advantages = turn_leave_one_out(
        step_returns(rewards, gamma=given["gamma"]),
        turns,
        torch.tensor(given["group"]),
        absent=Absent(given["absent"]),
    )
    expected = torch.tensor(case["outputs"]["advantages"])
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("process", "sign"), [(EVERY_TURN_PAYS, 1), (MIXED, -1), (EVEN, -1)])
def test_the_graph_of_states_leads_to_the_goal_whether_it_pays_or_not(process, sign) -> None:
    """The goal is the end of the last turn. The size of the deviation is that in docs/algorithms.md."""
    groups = Groups(process, members=3, gamma=1.0, one_state=False)
    turns = groups.credit.turns
    credit = replace(groups.credit, success=(turns == turns.max()).to(torch.int8))
    found = groups.gradient(GraphRelative()(credit).advantages)
    expected = groups.true_gradient(1.0)
    cosine = float(found @ expected / (found.norm() * expected.norm()))
    assert cosine * sign > 0
    assert (1 - cosine**2) ** 0.5 < 0.02 if sign > 0 else (1 - cosine**2) ** 0.5 > 0.8


# a way of three turns to a reward of 1 that ends badly halfway, and a smaller reward at its start
RISKY = Process([0.0, -2.0], [0.0] * 3, [0.0] * 3, [0.4, -1.0, 1.0])
RAW = SolverTeacher(weight=1.0, compress=False, scale_by_rms=False)


def with_potentials(groups: Groups, values: list[float]) -> AdvantageInputs:
    """Return the batch with these potentials of the states by turn; the last state's is what stopping pays."""
    on, final = groups.credit.turn >= 0, torch.tensor(groups.process.final)
    potential = torch.tensor(values).expand(len(on), len(values))
    ends = final[groups.turns - 1]
    return replace(
        groups.credit, potential=torch.where(on, potential, -torch.inf), final_potential=ends
    )


def of_solver(process: Process) -> list[float]:
    """Return the values of a player that stops where that pays most. Only stopping pays."""
    best = list(process.final)
    for turn in reversed(range(len(best) - 1)):
        best[turn] = max(best[turn], best[turn + 1])
    return best


def solver_term(groups: Groups, estimator: SolverTeacher, values: list[float]) -> Tensor:
    """Return the gradient that the solver's advantages add."""
    credit = with_potentials(groups, values)
    episode = groups.gradient(LeaveOneOut()(credit).advantages)
    torch.testing.assert_close(episode, groups.true_gradient(1.0), rtol=1e-5, atol=1e-6)
    return groups.gradient(estimator(credit).advantages) - episode


def test_a_teacher_is_exact_where_it_plays_as_the_policy_and_shaping_whatever_it_plays() -> None:
    groups = Groups(RISKY, members=2, gamma=1.0, one_state=False)
    true = groups.true_gradient(1.0)
    own = solver_term(groups, RAW, RISKY.values(1.0)[:3])
    torch.testing.assert_close(own, true, rtol=1e-5, atol=1e-6)
    # stopping two turns before the reward is right for this policy, and wrong for the solver
    solver = solver_term(groups, RAW, of_solver(RISKY))
    reach = torch.tensor([1.0, float(RISKY.go_on[0])], dtype=torch.float64)
    better = torch.tensor([0.6, 2.0], dtype=torch.float64)
    expected = reach * RISKY.go_on * (1 - RISKY.go_on) * better
    torch.testing.assert_close(solver, expected, rtol=1e-5, atol=1e-6)
    assert true[0] < -0.1 < 0.1 < solver[0] and true[1] > 0 < solver[1]
    # with the same potentials in the rewards
    shaped = groups.credit.rewards.clone()
    for row, turns in enumerate(groups.turns.tolist()):
        terms = shaping_terms(of_solver(RISKY)[:turns], 0.0, discounts=[1.0] * turns)
        shaped[row, :turns] += torch.tensor(terms)
    shaped = replace(groups.credit, rewards=shaped, returns=shaped.sum(1))
    found = groups.gradient(TurnLeaveOneOut(gamma=1.0)(shaped).advantages)
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)


def test_compressed_advantages_of_a_teacher_that_plays_as_the_policy_are_biased() -> None:
    """Of two outcomes that cancel, the larger and rarer one counts for less. The size is that in docs/algorithms.md."""
    large = replace(RISKY, final=[10 * value for value in RISKY.final])
    groups = Groups(large, members=2, gamma=1.0, one_state=False)
    true = groups.true_gradient(1.0)
    found = solver_term(groups, replace(RAW, compress=True), large.values(1.0)[:3])
    cosine = float(found @ true / (found.norm() * true.norm()))
    assert 0.12 < (1 - cosine**2) ** 0.5 < 0.14
