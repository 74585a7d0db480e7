"""Prompt formats: written responses are read back, other forms are invalid, spans are exact."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_pl.base.prompt_formats import PromptFormat, format_instructions, format_response
from ragen_pl.prompts.parsing import label_tokens, parse_response
from ragen_pl.trajectory import Span

NAMES = ["Up", "Down"]
BLOCKS = {"observation": "goal Down", "reasoning": "go on", "prediction": "goal here"}
FORMATS = [name for name in PromptFormat if name is not PromptFormat.NATIVE]
FORMS = {
    "free_think": "<think>go on</think><answer>Up</answer>",
    "no_think": "<answer>Up</answer>",
    "grounding": "<think><observation>goal Down</observation><reasoning>go on</reasoning></think>"
    "<answer>Up</answer>",
    "worldmodeling": "<think><reasoning>go on</reasoning><prediction>goal here</prediction></think>"
    "<answer>Up</answer>",
    "grounding_worldmodeling": "<think><observation>goal Down</observation><reasoning>go on</reasoning>"
    "<prediction>goal here</prediction></think><answer>Up</answer>",
}


@pytest.mark.parametrize("prompt_format", FORMATS)
def test_response_is_valid_in_its_own_format_only(prompt_format):
    text = format_response(prompt_format, "Up", blocks=BLOCKS)
    assert text == FORMS[prompt_format]
    for other in FORMATS:
        parsed = parse_response(text, NAMES, prompt_format=other)
        # a free think block may hold any text, so also the blocks of the other formats
        free = other is PromptFormat.FREE_THINK and prompt_format is not PromptFormat.NO_THINK
        assert parsed.valid == (other is prompt_format or free)
    parsed = parse_response(f" \n{text}\n", NAMES, prompt_format=prompt_format)
    assert parsed.think == (None if prompt_format is PromptFormat.NO_THINK else "go on")
    assert parsed.statements == {name: BLOCKS[name] for name in prompt_format.statements}


def test_instructions_show_the_form():
    instructions = format_instructions(PromptFormat.GROUNDING, max_actions=3)
    assert (
        "<observation>…</observation><reasoning>…</reasoning></think><answer>…</answer>"
        in instructions
    )
    assert "one to 3" in instructions and "prediction" not in instructions
    assert format_instructions(PromptFormat.NO_THINK, max_actions=1).count("<") == 2


@pytest.mark.parametrize(
    "text",
    [
        FORMS["grounding_worldmodeling"].replace("<reasoning>go on</reasoning>", ""),
        FORMS["grounding_worldmodeling"].replace("go on", "go <prediction>on"),
        FORMS["grounding_worldmodeling"].replace("go on", "go </think> on"),
        FORMS["grounding_worldmodeling"].replace("<think>", "<think>well "),
        FORMS["grounding_worldmodeling"] + "!",
        "<think><reasoning>a</reasoning><observation>b</observation><prediction>c</prediction></think>"
        "<answer>Up</answer>",
        FORMS["free_think"],
        FORMS["no_think"],
    ],
)
def test_missing_doubled_or_misplaced_blocks_are_invalid(text):
    parsed = parse_response(text, NAMES, prompt_format=PromptFormat.GROUNDING_WORLDMODELING)
    assert not parsed.valid and not parsed.statements and not parsed.spans


pieces = st.sampled_from(
    [f"<{slash}{name}>" for name in (*BLOCKS, "think", "answer") for slash in ("", "/")]
    + ["Up", " ", "\n", "é", "goal", "||"]
)


@given(st.lists(pieces, max_size=40).map("".join), st.sampled_from(FORMATS))
def test_any_text_parses_in_every_format(text, prompt_format):
    parsed = parse_response(text, NAMES, prompt_format=prompt_format)
    labels = label_tokens(parsed, list(range(1, len(text) + 1)), end_sampled=False)
    assert labels.shape == (len(text),)
    for label, start, end in parsed.spans:
        assert (np.flatnonzero(labels == label) == np.arange(start, end)).all()


def test_parsing_time_is_linear_in_the_length():
    blocks = "<observation></observation> <reasoning></reasoning> <prediction></prediction> "
    began = time.process_time()
    for text in (
        "<think>" * 20_000,
        "<think>" + blocks * 4_000,
        "<think>" + " " * 50_000,
        "<" * 99_999,
    ):
        assert not parse_response(
            text, NAMES, prompt_format=PromptFormat.GROUNDING_WORLDMODELING
        ).valid
    assert time.process_time() - began < 2.0


def test_each_block_has_its_own_label():
    words = [
        "<think>",
        "<observation>",
        "goal",
        " Up",
        "</observation>",
        "<reasoning>",
        "go",
        "</reasoning>",
    ]
    words += [
        "<prediction>",
        "here",
        "</prediction>",
        "</think>",
        "<answer>",
        "Up",
        "</answer>",
        "",
    ]
    ends = np.cumsum([len(word) for word in words]).tolist()
    prompt_format = PromptFormat.GROUNDING_WORLDMODELING
    labels = label_tokens(
        parse_response("".join(words), NAMES, prompt_format=prompt_format), ends, end_sampled=True
    )
    tag, seen, think, predicted = Span.TAG, Span.OBSERVATION, Span.THINK, Span.PREDICTION
    assert labels.tolist() == [
        tag, tag, seen, seen, tag, tag, think, tag, tag, predicted, tag, tag, tag, Span.ACTION, tag, Span.END,
    ]  # fmt: skip
