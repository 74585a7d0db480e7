"""The Responses API says the same as Chat Completions: requests, answers and streams."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.servers.endpoint_clients import (
    CALLS,
    LOGPROBS,
    WEATHER,
    answer_of,
    data_url,
    opened,
    owned,
    post,
    send,
    take,
)
from support.servers.endpoint_clients import read as read_answer

from ragen_pl.agent_programs.serving.chat_request import read_request
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.responses_api import read_responses_request

PATH = "/v1/responses"
HELLO = {"input": "hello"}
FLAT = {"type": "function"} | WEATHER["function"]
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"at": 1}'}}


def same(body: dict, chat: dict, **changes) -> None:
    """Check that a request means the same as one of Chat Completions."""
    read = read_responses_request(body, ImageReader(), **changes)
    expected = read_request(chat, ImageReader(), **changes)
    assert len(read.images) == len(expected.images)
    assert replace(read, echo={}, images=[]) == replace(expected, images=[])


def user(text: object) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hello", [user("hello")]),
        ([user("hello")], [user("hello")]),
        (
            [
                {"type": "message", "role": "developer", "content": "be brief"},
                user([{"type": "input_text", "text": "a"}]),
            ],
            [{"role": "system", "content": "be brief"}, user("a")],
        ),
        (
            [
                user("a"),
                {
                    "type": "reasoning",
                    "id": "rs",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {
                    "type": "message",
                    "id": "m",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "b", "annotations": []}],
                },
                {
                    "type": "function_call",
                    "id": "fc",
                    "call_id": "a",
                    "name": "weather",
                    "arguments": '{"at": 1}',
                },
                {
                    "type": "function_call",
                    "call_id": "b",
                    "name": "weather",
                    "arguments": '{"at": 1}',
                },
                {"type": "function_call_output", "call_id": "a", "output": "sun"},
                {
                    "type": "function_call_output",
                    "call_id": "b",
                    "output": [{"type": "input_text", "text": "rain"}],
                },
            ],
            [
                user("a"),
                {
                    "role": "assistant",
                    "reasoning_content": "hm",
                    "content": "b",
                    "tool_calls": [CALL, CALL | {"id": "b"}],
                },
                {"role": "tool", "tool_call_id": "a", "content": "sun"},
                {"role": "tool", "tool_call_id": "b", "content": "rain"},
            ],
        ),
        (
            [
                user("a"),
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "hm"}],
                    "encrypted_content": None,
                },
                {
                    "type": "function_call",
                    "call_id": "a",
                    "name": "weather",
                    "arguments": '{"at": 1}',
                },
                {"type": "function_call_output", "call_id": "a", "output": "sun"},
                {"role": "assistant", "content": "b"},
                {"type": "message", "role": "assistant", "content": "c"},
                user("d"),
            ],
            [
                user("a"),
                {"role": "assistant", "reasoning_content": "hm", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": "sun"},
                {"role": "assistant", "content": "b"},
                {"role": "assistant", "content": "c"},
                user("d"),
            ],
        ),
    ],
    ids=range(5),
)
def test_input(items, messages):
    same({"input": items}, {"messages": messages})


def test_images():
    url = data_url()
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"}]
    chat = [{"type": "image_url", "image_url": {"url": url}}]
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": parts}
    assistant = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "weather"}}]}
    same(
        {"input": [user(parts), call, output]},
        {
            "messages": [
                user(chat),
                assistant,
                {"role": "tool", "tool_call_id": "a", "content": chat},
            ]
        },
    )


JSON_SCHEMA = {"type": "json_schema", "name": "a", "schema": {}}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"tools": [FLAT]}, {"tools": [WEATHER]}),
        ({"tools": [FLAT | {"strict": True}], "tool_choice": "none"}, {"tool_choice": "none"}),
        (
            {"tools": [FLAT], "tool_choice": {"type": "function", "name": "weather"}},
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
        ),
        ({"max_output_tokens": 5}, {"max_tokens": 5}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"metadata": {"train": "false"}}, {"metadata": {"train": "false"}}),
        ({"temperature": 0.5, "top_p": 0.5}, {"temperature": 0.5, "top_p": 0.5}),
        ({"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "low"}}),
        (
            {
                "include": ["reasoning.encrypted_content"],
                "truncation": "auto",
                "stream_options": {},
            },
            {},
        ),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"verbosity": "low"}),
        ({"store": True, "previous_response_id": None, "background": False}, {"store": True}),
        ({"stream": True, "model": "policy"}, {"stream": True, "model": "policy"}),
    ],
)
def test_parameters(body, chat):
    same(HELLO | body, {"messages": [user("hello")]} | chat)


def test_instructions():
    messages = [{"role": "system", "content": "be brief"}, user("hello")]
    same(HELLO | {"instructions": "be brief"}, {"messages": messages})


def test_unconstrained_format():
    chat = {"messages": [user("hello")], "response_format": JSON_SCHEMA}
    same(HELLO | {"text": {"format": JSON_SCHEMA}}, chat, unconstrained=True)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id='resp_1'"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background=True"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "'web_search'"),
        ({"tools": [{"type": "file_search"}]}, "'file_search'"),
        ({"tools": 5}, "tools"),
        ({"text": {"format": JSON_SCHEMA}}, "response_format"),
        ({"text": 5}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens=0"),
        ({"truncation": "banana"}, "truncation='banana'"),
        ({"stream_options": 5}, "stream_options=5"),
        ({"metadata": {"train": "maybe"}}, "metadata.train='maybe'"),
        ({"tool_choice": {"type": "function", "name": "weather"}}, "no tools"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"instructions": 5}, "instructions"),
        ({"input": None}, "input"),
        ({"input": []}, "messages"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "item_reference"),
        ({"input": [user([{"type": "input_file"}])]}, "input_file"),
        ({"input": [user([{"type": "input_image", "file_id": "a"}])]}, "input_image"),
        ({"input": [user([{"type": "input_image", "image_url": "http://a"}])]}, "data URL"),
        ({"input": [{"type": "reasoning", "content": ["a"]}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": [{"text": "a"}]}]}, "cannot be continued"),
    ],
)
def test_refused_by_name(server, body, named):
    with owned(server) as owner:
        status, answer = post(server, HELLO | body, key=owner.session.key, path=PATH)
        assert status == 400
        assert named in answer["error"]["message"]
        assert owner.events == []


ANSWERS = pytest.mark.parametrize(
    ("message", "changes"),
    [
        ({}, {}),
        ({"content": ""}, {"finish_reason": "length"}),
        ({"content": "hö", "reasoning_content": "hm"}, {"logprobs": LOGPROBS}),
        ({"content": "", "tool_calls": CALLS, "reasoning_content": "hm"}, {}),
        ({"content": "so", "tool_calls": CALLS[:1]}, {}),
    ],
)


@ANSWERS
def test_stream_equals_whole_answer(server, message, changes):
    def respond(call):
        return replace(answer_of(call, message=message, **changes), id="resp_1")

    with owned(server, respond) as owner:
        body = HELLO | {"tools": [FLAT], "include": ["message.output_text.logprobs"]}
        whole = post(server, body, key=owner.session.key, path=PATH)[1]
        events = post(server, body | {"stream": True}, key=owner.session.key, path=PATH)[1]
    assert whole["status"] == ("incomplete" if changes.get("finish_reason") else "completed")
    assert whole["tools"] == [FLAT]
    named = [event.split("\n", 1) for event in events]
    values = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name for name, _ in named] == [f"event: {value['type']}" for value in values]
    assert [value["sequence_number"] for value in values] == [*range(len(values))]
    assert values[0]["response"]["output"] == []
    assert values[-1] == {
        "type": f"response.{whole['status']}",
        "sequence_number": len(values) - 1,
        "response": whole,
    }
    items: list[dict] = []
    for value in values:
        kind = value["type"].removeprefix("response.")
        item = items[value["output_index"]] if value.get("output_index", 99) < len(items) else None
        if kind == "output_item.added":
            items.append(value["item"])
        elif kind == "content_part.added":
            item["content"].append(value["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][value["content_index"]]["text"] += value["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += value["delta"]
        elif kind == "output_item.done":
            status = {"status": whole["status"]} if "status" in value["item"] else {}
            item.pop("status")
            assert item | status == value["item"]
            items[value["output_index"]] = value["item"]
    assert items == whole["output"]


@ANSWERS
def test_answer_sent_back_is_the_answer(message, changes):
    from ragen_pl.agent_programs.serving.responses_api import response

    class Given:
        id = "resp_1"

    answer = answer_of(Given, message=message, **changes)
    output = response(answer, read_responses_request(HELLO, ImageReader()))["output"]
    results = [
        {"type": "function_call_output", "call_id": call["id"], "output": "sun"}
        for call in message.get("tool_calls", ())
    ]
    items = [user("hello"), *json.loads(json.dumps(output)), *results, user("and?")]
    sent = read_responses_request({"input": items}, ImageReader()).chat.messages[1]
    assert sent == dict(answer.message)


def test_ids_and_errors(server):
    session = opened(server)
    connection = send(server, HELLO, key=session.key, path=PATH)
    call = take(session)
    assert call.id == "resp_000000"
    server.end(session)
    assert read_answer(connection)[0] == 410
