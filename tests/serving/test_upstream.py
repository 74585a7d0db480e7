"""Requests for other models go to the endpoints that a session names, and are no calls of the policy."""

from __future__ import annotations

import json

import pytest
from support.servers.chat_server import serving
from support.servers.endpoint_clients import HELLO, opened, post, send
from support.servers.endpoint_clients import read as read_answer


@pytest.fixture
def judge():
    with serving() as judge:
        judge.text = "fine"
        yield judge


def upstream(url: str) -> dict:
    return {"judge": {"url": url, "model": "big", "key": "sk-judge"}}


def test_request_is_passed_on(server, judge):
    session = opened(server, upstream=upstream(judge.url))
    body = HELLO | {"model": "judge", "logit_bias": {"5": 1}}
    status, answer = post(server, body, key=session.key)
    models = post(server, b"", key=session.key, method="GET", path="/v1/models")[1]
    server.end(session)
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert judge.requests == [body | {"model": "big"}]
    assert judge.keys == {"Bearer sk-judge"}
    assert session.key not in json.dumps(judge.requests)
    assert [model["id"] for model in models["data"]] == ["policy", "judge"]
    assert session.events.empty()
    assert session.counts == {"upstream": 1}


def test_error_is_passed_on(server, judge):
    session = opened(server, upstream=upstream(judge.url))
    judge.faults = [429]
    assert post(server, HELLO | {"model": "judge"}, key=session.key)[0] == 429
    server.end(session)
    assert session.events.empty()


def test_retry_of_one_in_flight_gets_its_answer(server, judge):
    # both of the answers would wait for each other
    judge.together = 2
    session = opened(server, upstream=upstream(judge.url))
    body = HELLO | {"model": "judge"}
    first = send(server, body, key=session.key)
    other = send(server, body | {"user": "a"}, key=session.key)
    again = send(server, body, key=session.key, headers={"x-stainless-retry-count": "1"})
    assert [read_answer(each)[0] for each in (first, other, again)] == [200, 200, 200]
    assert len(judge.requests) == 2
    server.end(session)


def test_endpoint_that_does_not_answer(server):
    session = opened(server, upstream=upstream("http://127.0.0.1:9/v1"))
    status, answer = post(server, HELLO | {"model": "judge"}, key=session.key)
    assert (status, answer["error"]["code"]) == (503, "upstream_failed")
    server.end(session)
