"""PPO's surrogate, value loss, divergences and aggregation."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.reference_cases import reference_cases

from ragen_pl.algorithms.aggregation import Aggregation, aggregate
from ragen_pl.algorithms.kl import (
    DivergenceWeights,
    KLEstimator,
    divergence_weights,
    full_kl,
    kl_estimate,
)
from ragen_pl.algorithms.policy_loss import PolicyLoss, clipped_surrogate
from ragen_pl.algorithms.value_loss import value_loss
from ragen_pl.modules.losses import ReferenceKL

maths = settings(max_examples=40, database=None, derandomize=True)
CONSTANT = {Aggregation.CONSTANT: 8.0}


def surrogate(ratios: list[float], advantages: list[float], mask: list[int], **options: float):
    logprobs = torch.tensor([ratios]).log().requires_grad_()
    loss = clipped_surrogate(
        logprobs,
        torch.zeros_like(logprobs),
        torch.tensor([advantages]),
        torch.tensor([mask]),
        **({"clip_low": 0.2, "clip_high": 0.28} | options),
    )
    return loss, logprobs


def test_surrogate_by_hand() -> None:
    loss, _ = surrogate([1.5, 0.5, 1.5, 0.5, 1.0], [1.0, 1.0, -1.0, -1.0, 2.0], [1, 1, 1, 1, 1])
    assert loss.losses[0].tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.0])
    assert (loss.clipped_low.item(), loss.clipped_high.item(), loss.tokens.item()) == (1, 1, 5)
    by_hand = sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.5, 0.5))
    assert loss.approx_kl.item() == pytest.approx(by_hand, rel=1e-5)


def test_clipped_tokens_get_no_gradient() -> None:
    loss, logprobs = surrogate([1.5, 0.5, 1.1], [1.0, -1.0, 1.0], [1, 1, 1])
    loss.losses.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, 0.0, -1.1])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    loss, logprobs = surrogate([5.0, 5.0, 0.5], [-1.0, 1.0, -1.0], [1, 1, 1], dual_clip=3.0)
    assert loss.losses[0].tolist() == pytest.approx([3.0, -1.28, 0.8])
    assert loss.dual_clipped.item() == 1
    loss.losses.sum().backward()
    assert logprobs.grad[0, 0] == 0
    with pytest.raises(ValueError, match=r"found dual_clip=0.5, expected above 1"):
        surrogate([1.0], [1.0], [1], dual_clip=0.5)


def test_tokens_off_the_mask_have_ratio_one_and_no_gradient() -> None:
    nan = math.nan
    loss, logprobs = surrogate([1.1, nan, 9.0], [1.0, nan, 1.0], [1, 0, 0])
    assert loss.losses[0].tolist() == pytest.approx([-1.1, 0.0, 0.0])
    assert loss.clipped_high.item() == 0
    loss.losses.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-1.1, 0.0, 0.0])


def test_large_ratio_gives_a_finite_loss() -> None:
    far = torch.full((1, 1), 500.0)
    loss = clipped_surrogate(far, -far, -torch.ones(1, 1), far > 0, clip_low=0.2, clip_high=0.2)
    assert loss.losses.isfinite().all()


def counts(mask: torch.Tensor, how: Aggregation) -> dict[str, object]:
    """Return the counts of a batch that is a whole optimizer step, with two rows in the first episode."""
    sequences = mask.bool().any(1).sum()
    episode = (torch.arange(len(mask)) - 1).clamp(min=0)
    tokens = torch.zeros(len(mask)).index_add(0, episode, mask.sum(1).float())
    return {
        "how": how,
        "tokens": mask.sum(),
        "sequences": sequences,
        "constant": CONSTANT.get(how),
        "episodes": (tokens > 0).sum(),
        "episode_tokens": tokens[episode],
    }


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Aggregation.TOKEN_MEAN, 10 / 4),
        (Aggregation.EPISODE_MEAN, (1 + 2 + 3 + 4) / 4),
        (Aggregation.SEQ_MEAN_TOKEN_MEAN, (2 + 4) / 2),
        (Aggregation.SEQ_MEAN_TOKEN_SUM, 10 / 2),
        (Aggregation.CONSTANT, 10 / (2 * 8)),
    ],
)
def test_aggregation_by_hand(how, expected) -> None:
    """The last row is padding: it does not count."""
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 50.0, math.nan], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    settings_ = counts(mask, how)
    assert aggregate(losses, mask, **settings_).item() == pytest.approx(expected)
    by_name = aggregate(losses, mask, **(settings_ | {"how": str(how)}))
    assert by_name.item() == pytest.approx(expected)


@maths
@given(
    how=st.sampled_from(list(Aggregation)),
    rows=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6),
    cuts=st.sets(st.integers(1, 5)),
    seed=st.integers(0, 99),
)
def test_gradient_does_not_depend_on_the_split_of_a_batch(how, rows, cuts, seed) -> None:
    mask = torch.tensor(rows)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(*mask.shape, 3, generator=generator)

    step = counts(mask, how)
    of_rows = step.pop("episode_tokens")

    def gradient(bounds: list[int]) -> torch.Tensor:
        weights = torch.ones(3, requires_grad=True)
        for start, stop in itertools.pairwise(bounds):
            losses = (features[start:stop] @ weights).square()
            rows = {"episode_tokens": of_rows[start:stop]}
            aggregate(losses, mask[start:stop], **rows, **step).backward()
        return weights.grad

    split = [0, *sorted(cut for cut in cuts if cut < len(mask)), len(mask)]
    torch.testing.assert_close(gradient(split), gradient([0, len(mask)]), rtol=1e-4, atol=1e-5)


def test_aggregation_rejects_an_unknown_name_and_a_missing_or_unused_constant() -> None:
    mask = torch.ones(1, 1)
    with pytest.raises(ValueError, match="token-median"):
        aggregate(mask, mask, how="token-median", tokens=1.0, sequences=1.0)
    with pytest.raises(ValueError, match="found no episode_tokens"):
        aggregate(mask, mask, how="episode-mean", tokens=1.0, sequences=1.0)
    for settings_ in ({"aggregation": "constant"}, {"constant": 3.0}):
        with pytest.raises(ValueError, match="only with it"):
            PolicyLoss(**settings_)
    with pytest.raises(ValueError, match="above 0"):
        PolicyLoss(aggregation="constant", constant=0)


def test_value_loss_by_hand() -> None:
    """A value clipped towards the return keeps the clipped error; one clipped away has the full error."""
    values = torch.tensor([[2.0, -1.0, math.nan]], requires_grad=True)
    old, returns = torch.zeros(1, 3), torch.tensor([[3.0, 3.0, 0.0]])
    mask = torch.tensor([[1, 1, 0]])
    loss = value_loss(values, returns, mask, old_values=old, clip=0.5)
    assert loss.losses[0].tolist() == [3.125, 8.0, 0.0]
    assert (loss.clipped.item(), loss.tokens.item()) == (1, 2)
    loss.losses.sum().backward()
    assert values.grad[0].tolist() == [0.0, -4.0, 0.0]
    assert value_loss(values, returns, mask).losses[0].tolist() == [0.5, 8.0, 0.0]
    with pytest.raises(ValueError, match=r"found clip=0.5 without old_values"):
        value_loss(values, returns, mask, clip=0.5)


def test_kl_estimators_equal_the_full_sum_in_expectation() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = full_kl(policy.log(), reference.log()).item()
    by_hand = sum(p * math.log(p / q) for p, q in ((0.5, 0.2), (0.3, 0.2), (0.2, 0.6)))
    assert exact == pytest.approx(by_hand, rel=1e-5)
    for how in (KLEstimator.K1, KLEstimator.K3):
        terms = kl_estimate(policy.log(), reference.log(), how=how)
        assert (policy * terms).sum().item() == pytest.approx(exact, rel=1e-5)


def test_full_kl_of_banned_tokens_is_finite_in_value_and_gradient() -> None:
    logits = torch.tensor([0.3, -0.2, -math.inf], requires_grad=True)
    reference = torch.tensor([0.0, 0.0, -math.inf]).log_softmax(-1)
    for first, second in ((reference, logits.log_softmax(-1)), (logits.log_softmax(-1), reference)):
        divergence = full_kl(first, second)
        (grad,) = torch.autograd.grad(divergence, logits)
        assert divergence > 0 and grad[:2].isfinite().all() and grad[:2].any()
    assert full_kl(reference, reference).item() == 0.0


def test_k3_is_bounded_for_large_ratios() -> None:
    divergence = kl_estimate(torch.tensor([-50.0]), torch.tensor([0.0]), how=KLEstimator.K3)
    assert divergence.item() == 10.0
    assert kl_estimate(torch.tensor([1.0]), torch.tensor([3.0]), how="k1").item() == -2.0


@pytest.mark.parametrize("estimator", [how for how in KLEstimator if how is not KLEstimator.K1])
def test_only_k1_is_accepted_in_the_reward(estimator) -> None:
    with pytest.raises(ValueError, match=f"kl.estimator={estimator}: in the reward .* set .*=k1"):
        ReferenceKL(coefficient=0.1, place="reward", estimator=estimator)
    assert ReferenceKL(coefficient=0.1, place="reward", estimator="k1").changes_rewards


@pytest.mark.parametrize("case", reference_cases("opd_weights"))
def test_weights_of_a_divergence_are_those_of_the_reference_cases(case) -> None:
    """`turn_weight` by row and turn; the entropies of tokens off the mask are not read."""
    given = case["inputs"]
    mask, turn = torch.tensor(given["mask"]).bool(), torch.tensor(given["turn"])
    turn_weight = torch.tensor(given["turn_weight"]).gather(1, turn.clamp(min=0))
    entropy = torch.tensor(given["teacher_entropy"]).where(mask, torch.tensor(1e9))
    settings = {"log_vocabulary": given["log_vocabulary"]}
    found = divergence_weights(entropy, turn_weight, mask, **settings)
    torch.testing.assert_close(found, torch.tensor(case["outputs"]["weight"]), rtol=1e-5, atol=1e-6)
    sums: list[torch.Tensor] = []
    parts = [(entropy[row], turn_weight[row], mask[row]) for row in range(len(mask))]
    for part in parts:
        divergence_weights(*part, **settings, all_reduce=lambda own: sums.append(own) or own)
    rows = [divergence_weights(*part, **settings, all_reduce=lambda _: sum(sums)) for part in parts]
    torch.testing.assert_close(torch.stack(rows), found)


def test_weights_of_single_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kl\.weights with estimator=k2: .* set .*full_reverse"):
        ReferenceKL(coefficient=1.0, estimator=KLEstimator.K2, weights=DivergenceWeights())


def test_a_teacher_that_knows_nothing_gives_no_token_a_weight() -> None:
    """Entropies of even distributions are that of the vocabulary but for rounding."""
    entropy = 3.0 + torch.tensor([1e-7, -2e-7, 0.0, 3e-7]).double()
    mask = torch.ones(4, dtype=torch.bool)
    assert not divergence_weights(entropy, mask.float(), mask, log_vocabulary=3.0).any()
