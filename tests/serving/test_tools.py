"""Results of tool calls: one for each call, in any order; the policy gets them in the order of the calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.servers.endpoint_clients import HELLO, data_url, owned, post

from ragen_pl.agent_programs.serving.chat_request import ClientRequest, read_request
from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.responses_api import read_responses_request

HI = {"role": "user", "content": "hi"}


def calls(*ids: Any) -> dict[str, Any]:
    functions = [
        {"id": one, "type": "function", "function": {"name": f"tool_{one}", "arguments": "{}"}}
        for one in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": functions}


def result(one: Any, content: Any = None) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": one, "content": content or f"of {one}"}


def read(*messages: dict[str, Any]) -> ClientRequest:
    return read_request({"messages": [HI, *messages]}, ImageReader())


def items(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return messages as items of the Responses API."""
    given: list[dict[str, Any]] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            given.append({"type": "function_call", "call_id": call["id"]} | call["function"])
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            given.append({"type": "function_call_output"} | output)
        elif message["role"] == "user":
            given.append(message)
    return given


@pytest.mark.parametrize("order", [*itertools.permutations("abc")])
def test_results_are_put_into_the_order_of_the_calls(order):
    earlier = [calls("b"), result("b", "before")]
    history = [HI, *earlier, calls(*"abc"), *map(result, order), calls("a"), result("a")]
    in_order = read(*earlier, calls(*"abc"), *map(result, "abc"), calls("a"), result("a"))
    assert read(*history[1:]) == in_order
    names = [message["name"] for message in in_order.chat.messages if message["role"] == "tool"]
    assert names == ["tool_b", "tool_a", "tool_b", "tool_c", "tool_a"]
    responses = read_responses_request({"input": items(*history)}, ImageReader())
    assert responses.chat.messages == in_order.chat.messages


def test_images_go_with_their_results():
    urls = [data_url(size=(2 + number, 2)) for number in range(4)]

    def shown(one: str, *numbers: int) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": urls[number]}} for number in numbers]
        return result(one, [*parts, {"type": "text", "text": one}])

    read_back = read(calls(*"abc"), shown("c", 3), shown("a", 0, 1), shown("b", 2))
    assert [image.shape[1] for image in read_back.images] == [2, 3, 4, 5]
    expected = read(calls(*"abc"), shown("a", 0, 1), shown("b", 2), shown("c", 3))
    assert read_back.chat == expected.chat


REFUSED = {
    "unknown": ([calls("a"), result("a"), result("nope")], "'nope'"),
    "unknown alone": ([calls("a"), result("nope")], "'nope'"),
    "of an earlier message": (
        [calls("old"), result("old"), calls("a"), result("a"), result("old")],
        "'old'",
    ),
    "without calls": ([result("nope")], "'nope'"),
    "after the user": ([calls("a"), result("a"), HI, result("a")], "'a'"),
    "second": ([calls(*"ab"), result("a"), result("a"), result("b")], "'a'"),
    "missing": ([calls(*"ab"), result("a"), HI], "'b'"),
    "missing at the end": ([calls(*"ab"), result("b")], "'a'"),
    "all missing": ([calls("a"), HI], "'a'"),
    "before the next calls": ([calls("a"), calls("b"), result("b"), result("a")], "'a'"),
    "equal ids": ([calls("a", "a"), result("a"), result("a")], "'a'"),
    "no id": ([calls(None), result("a")], "None"),
    "empty id": ([calls(""), result("")], "''"),
    "id that is no text": ([calls(5), result("5")], "5"),
    "long id": ([calls("a"), result("n" * 10_000)], "'nnnnn"),
}


@pytest.mark.parametrize(("messages", "named"), REFUSED.values(), ids=REFUSED)
def test_other_ids_are_refused_by_name(server, messages, named):
    with owned(server) as owner:
        key = owner.session.key
        status, answer = post(server, {"messages": [HI, *messages]}, key=key)
        assert status == 400 and named in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 500
        assert post(server, HELLO, key=key)[0] == 200
    if messages == REFUSED["before the next calls"][0]:
        # calls that follow each other are one response there
        return
    body = {"input": items(HI, *messages)}
    with pytest.raises(RequestError, match="call"):
        read_responses_request(body, ImageReader())
