"""Parameters of requests: the endpoint honours, ignores or refuses each."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from support.servers.endpoint_clients import (
    CALLS,
    HELLO,
    LOGPROBS,
    WEATHER,
    answer_of,
    assembled,
    data_url,
    opened,
    owned,
    post,
    send,
    take,
)
from support.servers.endpoint_clients import read as read_answer

from ragen_pl.agent_programs.serving.chat_request import ClientRequest
from ragen_pl.trajectory import ChatRequest


def asked(server, body: dict, **changes) -> ClientRequest:
    """Return a request as the session's owner gets it."""
    session = opened(server, **changes)
    connection = send(server, HELLO | body, key=session.key)
    client = take(session).client
    server.end(session)
    assert read_answer(connection)[0] == 410
    assert client is not None
    return client


def refused(server, body: dict, *, status: int = 400) -> str:
    """Return the message of the error that a request gets. The next request is answered."""
    with owned(server) as owner:
        found, answer = post(server, HELLO | body, key=owner.session.key)
        assert found == status, answer
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        assert post(server, HELLO, key=owner.session.key)[0] == 200
        assert len(owner.of("request")) == 1
    return answer["error"]["message"]


def test_plain_request(server):
    client = asked(server, {})
    assert client == ClientRequest(
        chat=ChatRequest(messages=[{"role": "user", "content": "hello"}]), model=""
    )


def test_answer(server):
    with owned(server) as owner:
        status, answer = post(server, HELLO | {"model": "policy"}, key=owner.session.key)
    assert status == 200
    assert answer["id"] == "chatcmpl-000000"
    assert answer["model"] == "policy"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hi", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def test_roles_and_contents(server):
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"at": 1}'},
    }
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "assistant", "content": [], "reasoning_content": "so"},
        {"role": "user", "content": "and?", "name": "me"},
    ]
    assert asked(server, {"messages": messages}).chat.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "name": "weather", "arguments": {"at": 1}}],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "a", "name": "weather"},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
        {"role": "user", "content": "and?"},
    ]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_images(server, kind):
    url = data_url(kind)
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
    ]
    client = asked(server, {"messages": [{"role": "user", "content": parts}]})
    text, first, second = client.chat.messages[0]["content"]
    assert text == {"type": "text", "text": "a"}
    assert first == second and first["type"] == "image"
    assert client.images[0].shape == (2, 3, 3)
    assert client.images[0] is client.images[1]
    assert np.abs(client.images[0].astype(int) - [200, 0, 0]).max() < 8


def test_tools(server):
    strict = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
    assert asked(server, {"tools": [strict]}).chat.tools == [WEATHER]
    assert asked(server, {"tools": [WEATHER], "tool_choice": "none"}).chat.tools == []


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_tool_choice_is_automatic(server, caplog, choice):
    server._noted.clear()
    with caplog.at_level(logging.INFO, "ragen_pl.agent_programs.serving"):
        for _ in range(2):
            client = asked(server, {"tools": [WEATHER], "tool_choice": choice})
            assert client.chat.tools == [WEATHER]
    assert [record.message.count("tool_choice") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ({"parallel_tool_calls": False}, {"parallel_calls": False}),
        ({"stop": "."}, {"stop": (".",)}),
        ({"stop": list("abcdef")}, {"stop": tuple("abcdef")}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_tokens": 5}),
        ({"logprobs": True}, {"logprobs": True}),
        *(
            ({"metadata": {"train": value}}, {"trained": value in (True, "TRUE", "1", None)})
            for value in (False, "False", "FALSE", "0", 0, True, "TRUE", "1", None)
        ),
        ({"metadata": {"train": "false", "advances": "false"}}, {"trained": False, "is_task_step": False}),
        ({"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]}, {}),
    ],
)  # fmt: skip
def test_honoured(server, body, values):
    assert asked(server, body).chat == replace(asked(server, {}).chat, **values)


@pytest.mark.parametrize(
    ("header", "trained"), [("True", True), ("false", False), ("FALSE", False), ("0", False)]
)
def test_header_for_untrained_answers(server, header, trained):
    session = opened(server)
    connection = send(server, HELLO, key=session.key, headers={"x-train": header})
    assert take(session).client.chat.trained is trained
    server.end(session)
    connection.close()


@pytest.mark.parametrize("header", ["no", "", "maybe"])
def test_a_header_that_is_no_truth_value_is_refused(server, header):
    """A program whose judge is trained on by mistake would not find out."""
    with owned(server) as owner:
        headers = {"x-train": header}
        status, answer = post(server, HELLO, key=owner.session.key, headers=headers)
        assert status == 400 and f"x-train={header!r}" in answer["error"]["message"]
        assert owner.events == []


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"temperature": 0.1}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.5}, "min_p"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"seed": 5}, "seed"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"user": "me"}, "user"),
        ({"store": True}, "store"),
        ({"service_tier": "auto"}, "service_tier"),
    ],
)
def test_ignored_with_a_line_in_the_log(server, caplog, body, name):
    server._noted.clear()
    with caplog.at_level(logging.INFO, "ragen_pl.agent_programs.serving"):
        first, second = asked(server, body), asked(server, body)
    assert first == second
    assert first.chat == asked(server, {}).chat
    (line,) = (record.message for record in caplog.records)
    assert f"{name}={body[name]}" in line


def _weather(**changes):
    return WEATHER | {"function": WEATHER["function"] | changes}


def _history(**function):
    call = {"id": "a", "type": "function", "function": {"name": "weather"} | function}
    return [
        HELLO["messages"][0],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
    ]


def test_ignored_without_a_line(server, caplog):
    with caplog.at_level(logging.INFO, "ragen_pl.agent_programs.serving"):
        client = asked(server, {"metadata": {"a": "b"}, "unknown": None, "temperature": None})
    assert client == asked(server, {})
    assert not caplog.records


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"n": 2}, "n=2"),
        ({"n": True}, "n=True"),
        ({"n": 1.0}, "n=1.0"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs=3"),
        ({"functions": [{"name": "weather"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "unconstrained"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"some_new_thing": 5}, "some_new_thing=5"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type='web_search'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "'a b'"),
        ({"tools": "weather"}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name='weather'"),
        ({"tools": [WEATHER], "tool_choice": "banana"}, "tool_choice='banana'"),
        ({"tools": [WEATHER], "tool_choice": ["auto"]}, "tool_choice=['auto']"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "custom", "name": "weather"}},
            "tool_choice=",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "time"}}},
            "no tool 'time'",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "no tool None"),
        *(
            ({"tools": tools, "tool_choice": choice}, "the request has no tools")
            for tools in ([], None)
            for choice in ("required", {"type": "function", "function": {"name": "weather"}})
        ),
        ({"tool_choice": "none", "tools": "weather"}, "tools"),
        *(
            ({name: value}, f"{name}={value!r}")
            for names, values in (
                (
                    ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
                    ("abc", True, [0.5]),
                ),
                (("top_k", "seed"), ("5", 1.5, False, {})),
                (("reasoning_effort", "verbosity"), (5, ["low"])),
                (("reasoning", "chat_template_kwargs"), ("low", [])),
            )
            for name in names
            for value in values
        ),
        ({"stop": ""}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": list("abcdefghijklmnopq")}, "stop"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens='5'"),
        ({"stream": "false"}, "stream='false'"),
        ({"logprobs": 5}, "logprobs=5"),
        ({"metadata": "train"}, "metadata"),
        ({"metadata": {"train": "no"}}, "metadata.train='no': expected true or false"),
        ({"metadata": {"train": 5}}, "metadata.train=5"),
        ({"metadata": {"train": [False]}}, "metadata.train=[False]"),
        ({"metadata": {"advances": ""}}, "metadata.advances=''"),
        ({"stream": True, "stream_options": {"include_usage": "false"}}, "include_usage='false'"),
        ({"tools": [_weather(description=5)]}, "tools[0].function.description=5"),
        ({"tools": [_weather(strict="yes")]}, "tools[0].function.strict='yes'"),
        ({"messages": _history(arguments=5)}, "arguments=5: expected a text or an object"),
        ({"messages": _history(arguments=[1])}, "arguments=[1]"),
        ({"messages": [{"role": "assistant", "reasoning": 5}]}, "messages[0].reasoning=5"),
        ({"model": ["policy"]}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role='robot'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "file"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "tool_call_id"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "cannot be continued"),
        ({"messages": [{"role": "user"}] * 5000}, "5000"),
        (
            {
                "messages": [
                    HELLO["messages"][0],
                    {"role": "user", "content": [{"type": "text", "text": 5}]},
                ]
            },
            "messages[1].content[0].text=5: expected a text",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}
                ]
            },
            "image_url.url=5: expected a text",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function=None: expected a value"),
        ({"stop": ["a", 5]}, "stop[1]=5: expected a text"),
        ({"temperature": 10**400}, "expected a number"),
    ],
)
def test_refused_by_name(server, body, named):
    assert named in refused(server, body)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png",
        "https://example.org/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:image/gif;base64,AAAA",
    ],
)
def test_no_address_is_read(server, url):
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    assert "data URL" in refused(server, {"messages": [{"role": "user", "content": parts}]})


def test_other_model(server):
    assert "model='gpt-9'" in refused(server, {"model": "gpt-9"}, status=404)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_unconstrained_response_format(server, kind):
    with owned(server) as owner:
        owner.session.limits.unconstrained = True
        body = HELLO | {"response_format": {"type": kind}}
        assert post(server, body, key=owner.session.key)[0] == 200


def test_models_and_unknown_paths(server):
    with owned(server) as owner:
        key = owner.session.key
        status, models = post(server, b"", key=key, method="GET", path="/v1/models")
        assert (status, [model["id"] for model in models["data"]]) == (200, ["policy"])
        status, answer = post(server, {}, key=key, path="/v1/completions")
        assert status == 404
        assert "/v1/chat/completions" in answer["error"]["message"]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ({}, {}),
        ({"content": ""}, {}),
        ({"reasoning_content": "hm"}, {}),
        ({"content": "", "tool_calls": CALLS, "reasoning_content": "hm"}, {}),
        ({"tool_calls": CALLS[:1]}, {"logprobs": LOGPROBS}),
        ({"content": "", "tool_calls": CALLS[:1]}, {"logprobs": LOGPROBS}),
        ({"content": "hö \u2028 \ud7ff"}, {"logprobs": LOGPROBS, "finish_reason": "length"}),
    ],
)
def test_stream_equals_whole_answer(server, message, changes, usage):
    def respond(call):
        return replace(answer_of(call, message=message, **changes), id="chatcmpl-1")

    with owned(server, respond) as owner:
        key = owner.session.key
        status, whole = post(server, HELLO, key=key)
        streaming = HELLO | {"stream": True, "stream_options": {"include_usage": usage}}
        streamed, events = post(server, streaming, key=key)
    assert status == streamed == 200
    expected = whole | {"usage": whole["usage"] if usage else None}
    assert assembled(events) == expected
    usages = [value for value in map(json.loads, (e[6:] for e in events[:-1])) if "usage" in value]
    assert len(usages) == (len(events) - 1 if usage else 0)
    calls = whole["choices"][0]["message"].get("tool_calls", [])
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [
        call["arguments"] for call in message.get("tool_calls", [])
    ]
