"""Responses in the models' own chat formats: what each part of a text is read as."""

import pytest
from support.models.template_calls import BY_NAME, check_spans

from ragen_pl.chat_formats.tool_calls.message import THINK_TAGS, THOUGHT_CHANNEL, CallFormat
from ragen_pl.chat_formats.tool_calls.parsing import parse_message
from ragen_pl.chat_formats.tool_calls.values import (
    JSON,
    MAX_DEPTH,
    MAX_DIGITS,
    Malformed,
    read_value,
)
from ragen_pl.trajectory import Span

CALLS = {
    CallFormat.HERMES: '<tool_call>\n{"name": "go", "arguments": {"to": "x"}}\n</tool_call>',
    CallFormat.QWEN_XML: "<tool_call>\n<function=go>\n<parameter=to>\nx\n</parameter>\n</function>\n</tool_call>",
    CallFormat.LLAMA_JSON: '{"name": "go", "parameters": {"to": "x"}}',
    CallFormat.GEMMA: '<|tool_call>call:go{to:<|"|>x<|"|>}<tool_call|>',
    CallFormat.LFM: "<|tool_call_start|>[go(to='x')]<|tool_call_end|>",
}
# begins like a call and is none
MALFORMED = {
    CallFormat.HERMES: '<tool_call>{"name": "go", "arguments": [}</tool_call>',
    CallFormat.QWEN_XML: "<tool_call><function=go>to x</function></tool_call>",
    CallFormat.LLAMA_JSON: '{"name": "go", "parameters": [}',
    CallFormat.GEMMA: "<|tool_call>call:go{to:x}<tool_call|>",
    CallFormat.LFM: "<|tool_call_start|>[go('x')]<|tool_call_end|>",
}
GO = [("go", {"to": "x"})]
by_format = pytest.mark.parametrize("call_format", list(CallFormat))


def parse(text, call_format=CallFormat.HERMES, *, thinks=None, opened=False, tools=None):
    message = parse_message(
        text, call_format=call_format, thinks=thinks, opened=opened, tools=tools or {}
    )
    check_spans(message, text)
    return message


def calls_of(message):
    return [(call.name, call.arguments) for call in message.calls]


@by_format
def test_text_around_calls_is_content(call_format):
    call = CALLS[call_format]
    text = f"Before.\n{call} between {call}\n  after"
    message = parse(text, call_format)
    assert (calls_of(message), message.problem) == (GO * 2, None)
    assert message.content == "Before.\n between \n  after"
    assert [text[slice(*call.span)] for call in message.calls] == [call, call]


@by_format
def test_text_without_calls_is_content_as_it_is(call_format):
    message = parse("  def f():\n    return 1\n", call_format)
    assert (message.content, message.calls) == ("  def f():\n    return 1\n", [])
    assert (message.reasoning, message.problem) == (None, None)


@by_format
def test_malformed_call_is_content_and_the_others_count(call_format):
    call, malformed = CALLS[call_format], MALFORMED[call_format]
    text = f"One {call} two {malformed} three {call}"
    message = parse(text, call_format)
    assert calls_of(message) == GO * 2
    assert message.content == f"One \n two {malformed} three "
    assert message.problem is not None and "\n" not in message.problem
    assert (Span.OTHER, text.index(malformed) - 1) in [span[:2] for span in message.spans]


@by_format
def test_call_cut_before_its_end_is_content(call_format):
    call = CALLS[call_format]
    for length in range(len(call)):
        message = parse("Go: " + call[:length], call_format)
        assert (message.calls, message.content) == ([], "Go: " + call[:length])


@pytest.mark.parametrize("tags", [THINK_TAGS, THOUGHT_CHANNEL])
@by_format
def test_call_in_reasoning_is_reasoning(call_format, tags):
    call = CALLS[call_format]
    text = f"{tags.opening}\nI could {call}\n{tags.closing}\n\nNow.{call}"
    message = parse(text, call_format, thinks=tags)
    assert message.reasoning == f"I could {call}"
    assert (message.content, calls_of(message)) == ("Now.", GO)
    labels = [label for label, _, _ in message.spans]
    assert labels[:5] == [Span.TAG, Span.THINK, Span.TAG, Span.OTHER, Span.ACTION]


@by_format
def test_reasoning_opened_by_the_prompt_ends_at_the_closing_tag(call_format):
    call = CALLS[call_format]
    message = parse(f"why\n</think>\n\n{call}", call_format, thinks=THINK_TAGS, opened=True)
    assert (message.reasoning, message.content, calls_of(message)) == ("why", "", GO)


@by_format
def test_reasoning_without_closing_tag_is_all_reasoning(call_format):
    call = CALLS[call_format]
    opened = parse(f"why {call}", call_format, thinks=THINK_TAGS, opened=True)
    written = parse(f"<think>why {call}", call_format, thinks=THINK_TAGS)
    for message in (opened, written):
        assert (message.reasoning, message.content, message.calls) == (f"why {call}", "", [])


def test_reasoning_between_calls_is_joined():
    call = CALLS[CallFormat.HERMES]
    text = f"<think>a</think>{call}<think>b</think>{call}<think></think>"
    message = parse(text, thinks=THINK_TAGS)
    assert (message.reasoning, message.content, calls_of(message)) == ("a\nb", "", GO * 2)


def test_tags_are_text_for_a_template_that_writes_none():
    message = parse("<think>why</think>Yes.")
    assert (message.reasoning, message.content) == (None, "<think>why</think>Yes.")


def test_empty_reasoning_is_no_missing_one():
    assert parse("<think>\n\n</think>\n\nYes.", thinks=THINK_TAGS).reasoning == ""
    assert parse("Yes.", thinks=THINK_TAGS).reasoning is None


def test_reasoning_ends_a_malformed_call():
    call = CALLS[CallFormat.HERMES]
    message = parse(f'<tool_call>{{"name" <think>{call}</think> done', thinks=THINK_TAGS)
    assert (message.reasoning, message.calls) == (call, [])
    assert message.content == '<tool_call>{"name" \n done'


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"a": NaN}', "not JSON at character 45"),
        ('{"a": -Infinity}', "not JSON"),
        ('{"a": 1e999}', "number beyond float64"),
        ('{"a": 01}', "not JSON"),
        (f'{{"a": {"1" * (MAX_DIGITS + 1)}}}', "number of more than"),
        ('{"a": 1, "\\u0061": 2}', "duplicate name 'a'"),
        ("{1: 2}", "not JSON"),
        ('{"a": 1,}', "not JSON"),
        ('{"a": [1,]}', "not JSON"),
        ("{'a': 1}", "not JSON"),
        ('{"a": "\\ud800"}', "lone surrogate"),
        ('{"a": "\\udc00\\ud800"}', "lone surrogate"),
        ('{"a": "\ud800"}', "lone surrogate"),
        ('{"a": "\n"}', "control character"),
        ('{"a": "\\x41"}', "unknown escape"),
        ('{"a": "\\u004"}', "unknown escape"),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", f"more than {MAX_DEPTH} levels"),
        ("[]", "arguments is not an object"),
        ('"{}"', "arguments is not an object"),
        ('{}, "more": 1', "not an object of name and arguments"),
    ],
)
def test_json_is_strict(arguments, reason):
    call = CALLS[CallFormat.HERMES]
    text = f'<tool_call>{{"name": "go", "arguments": {arguments}}}</tool_call>{call}'
    message = parse(text)
    assert message.problem is not None and message.problem.startswith(reason)
    assert calls_of(message) == GO


@pytest.mark.parametrize("name", ["1", "null", '""', '["go"]'])
def test_name_is_a_string(name):
    message = parse(f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>')
    assert (message.problem or "").startswith("name is not a string or empty at character 11")


def test_json_of_the_deepest_level_and_surrogate_pairs_are_read():
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert read_value(deepest, 0, JSON)[1] == len(deepest)
    assert read_value('"\\ud83d\\ude00"', 0, JSON) == ("😀", 14)
    with pytest.raises(Malformed, match="more than"):
        read_value(f"[{deepest}]", 0, JSON)


def test_markers_in_a_string_do_not_end_a_call():
    text = '<tool_call>{"name": "go", "arguments": {"to": "</tool_call><tool_call>"}}</tool_call>'
    assert calls_of(parse(text)) == [("go", {"to": "</tool_call><tool_call>"})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "  two\n lines \n", "  two\n lines \n"),
        ({"type": "string"}, "5", "5"),
        ({}, "5", "5"),
        ({}, '{"a": 1}', '{"a": 1}'),
        ({"description": "anything"}, "[1]", "[1]"),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"additionalProperties": True}, '{"a": 1}', {"a": 1}),
        ({"items": {"type": "integer"}}, "[1]", [1]),
        ({"items": {"type": "integer"}}, '{"a": 1}', '{"a": 1}'),
        ({"patternProperties": {"^a": {}}}, '{"a": 1}', {"a": 1}),
        ({"required": ["a"]}, '{"a": 1}', {"a": 1}),
        ({"prefixItems": [{}, {}]}, "[1, 2]", [1, 2]),
        ({"minItems": 1}, "[1]", [1]),
        ({"minimum": 0}, "5", 5),
        ({"multipleOf": 0.5}, "1.5", 1.5),
        ({"maxLength": 3}, "5", "5"),
        ({"type": "string", "minimum": 0}, "5", "5"),
        ({"oneOf": [{"required": ["a"]}, {"enum": [None]}]}, "null", None),
        ({"default": {}}, '{"a": 1}', '{"a": 1}'),
        ({"enum": [1, 2, "all"]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"anyOf": [{"items": {}}, {"type": "string"}]}, "[1]", [1]),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "5.0", 5.0),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"5"', '"5"'),
        ({"$ref": "#/$defs/size"}, "5", 5),
        ({"$ref": "#/$defs/loop"}, "5", "5"),
        ({"$ref": "#/none/at/all"}, "5", "5"),
        ("any", "5", "5"),
    ],
)
def test_xml_values_have_the_type_of_the_schema(schema, text, value):
    definitions = {"size": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 3}}
    tools = {"go": {"properties": {"to": schema}, "$defs": definitions}}
    call = CALLS[CallFormat.QWEN_XML].replace("\nx\n", f"\n{text}\n")
    message = parse(call, CallFormat.QWEN_XML, tools=tools)
    read = message.calls[0].arguments["to"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("to", ["\ud800", "x</parameter>\n<parameter=to>\ny"])
def test_xml_values_without_reading_are_malformed(to):
    call = CALLS[CallFormat.QWEN_XML].replace("\nx\n", f"\n{to}\n")
    message = parse(call, CallFormat.QWEN_XML)
    assert message.problem and (message.calls, message.content) == ([], call)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"it\'s"', "it's"),
        (r"'\x41\u00e9\U0001F600\ud83d\ude00'", "Aé😀😀"),
        (r"'\d+\t'", "\\d+\t"),
        ("[true, True, null, None, -1.5e3]", [True, True, None, None, -1500.0]),
        ("{'a': \"b\"}", {"a": "b"}),
    ],
)
def test_lfm_values_are_literals_of_python_or_json(text, value):
    call = CALLS[CallFormat.LFM].replace("'x'", text)
    assert calls_of(parse(call, CallFormat.LFM)) == [("go", {"to": value})]


@pytest.mark.parametrize(
    "text",
    ["x", "f()", "1 + 1", "{1}", "(1,)", "'a' 'b'", "'a\nb'", r"'\777'", r"'\N{DASH}'", "'\ud800'", "inf", "1, to=2",
     "1,"],
)  # fmt: skip
def test_other_python_is_malformed(text):
    call = CALLS[CallFormat.LFM].replace("'x'", text)
    message = parse(call, CallFormat.LFM)
    assert message.problem and (message.calls, message.content) == ([], call)


def test_llama_objects_that_are_no_calls_are_text():
    for text in (
        'Use {x} or {"a": {"name": "go", "parameters": {}}}.',
        '{"name": "Ann", "age": 5}',
    ):
        message = parse(text, CallFormat.LLAMA_JSON)
        assert (message.content, message.calls, message.problem) == (text, [], None)


def test_llama_calls_may_have_a_tag_a_type_and_arguments():
    text = '<|python_tag|>{"type": "function", "name": "go", "arguments": {"to": "x"}}'
    message = parse(text, CallFormat.LLAMA_JSON)
    assert (calls_of(message), message.calls[0].span) == (GO, (0, len(text)))
    assert [label for label, _, _ in message.spans] == [Span.TAG, Span.ACTION]
    assert parse('<|python_tag|>search.call(query="x")', CallFormat.LLAMA_JSON).problem


def test_calls_of_one_lfm_list_share_their_span():
    text = "On it.<|tool_call_start|>[go(to='x'), stop()]<|tool_call_end|>"
    message = parse(text, CallFormat.LFM)
    assert calls_of(message) == [*GO, ("stop", {})]
    assert {call.span for call in message.calls} == {(6, len(text))}


@pytest.mark.parametrize("name", ["gemma4_v5", "lfm2_v2", "qwen3", "qwen3_8"])
def test_unknown_tools_are_calls(name):
    _, text = BY_NAME[name].write([("unknown", {"a": "x"})])
    message = BY_NAME[name].parse(text)
    assert calls_of(message) == [("unknown", {"a": "x"})]
