"""Estimators: inputs, errors and results."""

import pytest
import torch
from torch import Tensor

from ragen_pl.algorithms import credit as credit_module
from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.advantages.gae import MaskedGAE, masked_gae
from ragen_pl.algorithms.advantages.group import GroupRelative, LeaveOneOut
from ragen_pl.algorithms.advantages.reinforce import BatchRelative, RawReturn, ReinforcePlusPlus
from ragen_pl.algorithms.advantages.turn import TurnGAE
from ragen_pl.algorithms.advantages.turn_baseline import TurnLeaveOneOut
from ragen_pl.algorithms.credit import AdvantageInputs, spread_to_loss_tokens

ALL = [
    MaskedGAE(gamma=0.9, lam=0.8),
    BilevelGAE(),
    TurnGAE(),
    GroupRelative(),
    GroupRelative(scale_by_std=False),
    LeaveOneOut(),
    TurnLeaveOneOut(gamma=0.9),
    BatchRelative(),
    RawReturn(),
    ReinforcePlusPlus(gamma=0.9),
]


def credit(**changes: Tensor | None) -> AdvantageInputs:
    """Two trajectories: thought, action and end in two turns; the second row has one turn."""
    turn = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 0, -1, -1, -1]])
    action = torch.tensor([[0, 1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0]]).bool()
    parts = {
        "rewards": torch.tensor([[0, 1.0, 0, 0, 2.0, 0, 0], [0, 0, -1.0, 0, 0, 0, 0]]),
        "values": torch.linspace(-1, 1, 14).reshape(2, 7),
        "advantage_mask": action,
        "loss_mask": turn >= 0,
        "turn": turn,
        "group": torch.tensor([0, 0]),
        "bootstrap": torch.zeros(2),
        "returns": torch.tensor([3.0, -1.0]),
    }
    return AdvantageInputs(**(parts | changes))


@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_every_loss_token_gets_the_advantage_of_its_turn(estimator) -> None:
    given = credit()
    estimates = estimator(given)
    advantages = estimates.advantages
    assert advantages.dtype == torch.float32 and advantages.shape == given.rewards.shape
    assert not advantages[~given.loss_mask].any()
    assert advantages[given.loss_mask].any()
    # One action token a turn: thought before it and end after it share its advantage, or its return.
    shared = advantages
    if estimator in ALL[:2]:
        shared = estimates.returns
        own = torch.where(given.loss_mask, shared - given.values, 0.0)
        torch.testing.assert_close(advantages, own)
    assert shared[0, 0] == shared[0, 1] == shared[0, 2]
    assert shared[0, 3] == shared[0, 4] == shared[0, 5]
    assert shared[1, 0] == shared[1, 1] and shared[1, 3] == shared[1, 2]


def test_published_tokens_outside_the_mask_take_their_neighbors_advantage() -> None:
    advantages = BilevelGAE(published=True)(credit()).advantages
    assert advantages[0, 0] == advantages[0, 1] == advantages[0, 2]
    assert advantages[1, 3] == advantages[1, 2] != 0


@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_every_token_of_a_turn_gets_a_target_of_the_critic(estimator) -> None:
    given = credit()
    returns = estimator(given).returns
    assert not returns[~(given.loss_mask | given.advantage_mask)].any()
    # tokens before and after the action are as good as the action
    assert returns[0, 0] == returns[0, 1] == returns[0, 2]
    assert returns[0, 3] == returns[0, 4] == returns[0, 5]


def test_masked_gae_class_passes_its_parameters_and_the_bootstrap() -> None:
    given = credit(bootstrap=torch.tensor([0.0, 2.0]))
    estimates = MaskedGAE(gamma=0.9, lam=0.8)(given)
    expected, returns = masked_gae(
        given.rewards,
        given.values,
        given.advantage_mask,
        gamma=0.9,
        lam=0.8,
        bootstrap=given.bootstrap,
    )
    mask = given.advantage_mask
    assert torch.equal(estimates.advantages[mask], expected[mask])
    assert torch.equal(estimates.returns[mask], returns[mask])
    assert not torch.equal(estimates.returns, MaskedGAE(gamma=0.9, lam=0.8)(credit()).returns)


def test_bilevel_gae_by_hand_with_four_different_parameters() -> None:
    """By hand on two turns of two tokens, values 1, rewards 0 then 3.

    Turns: A_1 = 3 - 1 = 2 and A_0 = 0.5 - 1 + 0.5 * 0.2 * 2 = -0.3; inside, every delta is
    0.8 - 1 = -0.2, and the trace decays by 0.8 * 0.5 = 0.4 a token.
    """
    everywhere = torch.ones(1, 4)
    given = AdvantageInputs(
        rewards=torch.tensor([[0, 0, 0, 3.0]]),
        values=torch.ones(1, 4),
        advantage_mask=everywhere,
        loss_mask=everywhere,
        turn=torch.tensor([[0, 0, 1, 1]]),
        group=torch.tensor([0]),
        bootstrap=torch.zeros(1),
        returns=torch.tensor([3.0]),
    )
    estimates = BilevelGAE(gamma_turn=0.5, lam_turn=0.2, gamma_token=0.8, lam_token=0.5)(given)
    assert estimates.advantages[0].tolist() == pytest.approx([-0.32, -0.3, 0.6, 2.0])


def test_tokens_outside_the_mask_take_the_next_advantage_or_the_last() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 0, 0, 1]]).bool()
    advantages = spread_to_loss_tokens(
        torch.tensor([[9.0, 1.0, 9.0, 2.0, 9.0, 9.0, 3.0]]),
        advantage_mask=mask,
        loss_mask=torch.tensor([[1, 1, 1, 1, 1, 0, 1]]).bool(),
        turn=torch.tensor([[0, 0, 0, 0, 0, 1, 1]]),
    )
    assert advantages.tolist() == [[1.0, 1.0, 2.0, 2.0, 2.0, 0.0, 3.0]]


def test_only_estimators_that_need_values_require_them() -> None:
    for estimator in ALL:
        if estimator.needs_values:
            with pytest.raises(ValueError, match=type(estimator).__name__):
                estimator(credit(values=None))
        else:
            assert estimator(credit(values=None)).advantages.any()


def test_group_relative_by_hand() -> None:
    advantages = GroupRelative(scale_by_std=False)(credit()).advantages
    assert advantages[0].tolist() == [2.0] * 6 + [0.0]
    assert advantages[1].tolist() == [-2.0] * 4 + [0.0] * 3
    scaled = GroupRelative()(credit()).advantages
    assert scaled[0, 0].item() == pytest.approx(2 / (8**0.5 + 1e-6))
    assert LeaveOneOut()(credit()).advantages[0, 0].item() == 4.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage_mask": torch.zeros(2, 7)}, "found reward 1 at trajectory 0, token 1"),
        ({"returns": torch.zeros(3)}, r"found returns of shape \[3\], expected \[2\]"),
        ({"values": torch.zeros(2, 6)}, "found values of shape"),
        ({"loss_mask": torch.ones(2, 7)}, "turn -1"),
        ({"turn": torch.tensor([[1, 1, 1, 0, 0, 0, -1], [0] * 4 + [-1] * 3])}, "fall along a row"),
    ],
)
def test_credit_rejects_inconsistent_tensors(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        credit(**changes)


@pytest.mark.parametrize(
    "make",
    [lambda: MaskedGAE(gamma=1.1), lambda: BilevelGAE(lam_token=-0.1), lambda: TurnGAE(lam=2)],
)
def test_estimators_reject_parameters_outside_their_range(make) -> None:
    with pytest.raises(ValueError, match="expected a number, at least 0 and at most 1"):
        make()


def test_the_inputs_are_importable_by_their_former_name() -> None:
    assert credit_module.Credit is AdvantageInputs
