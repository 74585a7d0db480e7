"""Splitting rows by length: everything once, little padding."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen_pl.modules.forward import decoder_parts, padding_share, split_by_length

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(torch.tensor)


@given(lengths, st.integers(1, 6))
def test_every_row_is_in_exactly_one_part(length, buckets):
    parts = split_by_length(length, buckets)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(length))) and len(parts) <= buckets


@given(lengths)
def test_more_buckets_never_pad_more(length):
    shares = [padding_share(length, split_by_length(length, buckets)) for buckets in (1, 2, 4, 8)]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(shares))


def test_the_split_with_the_least_padding_is_found():
    parts = split_by_length(torch.tensor([10, 10, 3, 3, 3, 9]), 2)
    assert [sorted(part.tolist()) for part in parts] == [[2, 3, 4], [0, 1, 5]]


@given(lengths, st.integers(60, 300))
def test_parts_stay_under_the_token_budget(length, tokens):
    parts = decoder_parts(length, tokens)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(length)))
    assert all(len(part) * int(length[part].max()) <= tokens for part in parts)
