"""Requests that are far longer than the context are refused for work that depends on the context only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from support.models.native_prompts import bundle_of

from ragen_pl.engines.protocol import Prompt
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import Conversation
from ragen_pl.prompts.histories import RecordedCall
from ragen_pl.prompts.requests import RequestRefusedError
from ragen_pl.trajectory import FIRST, JOINED, ChatRequest

TEXTS = {
    "words": "words and other words, ",
    "one word": "x",
    "blanks": " ",
    "letters": "é",
    "control tokens": "<|im_end|> a",
    "marks": "<tool_call> a",
}
# the one is bounded as a text, the other before it is made one
LENGTHS = (100_000, 32_000_000)


class Asking:
    """A program's conversation with a context of so many tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.context = ContextManager(
            bundle_of("qwen2_5"), window="all", system_prompt=None, max_tokens=max_tokens
        )
        self.talk: Conversation = self.context.start("", tools=())
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """Return the prompt of the history and a text, which joins the history if it is not refused."""
        messages = [*self.messages, {"role": "user", "content": text}]
        self.request = ChatRequest(messages=messages, tools=[*tools])
        self.prompt = self.context.observe_request(self.talk, self.request, [])
        self.messages = [*messages]
        return self.prompt

    def answer(self, text: str) -> None:
        message = {"role": "assistant", "content": text}
        recorded = RecordedCall(
            request=self.request,
            message=message,
            prompt=self.prompt,
            response_ids=self.context.encode_response(text),
        )
        self.talk.calls.append(recorded)
        self.messages.append(message)


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "blanks"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("joined", [False, True])
def test_a_far_too_long_request_is_not_encoded_as_a_whole(name, joined, length):
    asking = Asking(2000)
    if joined:
        asking.ask("Hi")
        asking.answer("Tea")
    assert (length > asking.context._encoder.max_characters) == (length == LENGTHS[1])
    text = TEXTS[name] * (length // len(TEXTS[name]))
    begin = time.thread_time()
    with pytest.raises(RequestRefusedError, match="more than the 2000 tokens") as refused:
        asking.ask(text)
    assert refused.value.code == "context_length_exceeded"
    # the tokenizer alone takes many times as long
    assert time.thread_time() - begin < 1.0
    # the program may go on with less
    asking.ask("short")
    assert asking.talk.history == (JOINED if joined else FIRST)


def offered(properties: int) -> list[dict[str, Any]]:
    """Return a tool with so many arguments."""
    names = {f"argument{number}": {"type": "string"} for number in range(properties)}
    parameters = {"type": "object", "properties": names}
    return [
        {
            "type": "function",
            "function": {"name": "f", "description": "", "parameters": parameters},
        }
    ]


def test_far_too_long_schemas_are_not_rendered():
    asking = Asking(2000)
    tools = offered(60_000)
    begin = time.thread_time()
    with pytest.raises(
        RequestRefusedError, match="schemas of the tools have more than the 2000 tok"
    ):
        asking.ask("Hi", tools)
    # a template is rendered some forty times before its first prompt, which takes 9 s
    assert time.thread_time() - begin < 2.0
    # what does not fit is shown all the same, and refused by who plays the episode
    assert len(asking.ask("Hi", offered(300)).ids) > 2000


@pytest.mark.parametrize("name", TEXTS)
def test_what_fits_is_encoded_as_before(name):
    """A prompt is never refused that has as many tokens as the context, or somewhat more."""
    text = TEXTS[name] * 300
    whole = Asking(1 << 30).ask(text).ids
    for limit in (len(whole), len(whole) - 20):
        assert Asking(limit).ask(text).ids.tolist() == whole.tolist()


def test_the_bound_leaves_out_what_the_history_has():
    """A short text after a history that fills the context is encoded: who plays the episode refuses the prompt."""
    history, text = "words " * 60, TEXTS["control tokens"] * 3
    prompts = []
    limit = 1 << 30
    for _ in range(2):
        asking = Asking(limit)
        limit = len(asking.ask(history).ids)
        asking.answer("Tea")
        prompts.append(asking.ask(text).ids.tolist())
        assert asking.talk.history == JOINED
    assert prompts[0] == prompts[1] and len(prompts[0]) > limit


def test_long_texts_are_not_kept():
    asking = Asking(1 << 20)
    for number in range(3):
        asking.ask(f"{number} " + "text " * 3000)
    assert max(len(text) for _, text in asking.context._encoder._encoded) <= 10_000
