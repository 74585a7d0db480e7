"""Large requests are bounded by cheap counts before work is done for them. Work is processor time of this thread."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.endpoint_clients import HELLO, owned, post

from ragen_pl.agent_programs.serving.chat_request import read_json, read_request
from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.responses_api import read_responses_request
from ragen_pl.agent_programs.serving.strict_json import has_more_values

MIB = 1024 * 1024


def processor_s(work: Callable[[], Any]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


MANY = {
    "lists": "[" + "[]," * (10 * MIB) + "[]]",
    "objects": "[" + "{}," * (10 * MIB) + "{}]",
    "numbers": "[" + "1," * (15 * MIB) + "1]",
    "texts": "[" + '"",' * (10 * MIB) + '""]',
    "texts with quotes": "[" + r'"\"[],",' * (3 * MIB) + '""]',
    "names": "{" + ",".join(f'"{number}":0' for number in range(2 * MIB)) + "}",
    "in UTF-16": "[" + "[]," * (5 * MIB) + "[]]",
}


@pytest.mark.parametrize("name", MANY)
def test_many_values_are_refused_before_any_is_made(name):
    data = ('{"messages": ' + MANY[name] + "}").encode(
        "utf-16-le" if name.endswith("UTF-16") else "utf-8"
    )
    assert len(data) < 34 * MIB

    def read() -> None:
        with pytest.raises(RequestError, match="more than 250000 values") as refused:
            read_json(data)
        assert refused.value.code == "invalid_json"

    # reading the lists took 59 s
    assert processor_s(read) < 4.0


def test_many_values_are_a_400_of_the_endpoint(server):
    with owned(server) as owner:
        data = ('{"messages": ' + MANY["lists"] + "}").encode()
        status, answer = post(server, data, key=owner.session.key)
        assert (status, answer["error"]["code"]) == (400, "invalid_json")
        assert post(server, HELLO, key=owner.session.key)[0] == 200
        reward = post(server, data, key=owner.session.key, path="/v1/rewards")
        assert reward[0] == 401


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.text(alphabet='\\"[]{},:u'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='\\",[{a'), inner),
)


def number_of_values(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(number_of_values, inner))


@settings(max_examples=100, derandomize=True, database=None)
@given(value=JSON, escaped=st.booleans(), indent=st.sampled_from([None, 1]))
def test_the_count_is_that_of_the_values(value, escaped, indent):
    """No request is refused for what its texts hold; empty lists and objects may count twice."""
    text = json.dumps(value, ensure_ascii=escaped, indent=indent)
    found = number_of_values(value)
    assert has_more_values(text, found - 1) and not has_more_values(text, 2 * found)


def test_signs_in_texts_are_no_values():
    body = {"messages": [{"role": "user", "content": '[{,"\\' * (2 * MIB)}]}
    assert read_json(json.dumps(body).encode()) == body


def test_many_parts_of_a_content_are_joined_in_one_pass():
    parts = [{"type": "text", "text": "x" * 250}] * 60_000
    body = {"messages": [{"role": "user", "content": parts}]}

    def read() -> None:
        (message,) = read_request(body, ImageReader()).chat.messages
        assert message["content"] == "x" * 250 * 60_000

    # with a copy for each part it took minutes
    assert processor_s(read) < 4.0


def test_items_of_the_responses_api_are_bounded():
    items = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="found 5000, expected at most 4096"):
        read_responses_request({"input": items * 5000}, ImageReader())
    with pytest.raises(RequestError, match="found 20000 items"):
        read_responses_request({"input": items * 20_000}, ImageReader())
