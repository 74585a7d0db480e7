"""Rows split into microbatches by length and by a token budget."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen_pl.data.microbatches import (
    default_buckets,
    split_by_length,
    split_by_tokens,
    split_for_scoring,
    split_into,
)

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(torch.tensor)


def computed_positions(length, microbatches) -> int:
    return sum(len(rows) * int(length[rows].max()) for rows in microbatches)


@given(lengths, st.integers(1, 6))
def test_every_row_is_in_exactly_one_microbatch(length, buckets):
    microbatches = split_by_length(length, buckets)
    assert sorted(torch.cat(microbatches).tolist()) == list(range(len(length)))
    assert len(microbatches) <= buckets


@given(lengths)
def test_more_buckets_never_pad_more(length):
    counts = [computed_positions(length, split_by_length(length, n)) for n in (1, 2, 4, 8)]
    assert all(later <= earlier for earlier, later in pairwise(counts))


def test_split_by_length_finds_the_least_padding():
    microbatches = split_by_length(torch.tensor([10, 10, 3, 3, 3, 9]), 2)
    assert [sorted(rows.tolist()) for rows in microbatches] == [[2, 3, 4], [0, 1, 5]]


@given(lengths, st.integers(60, 300))
def test_split_by_tokens_keeps_the_budget(length, tokens):
    microbatches = split_by_tokens(length, tokens)
    assert sorted(torch.cat(microbatches).tolist()) == list(range(len(length)))
    assert all(len(rows) * int(length[rows].max()) <= tokens for rows in microbatches)


@given(lengths, st.integers(60, 300))
def test_split_for_scoring_keeps_the_budget_and_pads_no_more_than_buckets(length, tokens):
    microbatches = split_for_scoring(length, tokens)
    assert sorted(torch.cat(microbatches).tolist()) == list(range(len(length)))
    assert all(len(rows) * int(length[rows].max()) <= tokens for rows in microbatches)
    by_length = computed_positions(length, split_by_length(length, 8))
    assert computed_positions(length, microbatches) <= by_length


@given(lengths, st.integers(1, 300), st.integers(0, 5))
def test_split_into_makes_the_number_asked_for_and_keeps_the_budget(length, tokens, more):
    count = len(split_by_tokens(length, tokens)) + more
    microbatches = split_into(length, count, tokens=tokens)
    assert len(microbatches) == count
    assert sorted(torch.cat(microbatches).tolist()) == list(range(len(length)))
    assert sum(not len(rows) for rows in microbatches) == max(0, count - len(length))
    for rows in microbatches:
        assert len(rows) < 2 or len(rows) * int(length[rows].max()) <= tokens


def test_a_gpu_computes_a_minibatch_in_one_pass():
    assert default_buckets(torch.device("cuda")) == 1 < default_buckets(torch.device("cpu"))
