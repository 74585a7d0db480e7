"""The smallest of the largest values over ranks is the one that sorting all values gives."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.machines.threaded_ranks import on_ranks

from ragen_pl.algorithms.masks import above_quantile
from ragen_pl.algorithms.order_statistics import smallest_of_top

INFINITY = float("inf")


def by_sorting(values, fraction):
    count = max(1, round(fraction * len(values)))
    return float(torch.tensor(values).topk(count).values[-1])


@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30), st.floats(0.01, 0.99)
)
@example([0.0, -0.0, 1e-45, -1e-45, INFINITY, -INFINITY], 0.5)
@example([2.0] * 7, 0.3)
def test_it_is_exact(values, fraction):
    assert smallest_of_top(torch.tensor(values), fraction=fraction) == by_sorting(values, fraction)


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.95])
def test_ranks_find_the_value_of_all(fraction):
    generator = torch.Generator().manual_seed(0)
    # values of many sizes with ties, and a rank without any
    values = torch.randn(1000, generator=generator).exp().mul(100).round() / 100
    parts = [values[:10], values[10:10], values[10:700], values[700:]]
    found = on_ranks(
        *(
            lambda all_reduce, part=part: smallest_of_top(
                part, fraction=fraction, all_reduce=all_reduce
            )
            for part in parts
        )
    )
    assert found == [by_sorting(values.tolist(), fraction)] * 4


def test_no_values_anywhere():
    nothing = torch.zeros(0)
    assert on_ranks(*[lambda all_reduce: smallest_of_top(
        nothing, fraction=0.5, all_reduce=all_reduce)] * 2) == [None, None]  # fmt: skip
    mask = torch.zeros(1, 2, dtype=torch.bool)
    assert not above_quantile(torch.ones(1, 2), mask, fraction=0.5).any()


def test_ranks_keep_the_tokens_that_one_would():
    generator = torch.Generator().manual_seed(1)
    entropy = torch.rand(4, 50, generator=generator).mul(20).round() / 20
    mask = torch.rand(4, 50, generator=generator) > 0.3
    lowest = by_sorting(entropy[mask].tolist(), 0.2)
    expected = mask & (entropy >= lowest)
    assert above_quantile(entropy, mask, fraction=0.2).equal(expected)
    rows = on_ranks(
        *(
            lambda all_reduce, row=row: above_quantile(
                entropy[row : row + 1], mask[row : row + 1], fraction=0.2, all_reduce=all_reduce
            )
            for row in range(4)
        )
    )
    assert torch.cat(rows).equal(expected)
