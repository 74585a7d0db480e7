"""On-policy distillation from sampled tokens: reference cases, and the penalty that it reads."""

from __future__ import annotations

import pytest
import torch
from support.episodes.reference_cases import reference_cases

from ragen_pl.algorithms.advantages.teacher_ratio import TeacherRatio
from ragen_pl.algorithms.aggregation import Aggregation, aggregate
from ragen_pl.algorithms.credit import AdvantageInputs
from ragen_pl.algorithms.policy_loss import clipped_surrogate
from ragen_pl.modules.losses import ReferenceKL


def credit_of(penalty: torch.Tensor | None, mask: torch.Tensor) -> AdvantageInputs:
    rows, zeros = len(mask), torch.zeros(mask.shape)
    return AdvantageInputs(
        rewards=zeros, values=None, advantage_mask=mask, loss_mask=mask, turn=torch.zeros_like(mask, dtype=torch.int64),
        group=torch.arange(rows), bootstrap=torch.zeros(rows), returns=torch.zeros(rows), penalty=penalty,
    )  # fmt: skip


@pytest.mark.parametrize("case", reference_cases("opd_sampled"))
def test_advantages_loss_and_gradient_of_the_reference(case) -> None:
    """Rows of sampled tokens with weights; `bound` is of the log ratio, null clips of the ratio are none."""
    given, expected = case["inputs"], case["outputs"]
    logprobs = torch.tensor(given["logprobs"]).requires_grad_()
    old, teacher, weight = (
        torch.tensor(given[name]) for name in ("old_logprobs", "teacher_logprobs", "weight")
    )
    bound = torch.inf if given["bound"] is None else given["bound"]
    penalty = given["coefficient"] * (old - teacher).clamp(-bound, bound)
    credit = credit_of(torch.where(weight > 0, penalty, 0.0), weight > 0)
    advantages = TeacherRatio(discount=given["discount"])(credit).advantages
    none = {"clip_low": 1.0, "clip_high": 1e9}
    clips = {name: none[name] if given[name] is None else given[name] for name in none}
    losses = clipped_surrogate(logprobs, old, advantages, weight > 0, **clips).losses
    loss = aggregate(
        losses, weight, how=Aggregation.TOKEN_MEAN, tokens=weight.sum(), sequences=len(weight)
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    for name, found in (("advantages", advantages), ("loss", loss), ("grad_logprobs", gradient)):
        torch.testing.assert_close(found, torch.tensor(expected[name]), rtol=1e-5, atol=1e-5)


def test_there_has_to_be_a_penalty_and_its_bound_is_of_the_reward() -> None:
    with pytest.raises(ValueError, match=r"TeacherRatio: found no KL penalty; set .*place=reward"):
        TeacherRatio()(credit_of(None, torch.ones(1, 2, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"kl\.bound=2: bounds the penalty on the reward"):
        ReferenceKL(coefficient=1.0, bound=2.0)
    assert ReferenceKL(coefficient=1.0, bound=2.0, place="reward", estimator="k1").changes_rewards
