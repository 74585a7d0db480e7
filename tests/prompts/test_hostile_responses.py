"""Responses made to break a parser: none raises, none is lost from the content, and none is slow.

Work is counted, not timed: the characters that searches, patterns and slices pass over, and the executed lines. The
count is the same on any machine and under any load.
"""

import itertools
import re
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.template_calls import TEMPLATES, check_spans

from ragen_pl.chat_formats.tool_calls import gemma, lfm, llama_json, qwen_xml, values
from ragen_pl.chat_formats.tool_calls.message import THINK_TAGS, THOUGHT_CHANNEL, CallFormat
from ragen_pl.chat_formats.tool_calls.parsing import parse_message
from ragen_pl.trajectory import Span

PIECES = (
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=p>", "</parameter>", "<think>",
    "</think>", "<|tool_call>", "call:f{", "}", "<tool_call|>", '<|"|>', "<|channel>thought\n", "<channel|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "[f(", "a=", "a:", ")", "]", "<|python_tag|>", '{"name": "f", ',
    '"arguments": {', '"parameters": {', '"a": ', '"', "'", "\\", "\\u", "\ud800", "\n", " ", ",", "1", "é", "[",
    "{", "x",
)  # fmt: skip
CALLS = {
    CallFormat.HERMES: '<tool_call>{"name": "go", "arguments": {"a": "x", "b": [1, {}]}}</tool_call>',
    CallFormat.QWEN_XML: "<tool_call><function=go><parameter=a>x</parameter></function></tool_call>",
    CallFormat.LLAMA_JSON: '{"name": "go", "parameters": {"a": "x", "b": [1, {}]}}',
    CallFormat.GEMMA: '<|tool_call>call:go{a:<|"|>x<|"|>,b:[1,{}]}<tool_call|>',
    CallFormat.LFM: "<|tool_call_start|>[go(a='x', b=[1, {}])]<|tool_call_end|>",
}
# openings and what may follow them, repeated
REPEATED = [
    "<tool_call>", '<tool_call>{"name": "', '<tool_call>{"name": "f", "arguments": {"a": "', "<tool_call>[",
    '<tool_call>{"a": "\\', "<tool_call><function=f>", "<tool_call><function=f><parameter=p>",
    "<tool_call><function=f><parameter=p>x</parameter>", "<tool_call><function=", "<tool_call>\n", '{"name": ', '{"',
    '{"a":', '{"name": "f", "parameters": ', '{"name": "', '{"type": "function", ', "{", "[", "{[", "<|python_tag|>",
    '<|python_tag|>{"',
    "<|tool_call>", "<|tool_call>call:f{", "<|tool_call>call:f{a:[", '<|tool_call>call:f{a:<|"|>', '<|"|>',
    "<|tool_call_start|>", "<|tool_call_start|>[", "<|tool_call_start|>[f(a='", "<|tool_call_start|>[f(a='\\", "[f(a=[",
    '<|tool_call_start|>[f(a="', "<think>", "<think></think>", "<|channel>thought", "</think>", " ", "\n", '"', "'",
    "\\", "1", "<tool_call>1", "a", "<", "<|", '{"name"', "\ud800", '<tool_call>{"name": "\ud800',
    '<tool_call>{"a": 1, "a', "<tool_call>" + " " * 50, '{"name": "f", "parameters": {"a": "\\"',
]  # fmt: skip
by_format = pytest.mark.parametrize("call_format", list(CallFormat))
TAGS = {CallFormat.GEMMA: THOUGHT_CHANNEL}


def parse(text: str, call_format: CallFormat, *, opened: bool = False, thinks: bool = True) -> Any:
    tags = TAGS.get(call_format, THINK_TAGS) if thinks else None
    schema = {"properties": {"p": {"type": "object"}, "a": {"type": "array"}}}
    tools = {"f": schema, "go": schema}
    message = parse_message(text, call_format=call_format, thinks=tags, opened=opened, tools=tools)
    check_spans(message, text)
    return message


def check_nothing_is_lost(message: Any, text: str) -> None:
    """Check that all text outside of tags and calls is content or reasoning, but for blanks."""
    in_calls = {index for call in message.calls for index in range(*call.span)}
    pieces = {Span.THINK: "", Span.ACTION: "", Span.OTHER: "", Span.TAG: ""}
    for label, start, end in message.spans:
        part = Span.ACTION if label == Span.OTHER else label
        pieces[part] += "".join(text[i] for i in range(start, end) if i not in in_calls)
    assert "".join(message.content.split()) == "".join(pieces[Span.ACTION].split())
    assert "".join((message.reasoning or "").split()) == "".join(pieces[Span.THINK].split())


@by_format
@given(
    text=st.text() | st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    opened=st.booleans(),
    thinks=st.booleans(),
)
@settings(max_examples=300, database=None, derandomize=True)
def test_any_text_has_a_reading(call_format, text, opened, thinks):
    message = parse(text, call_format, opened=opened, thinks=thinks)
    check_nothing_is_lost(message, text)


@by_format
@given(data=st.data())
@settings(max_examples=200, database=None, derandomize=True)
def test_calls_with_a_hole_or_a_foreign_piece_have_a_reading(call_format, data):
    call = CALLS[call_format]
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(call))] * 2)))
    piece = data.draw(st.sampled_from(PIECES) | st.text(max_size=3))
    text = f"{call[:start]}{piece}{call[end:]}\n{call}"
    message = parse(text, call_format)
    check_nothing_is_lost(message, text)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_responses_cut_at_every_character_have_a_reading(template):
    calls = [("go", {"a": "x'\"\\ é<|", "b": [1, {"c": None}]}), ("stop", {})]
    if not template.escapes:
        calls[0][1]["a"] = "x"
    _, text = template.write(
        calls if template.several else calls[:1],
        content="See." if template.several else "",
        reasoning="why" if template.thinks else "",
    )
    counts = []
    for length in range(len(text) + 1):
        message = template.parse(text[:length])
        check_spans(message, text[:length])
        check_nothing_is_lost(message, text[:length])
        counts.append(len(message.calls))
    assert counts == sorted(counts) and counts[-1] == (2 if template.several else 1)


@by_format
@pytest.mark.parametrize("piece", REPEATED)
def test_a_call_after_repeated_pieces_does_not_raise(call_format, piece):
    text = piece * 2000 + CALLS[call_format]
    check_nothing_is_lost(parse(text, call_format), text)


@by_format
@pytest.mark.parametrize("piece", [" ", "\n", "x", '"', "{", "[", "]", "(", "}", "'", "1", "\\"])
def test_a_call_after_100000_characters_counts(call_format, piece):
    text = piece * 100_000 + CALLS[call_format]
    message = parse(text, call_format)
    assert [call.name for call in message.calls] == ["go"]
    check_nothing_is_lost(message, text)


class CountedText(str):
    """Text that counts the characters which searches and slices pass over."""

    passed = 0

    def find(self, piece: str, start: int = 0, *_: Any) -> int:  # type: ignore[override]
        place = super().find(piece, start)
        CountedText.passed += (place if place >= 0 else len(self)) - start
        return place

    def __getitem__(self, key: Any) -> str:
        piece = super().__getitem__(key)
        CountedText.passed += len(piece)
        return piece


class CountedPattern:
    """Pattern that counts the characters which it passes over."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern

    def match(self, text: str, *places: int) -> re.Match[str] | None:
        match = self.pattern.match(text, *places)
        CountedText.passed += len(match.group()) if match else 1
        return match

    def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
        match = self.pattern.search(text, start, end)
        CountedText.passed += (match.end() if match else end) - start
        return match


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the patterns of the package count."""
    for module in (gemma, lfm, llama_json, qwen_xml, values):
        for name, value in vars(module).copy().items():
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(module, name, CountedPattern(value))
    for strings in (values._JSON_STRINGS, values._PYTHON_STRINGS):
        for quote, pattern in strings.plain.items():
            monkeypatch.setitem(strings.plain, quote, CountedPattern(pattern))


def work(text: str, call_format: CallFormat) -> int:
    """Return the characters passed over and the lines of the package executed in parsing a text."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "tool_calls" not in frame.f_code.co_filename:
            return None
        if event == "line":
            next(lines)
        return trace

    CountedText.passed = 0
    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        parse_message(
            CountedText(text),
            call_format=call_format,
            thinks=TAGS.get(call_format, THINK_TAGS),
            opened=False,
            tools={"f": {"properties": {"p": {"type": "array"}}}},
        )
    finally:
        sys.settrace(tracer)
    return CountedText.passed + next(lines)


@by_format
@pytest.mark.parametrize("piece", REPEATED)
@pytest.mark.usefixtures("counted")
def test_work_grows_linearly(call_format, piece):
    sizes = (4000, 8000)
    once, twice = (work(piece * (size // len(piece)), call_format) for size in sizes)
    assert once <= 150 * sizes[0]
    assert twice <= 2.1 * once + 1000
