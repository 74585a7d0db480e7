"""Masked, bi-level and turn-level GAE against plain loops, and their common properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machines.threaded_ranks import on_ranks
from torch import Tensor

from ragen_pl.algorithms.advantages.bilevel import bilevel_gae
from ragen_pl.algorithms.advantages.gae import MaskedGAE, masked_gae
from ragen_pl.algorithms.advantages.gated import GatedGAE, explained_variance
from ragen_pl.algorithms.advantages.turn import turn_gae
from ragen_pl.algorithms.credit import AdvantageInputs
from ragen_pl.algorithms.scan import reverse_scan
from ragen_pl.algorithms.turns import sum_at_turn_end, turn_ends

maths = settings(max_examples=60, database=None, derandomize=True)
number = st.floats(-3, 3, width=32)
unit = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


@st.composite
def batches(draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, turn and bootstrap with gaps, padding and turns that have no reward."""
    rows, turns = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    lines = []
    for _ in range(rows):
        line = [-1] * draw(st.integers(0, 2))
        for k in range(turns):
            for _ in range(draw(st.integers(1, 4))):
                line += [k] + [-1] * draw(st.sampled_from([0, 0, 0, 1, 3]))
        lines.append(line)
    width = max([len(line) for line in lines] + [1])
    turn = torch.tensor([line + [-1] * (width - len(line)) for line in lines])
    table = st.lists(number, min_size=rows * width, max_size=rows * width)
    values = torch.tensor(draw(table)).reshape(rows, width)
    quiet = torch.tensor(draw(table)).reshape(rows, width)
    rewards = torch.where((quiet > 0) & (turn >= 0), quiet, 0.0)
    bootstrap = torch.tensor(draw(st.lists(number, min_size=rows, max_size=rows)))
    return rewards, values, turn, bootstrap


def loop_gae(rewards, values, bootstrap, *, gamma, lam) -> list[float]:
    """Schulman's recursion on plain lists."""
    advantages, trace, following = [0.0] * len(rewards), 0.0, bootstrap
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        trace, following = delta + gamma * lam * trace, values[t]
        advantages[t] = trace
    return advantages


def loop_bilevel(rewards, values, turn, bootstrap, *, gamma_turn, lam_turn, gamma_token, lam_token):
    """The design's two levels on one trajectory without gaps."""
    starts = [t for t in range(len(turn)) if t == 0 or turn[t] != turn[t - 1]]
    spans = list(zip(starts, [*starts[1:], len(turn)], strict=False))
    sums = [sum(rewards[a:b]) for a, b in spans]
    ends = [values[b - 1] for _, b in spans]
    steps = loop_gae(sums, ends, bootstrap, gamma=gamma_turn, lam=lam_turn)
    out = []
    for (a, b), step, value in zip(spans, steps, ends, strict=True):
        inner = [0.0] * (b - a - 1) + [step + value]
        out += loop_gae(inner, values[a:b], 0.0, gamma=gamma_token, lam=lam_token)
    return out


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-4)


@maths
@given(st.lists(st.tuples(number, st.floats(0, 1, width=32)), min_size=1, max_size=40))
def test_reverse_scan_equals_the_plain_recurrence(pairs) -> None:
    total, expected = 0.0, []
    for x, decay in reversed(pairs):
        total = x + decay * total
        expected.append(total)
    x, decay = torch.tensor(pairs).T[:, None, :].unbind(0)
    close(reverse_scan(x, decay=decay)[0], torch.tensor(expected[::-1]))


@maths
@given(batches(), unit, unit)
def test_masked_gae_equals_gae_over_the_tokens_of_the_mask(batch, gamma, lam) -> None:
    rewards, values, turn, bootstrap = batch
    mask = turn >= 0
    advantages, returns = masked_gae(
        rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap
    )
    for i, on in enumerate(mask):
        r, v = rewards[i, on].tolist(), values[i, on].tolist()
        expected = loop_gae(r, v, bootstrap[i].item(), gamma=gamma, lam=lam)
        close(advantages[i, on], torch.tensor(expected))
    close(returns[mask], (advantages + values)[mask])
    assert not advantages[~mask].any() and not returns[~mask].any()


@maths
@given(batches(), unit, unit, unit, unit)
def test_bilevel_gae_equals_the_plain_loop(
    batch, gamma_turn, lam_turn, gamma_token, lam_token
) -> None:
    rewards, values, turn, bootstrap = batch
    parameters = {
        "gamma_turn": gamma_turn,
        "lam_turn": lam_turn,
        "gamma_token": gamma_token,
        "lam_token": lam_token,
    }
    advantages, returns = bilevel_gae(rewards, values, turn, bootstrap=bootstrap, **parameters)
    for i, on in enumerate(turn >= 0):
        lists = [x[i, on].tolist() for x in (rewards, values, turn)]
        expected = loop_bilevel(*lists, bootstrap[i].item(), **parameters)
        close(advantages[i, on], torch.tensor(expected))
    close(returns, torch.where(turn >= 0, advantages + values, 0.0))


@maths
@given(batches())
def test_bilevel_gae_with_all_parameters_one_equals_masked_gae(batch) -> None:
    rewards, values, turn, bootstrap = batch
    ones = {"gamma_turn": 1.0, "lam_turn": 1.0, "gamma_token": 1.0, "lam_token": 1.0}
    advantages, _ = bilevel_gae(rewards, values, turn, bootstrap=bootstrap, **ones)
    at_ends = sum_at_turn_end(rewards, turn=turn)
    expected, _ = masked_gae(at_ends, values, turn >= 0, gamma=1.0, lam=1.0, bootstrap=bootstrap)
    close(advantages, expected)


@maths
@given(batches(), unit)
def test_bilevel_gae_without_inner_decay_has_a_closed_form(batch, gamma) -> None:
    """`A_j = sum_k gamma^{k-t} r_k + gamma^{K-t} V_boot - V_j` for token j of turn t."""
    rewards, values, turn, bootstrap = batch
    advantages, _ = bilevel_gae(
        rewards,
        values,
        turn,
        gamma_turn=gamma,
        lam_turn=1.0,
        gamma_token=1.0,
        lam_token=1.0,
        bootstrap=bootstrap,
    )
    turns = int(turn.max()) + 1
    for i, j in (turn >= 0).nonzero().tolist():
        t = int(turn[i, j])
        sums = [rewards[i, turn[i] == k].sum().item() for k in range(turns)]
        expected = sum(gamma ** (k - t) * sums[k] for k in range(t, turns))
        expected += gamma ** (turns - t) * bootstrap[i].item() - values[i, j].item()
        assert advantages[i, j].item() == pytest.approx(expected, abs=1e-4)


FAMILY = {
    "masked": lambda r, v, turn, b: masked_gae(r, v, turn >= 0, gamma=0.9, lam=0.8, bootstrap=b),
    "bilevel": lambda r, v, turn, b: bilevel_gae(
        r, v, turn, gamma_turn=0.9, lam_turn=0.8, gamma_token=0.95, lam_token=0.7, bootstrap=b
    ),
    "turn": lambda r, v, turn, b: turn_gae(r, v, turn, gamma=0.9, lam=0.8, bootstrap=b),
}


@pytest.mark.parametrize("estimate", FAMILY.values(), ids=FAMILY.keys())
class TestCommonProperties:
    """Properties of all three, with gamma and lambda below 1."""

    @maths
    @given(batches(), st.sampled_from([math.nan, math.inf, 1e6]))
    def test_tokens_off_the_mask_have_no_influence(self, estimate, batch, poison) -> None:
        rewards, values, turn, bootstrap = batch
        off = turn < 0
        spoiled = rewards.masked_fill(off, poison), values.masked_fill(off, poison)
        for a, b in zip(estimate(*spoiled, turn, bootstrap), estimate(*batch), strict=True):
            assert torch.equal(a, b)

    @maths
    @given(batches(), st.integers(0, 5), st.integers(0, 5))
    def test_padding_changes_nothing(self, estimate, batch, left, right) -> None:
        def pad(x: Tensor, fill: float) -> Tensor:
            return torch.nn.functional.pad(x, (left, right), value=fill)

        rewards, values, turn, bootstrap = batch
        padded = estimate(pad(rewards, 0.0), pad(values, 3.0), pad(turn, -1), bootstrap)
        for a, b in zip(padded, estimate(*batch), strict=True):
            close(a[:, left : left + turn.shape[1]], b)

    @maths
    @given(batches())
    def test_rows_are_independent(self, estimate, batch) -> None:
        whole = estimate(*batch)
        for i in range(len(batch[0])):
            for a, b in zip(estimate(*(x[i : i + 1] for x in batch)), whole, strict=True):
                assert torch.equal(a[0], b[i])


def test_turn_without_reward_counts_as_a_turn() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.zeros(1, 3)
    half = {"gamma_turn": 0.5, "lam_turn": 1.0, "gamma_token": 1.0, "lam_token": 1.0}
    advantages, _ = bilevel_gae(rewards, values, torch.tensor([[0, 1, 2]]), **half)
    assert advantages.tolist() == [[0.25, 0.5, 1.0]]


def test_truncated_trajectory_bootstraps_at_the_turn_level() -> None:
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    half = {"gamma_turn": 0.5, "lam_turn": 1.0, "gamma_token": 1.0, "lam_token": 1.0}
    boot = torch.tensor([4.0])
    advantages, returns = bilevel_gae(
        rewards, values, torch.tensor([[0, 0]]), bootstrap=boot, **half
    )
    assert returns.tolist() == [[3.0, 3.0]]
    assert advantages.tolist() == [[2.5, 2.75]]


def test_turn_gae_reads_the_value_before_the_turn() -> None:
    """By hand: d_1 = 2 + 0.5*4 - 1 = 3, d_0 = 1 + 0.5*1 - 0.5 = 1, A_0 = 1 + 0.5*0.5*3."""
    rewards = torch.tensor([[0.0, 1.0, 0.0, 2.0]])
    values = torch.tensor([[0.5, 9.0, 1.0, 9.0]])
    advantages, returns = turn_gae(
        rewards,
        values,
        torch.tensor([[0, 0, 1, 1]]),
        gamma=0.5,
        lam=0.5,
        bootstrap=torch.tensor([4.0]),
    )
    assert advantages.tolist() == [[1.75, 1.75, 3.0, 3.0]]
    assert returns.tolist() == [[2.25, 2.25, 4.0, 4.0]]


def test_turn_ends_follow_turn_indices() -> None:
    turn = torch.tensor([[-1, 0, -1, 0, 1, 2, 2, -1], [0, 0, 0, 0, 0, 0, 0, 0]])
    assert turn_ends(turn).nonzero().tolist() == [[0, 3], [0, 4], [0, 6], [1, 7]]


def gated(values: Tensor, rewards: Tensor, rows: slice = slice(None)) -> AdvantageInputs:
    """Episodes of three tokens, the second of which is outside of M_adv; the last episode is cut."""
    mask = torch.tensor([True, False, True]).expand(len(values), 3)
    rewards = torch.where(mask, rewards, 0.0)
    parts = {
        "rewards": rewards, "values": values, "advantage_mask": mask, "loss_mask": torch.ones_like(mask),
        "turn": torch.zeros(mask.shape, dtype=torch.int64), "group": torch.arange(len(values)),
        "bootstrap": torch.tensor([0.0] * (len(values) - 1) + [2.0]), "returns": rewards.sum(1),
    }  # fmt: skip
    return AdvantageInputs(**{name: part[rows] for name, part in parts.items()})


def test_gate_uses_the_critic_where_it_explains_returns() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, noise = torch.randn(2, 6, 3, generator=generator)
    settings = {"gamma": 0.9, "lam": 0.5}
    returns = torch.stack([rewards[:, 0] + 0.9 * rewards[:, 2], rewards[:, 2]], dim=1)
    returns[-1] += 2.0 * torch.tensor([0.81, 0.9])
    good, bad = (torch.zeros(6, 3) for _ in range(2))
    good[:, ::2], bad[:, ::2] = returns + 0.5 * noise[:, ::2], -returns
    used = GatedGAE(**settings)(gated(good, rewards))
    expected = MaskedGAE(**settings)(gated(good, rewards))
    torch.testing.assert_close(used.advantages, expected.advantages, rtol=0, atol=0)
    left = GatedGAE(**settings)(gated(bad, rewards))
    centered = returns - returns.mean()
    torch.testing.assert_close(left.advantages, centered[:, [0, 1, 1]])
    # the critic goes on to learn from its own targets
    torch.testing.assert_close(left.returns, MaskedGAE(**settings)(gated(bad, rewards)).returns)
    mask = torch.ones_like(returns, dtype=torch.bool)
    assert float(explained_variance(returns, -returns, mask)) == pytest.approx(-3.0)
    assert float(explained_variance(returns, returns, mask)) == 1.0
    # a constant critic explains nothing
    assert float(explained_variance(returns, torch.ones_like(returns), mask)) == pytest.approx(
        0, abs=1e-5
    )
    explained = float(explained_variance(returns, good[:, ::2], mask))
    assert 0.2 < explained < 1
    below = GatedGAE(threshold=explained + 0.01, **settings)(gated(good, rewards))
    torch.testing.assert_close(below.advantages, left.advantages)


def test_gate_is_the_same_on_all_ranks() -> None:
    """Of the first rank's part alone the critic explains all, of the whole less than nothing."""
    rewards = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    values = torch.zeros(6, 3)
    values[:, 0], values[:, 2] = rewards[:, 0] + rewards[:, 2], rewards[:, 2]
    values[5, ::2] += 2.0
    values[3:] *= -1
    whole = GatedGAE()(gated(values, rewards)).advantages
    parts = on_ranks(*[
        lambda reduce, rows=rows: GatedGAE()(gated(values, rewards, rows), all_reduce=reduce).advantages
        for rows in (slice(0, 3), slice(3, 6))
    ])  # fmt: skip
    torch.testing.assert_close(torch.cat(parts), whole)
    first = GatedGAE()(gated(values, rewards, slice(0, 3))).advantages[:, ::2]
    torch.testing.assert_close(first, torch.zeros(3, 2), rtol=0, atol=1e-6)
    assert whole[:3, ::2].abs().max() > 0.1


def test_gate_of_equal_returns_gives_no_advantage() -> None:
    given = gated(torch.randn(3, 3, generator=torch.Generator().manual_seed(2)), torch.zeros(3, 3))
    given.bootstrap = torch.zeros(3)
    assert not GatedGAE()(given).advantages.any()
