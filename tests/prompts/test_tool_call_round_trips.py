"""Calls written by the real chat templates are read back, as transformers reads them where it can."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.template_calls import TEMPLATES, Template, check_spans, schema_of

from ragen_pl.chat_formats.tool_calls.message import CallFormat
from ragen_pl.trajectory import Span

MARKERS = (
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=p>", "</parameter>", "<think>",
    "</think>",
    "<|tool_call>call:f{", "}<tool_call|>", '<|"|>', "<|channel>thought\n", "<channel|>", "<|tool_call_start|>[f(",
    ")]<|tool_call_end|>", "<|python_tag|>", '{"name": "f", "parameters": {}}', "<|im_end|>", "<turn|>", "\\", "\\n",
    "'", '"', "\n", "\r\n", "\t", "  ", "é€😀", "\u2028\x85\x7f", "\x00\x1b", "None", "true", "5",
)  # fmt: skip
texts = st.text() | st.lists(st.sampled_from(MARKERS)).map("".join)
names = st.from_regex(r"[^\W\d][\w.\-]{0,12}", fullmatch=True)
words = st.lists(st.sampled_from(["so", "a < b", "f()", "é", "I'd", "x = [1]"]), max_size=4).map(
    " ".join
)


def values(strings: st.SearchStrategy[str], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    numbers = st.integers(-(10**300), 10**300) | st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | numbers | strings,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def arguments_of(template: Template) -> st.SearchStrategy[dict[str, Any]]:
    """Draw arguments that the format can express."""
    if template.call_format == CallFormat.QWEN_XML:
        strings = texts.map(lambda text: text.replace("</parameter>", ""))
        return st.dictionaries(names, values(strings, strings), max_size=3)
    if template.call_format == CallFormat.GEMMA:
        strings = texts.map(lambda text: text.replace('<|"|>', ""))
        return st.dictionaries(names, values(strings, names), max_size=3)
    if template.call_format == CallFormat.LFM and not template.escapes:
        plain = texts.map(lambda text: re.sub(r"['\\\n\r]", "", text))
        items = plain | values(texts, texts).filter(lambda value: not isinstance(value, str))
        return st.dictionaries(names, items, max_size=3)
    keys = names if template.call_format == CallFormat.LFM else texts
    return st.dictionaries(keys, values(texts, texts), max_size=3)


by_template = pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)


@by_template
@given(data=st.data())
@settings(max_examples=25, database=None, derandomize=True)
def test_calls_are_read_back(template, data):
    several = template.several
    tools = data.draw(
        st.dictionaries(names, arguments_of(template), min_size=1, max_size=2 if several else 1)
    )
    content = data.draw(words) if several else ""
    reasoning = data.draw(words) if template.thinks else ""
    _, text = template.write(list(tools.items()), content=content, reasoning=reasoning)
    message = template.parse(text, {name: schema_of(value) for name, value in tools.items()})
    assert message.problem is None
    assert [(call.name, call.arguments) for call in message.calls] == list(tools.items())
    assert [typed(call.arguments) for call in message.calls] == [*map(typed, tools.values())]
    assert (message.content, message.reasoning or "") == (content, reasoning)
    check_spans(message, text)
    for call in message.calls:
        assert {label for label, start, end in message.spans if inside(start, end, call.span)} <= {
            Span.TAG,
            Span.ACTION,
        }


def typed(value: Any) -> Any:
    """Return a value with the types of its leaves: True equals 1, and 1.0 equals 1."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return type(value), value


def inside(start: int, end: int, span: tuple[int, int]) -> bool:
    return span[0] <= start and end <= span[1]


simple = st.from_regex(r"[a-z][a-z0-9é]{0,8}( [a-z]{1,4})?", fullmatch=True)
simple_names = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
numbers = st.integers(-1000, 1000)
simple_values = (
    simple | numbers | st.dictionaries(simple_names, simple | numbers, min_size=1, max_size=2)
)


@by_template
@given(data=st.data())
@settings(max_examples=25, database=None, derandomize=True)
def test_simple_calls_are_read_as_transformers_reads_them(template, data):
    arguments = st.dictionaries(simple_names, simple_values, min_size=1, max_size=3)
    size = 2 if template.several else 1
    tools = data.draw(st.dictionaries(simple_names, arguments, min_size=1, max_size=size))
    content = data.draw(words) if template.several else ""
    reasoning = data.draw(words) if template.thinks else ""
    prompt, text = template.write(list(tools.items()), content=content, reasoning=reasoning)
    schemas = {name: schema_of(value) for name, value in tools.items()}
    oracle = template.parse_as_transformers(prompt, text, schemas)
    message = template.parse(text, schemas)
    assert [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ] == oracle["tool_calls"]
    assert message.content == oracle.get("content", "").strip()
    thoughts = oracle.get("reasoning_content", oracle.get("thinking", ""))
    assert (message.reasoning or "") == thoughts.strip()
