"""The shipped tokenizer: few tokens for the environments' words, any text back as it was, a plain chat format."""

import hashlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_pl.base.prompt_formats import PromptFormat, format_response
from ragen_pl.models.small_vlm import tokenizer as module

TOKENIZER = module.load_tokenizer()


def pieces(text: str) -> list[str]:
    return [TOKENIZER.decode([token]) for token in TOKENIZER(text)["input_ids"]]


@pytest.mark.parametrize(
    "text",
    [
        "<think>me 1 2 goal 3 0 avoid Up Left</think><answer>Right</answer><|end|>",
        "<think>me 1 2 box 2 3 target 4 4 walls Up Down</think><answer>Up || Left || Down</answer><|end|>",
        "<think>last none</think><answer>Yellow</answer><|end|>",
        "me 3 1 goal 2 0 holes 0 2, 0 3, 2 3",
        "reach the goal",
        "push the boxes onto the targets",
        "turn 3 of 6 last 0",
        "so far Up Left Left",
        "first Dragon second Gardener",
    ],
)
def test_every_word_digit_and_tag_is_one_token(text):
    assert pieces(text) == re.findall(r"<.*?>| ?[^\s<>,]+|,", text)


def test_a_frozen_lake_response_takes_fifteen_tokens():
    text = "<think>me 1 2 goal 3 0 avoid Up Left</think><answer>Right</answer><|end|>"
    assert len(TOKENIZER(text)["input_ids"]) == 15


@given(st.text())
def test_any_text_comes_back_as_it_was(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= token < module.VOCAB_SIZE for token in ids)


@given(
    st.lists(st.sampled_from([*module.CONTROL, *module.TAGS, " ", "Up", "\n", "||"])).map("".join)
)
def test_text_with_control_tokens_and_tags_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_training_again_gives_the_shipped_file():
    assert module.train().to_str(pretty=True) == module.ASSET.read_text()


def test_ids_that_saved_models_rely_on():
    ids = {
        "<|pad|>": 0,
        "<|end|>": 1,
        "<|user|>": 2,
        "<|assistant|>": 3,
        "<|system|>": 4,
        "<|image|>": 5,
    }
    ids |= {"<think>": 508, "</think>": 509, "<answer>": 510, "</answer>": 511}
    assert TOKENIZER.get_added_vocab() == ids
    assert (len(TOKENIZER), TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (512, 0, 1)
    assert set(TOKENIZER.all_special_tokens) == set(module.CONTROL)


def test_decoding_without_control_tokens_keeps_the_tags():
    text = "<|assistant|><think>me</think><answer>Up</answer><|end|>"
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>me</think><answer>Up</answer>"


def test_control_tokens_in_an_environments_text_can_be_read_as_letters():
    ids = TOKENIZER("<|image|>Up", split_special_tokens=True)["input_ids"]
    assert 5 not in ids and TOKENIZER.decode(ids) == "<|image|>Up"


CHAT = [
    {"role": "system", "content": " rules\n"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "reach the goal "}]},
    {"role": "assistant", "content": "<think> me </think>\n"},
    {"role": "user", "content": "go"},
]


def render(messages, *, prompt: bool) -> str:
    return TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def test_chat_format_adds_and_trims_nothing():
    assert render(CHAT, prompt=True) == (
        "<|system|> rules\n<|user|><|image|>reach the goal <|assistant|><think> me </think>\n<|end|>"
        "<|user|>go<|assistant|>"
    )


def test_a_turns_rendering_starts_with_that_of_the_turns_before():
    asked, answered = render(CHAT[:2], prompt=True), render(CHAT[:3], prompt=False)
    assert answered.startswith(asked) and render(CHAT, prompt=True).startswith(answered)


def test_ids_of_the_tokens_that_all_formats_have():
    plain = TOKENIZER.get_vocab()
    assert module.load_tokenizer(prompt_format=PromptFormat.NO_THINK).get_vocab() == plain
    digest = hashlib.sha256(json.dumps(sorted(plain.items())).encode()).hexdigest()
    assert len(plain) == 512 and digest.startswith("934aa6bcd3be3843")


@pytest.mark.parametrize(
    "prompt_format",
    [
        PromptFormat.GROUNDING,
        PromptFormat.WORLDMODELING,
        PromptFormat.GROUNDING_WORLDMODELING,
    ],
)
def test_a_format_with_more_tags_adds_their_tokens_after_all_others(prompt_format):
    """Models without these tags keep their ids."""
    plain = TOKENIZER.get_vocab()
    more = module.load_tokenizer(prompt_format=prompt_format).get_vocab()
    assert {token: more[token] for token in plain} == plain
    assert {token: id for token, id in more.items() if token not in plain} == {
        "<observation>": 512,
        "</observation>": 513,
        "<reasoning>": 514,
        "</reasoning>": 515,
        "<prediction>": 516,
        "</prediction>": 517,
    }


@pytest.mark.parametrize("prompt_format", list(PromptFormat))
def test_each_tag_of_a_format_is_one_token(prompt_format):
    tokenizer = module.load_tokenizer(prompt_format=prompt_format)
    text = format_response(prompt_format, "Up", blocks={})
    assert tokenizer.tokenize(text) == re.findall(r"<[^>]*>|Up", text)
