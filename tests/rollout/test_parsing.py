"""Reading responses: the strict form, and any text at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_pl.rollout.formats import PromptFormat
from ragen_pl.rollout.parsing import label_tokens, parse_response
from ragen_pl.trajectory import Span

NO_THINK = PromptFormat.NO_THINK
NAMES = ["Up", "Down", "Left", "Right"]


def test_reads_think_and_actions():
    parsed = parse_response(
        "<think>ice ahead</think><answer>Up || right</answer>", NAMES, max_actions=3
    )
    assert (parsed.think, parsed.actions, parsed.valid) == ("ice ahead", [0, 3], True)


def test_more_actions_than_allowed_are_cut_to_the_first():
    assert parse_response(
        "<think></think><answer>Up||Down||Left</answer>", NAMES, max_actions=2
    ).actions == [0, 1]


@pytest.mark.parametrize(
    "text",
    [
        "Up",
        "<answer>Up</answer>",
        "<think>x</think><answer>Jump</answer>",
        "<think>x</think><answer></answer>",
        "<think>x</think><answer>Up || Jump</answer>",
        "<think>x</think><answer>Up</answer> and more",
        "<think>x<think>y</think></think><answer>Up</answer>",
        "<think>x</think><answer>Up</answer><answer>Up</answer>",
        "<think>x</think><answer>Up",
        "",
    ],
)
def test_anything_but_the_strict_form_is_invalid(text):
    assert not parse_response(text, NAMES, max_actions=2).valid


def test_think_may_be_left_out_where_it_is_not_required():
    assert parse_response("<answer>Up</answer>", NAMES, prompt_format=NO_THINK).actions == [0]


pieces = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "Up", " || ", "\n", "é", "\x00", "||"]
)


@given(st.one_of(st.text(), st.lists(pieces).map("".join)))
def test_no_text_crashes_the_parser_and_actions_are_always_known_ones(text):
    parsed = parse_response(text, NAMES, max_actions=3)
    assert all(0 <= action < len(NAMES) for action in parsed.actions) and len(parsed.actions) <= 3
    labels = label_tokens(parsed, list(range(1, len(text) + 1)), end_sampled=False)
    assert labels.shape == (len(text),)
    if parsed.answer_span:
        start, end = parsed.answer_span
        assert (np.flatnonzero(labels == Span.ACTION) == np.arange(start, end)).all()


def test_tokens_are_labelled_by_the_span_they_end_in():
    text = "<think>me 1</think><answer>Up</answer>"
    tokens = ["<think>", "me", " 1", "</think>", "<answer>", "Up", "</answer>", ""]
    ends = np.cumsum([len(token) for token in tokens])
    labels = label_tokens(parse_response(text, NAMES), ends.tolist(), end_sampled=True)
    tag, think, action, end = Span.TAG, Span.THINK, Span.ACTION, Span.END
    assert labels.tolist() == [tag, think, think, tag, tag, action, tag, end]
