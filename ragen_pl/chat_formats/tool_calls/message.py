"""A parsed response: reasoning, content, tool calls, and a label for each character."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ragen_pl.trajectory import Span


class CallFormat(StrEnum):
    """How a chat template writes tool calls.

    - `hermes`: `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>` (Qwen 2.5, Qwen3, Qwen3-VL)
    - `qwen_xml`: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>` (Qwen3.5 and later)
    - `llama_json`: `{"name": "f", "parameters": {"a": 1}}` without markers (Llama 3.1, 3.2)
    - `gemma`: `<|tool_call>call:f{a:1}<tool_call|>` (Gemma 4)
    - `lfm`: `<|tool_call_start|>[f(a=1)]<|tool_call_end|>` (LFM2)
    """

    HERMES = "hermes"
    QWEN_XML = "qwen_xml"
    LLAMA_JSON = "llama_json"
    GEMMA = "gemma"
    LFM = "lfm"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningTags:
    """The markers that a template writes around reasoning."""

    opening: str
    closing: str


THINK_TAGS = ReasoningTags(opening="<think>", closing="</think>")
"""Of Qwen and LFM2 templates."""
THOUGHT_CHANNEL = ReasoningTags(opening="<|channel>thought", closing="<channel|>")
"""Of Gemma 4 templates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A well-formed call.

    Attributes:
        name: Name of the tool, known or not.
        arguments: Values of JSON's types by name.
        span: Characters from the first one of the opening marker to the end of the closing marker. Calls between the
            same markers (LFM2 writes a list of calls) have the same span.
    """

    name: str
    arguments: dict[str, Any]
    span: tuple[int, int]


@dataclass(kw_only=True, slots=True)
class AssistantMessage:
    """A parsed response.

    Attributes:
        reasoning: Text between the reasoning tags without outer blanks, blocks joined by a line break; None without a
            block.
        content: All text outside of reasoning and well-formed calls, malformed calls included. Line breaks next to a
            marker and blank text between two are left out; the pieces are joined by a line break.
        calls: The well-formed calls, in order.
        spans: Consecutive character ranges `(label, start, end)` that cover the text once. `THINK` is reasoning,
            `ACTION` text of the answer or the inside of a call, `TAG` a marker, `OTHER` a malformed call or blanks.
        problem: One line on the first malformed call; None if there is none.
    """

    reasoning: str | None
    content: str
    calls: list[ToolCall]
    spans: list[tuple[Span, int, int]]
    problem: str | None
