"""Parsing of responses: the strict form, and arbitrary text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.prompts.parsing import label_tokens, parse_response
from ragen_pl.trajectory import Span

NO_THINK = PromptFormat.NO_THINK
NAMES = ["Up", "Down", "Left", "Right"]


def test_response_has_reasoning_and_actions():
    parsed = parse_response(
        "<think>ice ahead</think><answer>Up || right</answer>", NAMES, max_actions=3
    )
    assert (parsed.think, parsed.actions, parsed.valid) == ("ice ahead", [0, 3], True)


def test_first_actions_count_beyond_the_limit():
    assert parse_response(
        "<think></think><answer>Up||Down||Left</answer>", NAMES, max_actions=2
    ).actions == [0, 1]


def test_blanks_around_a_name_do_not_count():
    """The check at the start of a run takes such names."""
    names = (" Up", "Down\t")
    for text in ("Up", " Up", "up ", "DOWN"):
        parsed = parse_response(f"<think></think><answer>{text}</answer>", names)
        assert parsed.actions == [text.strip().casefold() == "down"]


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
def test_other_forms_are_invalid(text):
    assert not parse_response(text, NAMES, max_actions=2).valid


def test_no_think_format_needs_no_think_block():
    assert parse_response("<answer>Up</answer>", NAMES, prompt_format=NO_THINK).actions == [0]


pieces = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "Up", " || ", "\n", "é", "\x00", "||"]
)


@given(st.one_of(st.text(), st.lists(pieces).map("".join)))
def test_any_text_parses_to_known_actions(text):
    parsed = parse_response(text, NAMES, max_actions=3)
    assert all(0 <= action < len(NAMES) for action in parsed.actions) and len(parsed.actions) <= 3
    labels = label_tokens(parsed, list(range(1, len(text) + 1)), end_sampled=False)
    assert labels.shape == (len(text),)
    if parsed.spans:
        start, end = parsed.spans[Span.ACTION]
        assert (np.flatnonzero(labels == Span.ACTION) == np.arange(start, end)).all()


def test_tokens_are_labeled_by_the_span_of_their_last_character():
    text = "<think>me 1</think><answer>Up</answer>"
    tokens = ["<think>", "me", " 1", "</think>", "<answer>", "Up", "</answer>", ""]
    ends = np.cumsum([len(token) for token in tokens])
    labels = label_tokens(parse_response(text, NAMES), ends.tolist(), end_sampled=True)
    tag, think, action, end = Span.TAG, Span.THINK, Span.ACTION, Span.END
    assert labels.tolist() == [tag, think, think, tag, tag, action, tag, end]
