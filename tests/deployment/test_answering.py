"""A served policy answers as in training: joined histories, separated by key and bounded."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
from support.episodes.rollout_fixtures import TextEngine
from support.servers.endpoint_clients import HELLO, hang_up, post, send, until

from ragen_pl.agent_programs.serving.server import AgentServer
from ragen_pl.agent_programs.serving.session import Event, EventKind, Session, SessionLimits
from ragen_pl.deployment.answering import PolicyAnswers
from ragen_pl.deployment.histories import Histories
from ragen_pl.deployment.serving import answer_events
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.settings import EpisodeSettings


class Served:
    """A policy with written responses behind an endpoint."""

    def __init__(self, bundle, *, max_calls=100, max_bytes=1 << 30, **settings):
        self.context = ContextManager(bundle, window="all", system_prompt=None, max_tokens=400)
        self.engine = TextEngine(self.context, lambda session, turn: f"word {session}")
        self.histories = Histories(max_calls=max_calls, max_bytes=max_bytes)
        answers = PolicyAnswers(
            self.engine,
            self.context,
            settings=EpisodeSettings(**{"max_response_tokens": 64} | settings),
            histories=self.histories,
        )
        self.server = AgentServer()
        self.events = queue.SimpleQueue()
        self.sessions = []
        self.thread = threading.Thread(
            target=answer_events, args=(self.events, answers), kwargs={"continuous": False}
        )
        self.thread.start()

    def open(self) -> str:
        limits = SessionLimits(sampling=True)
        self.sessions.append(Session(self.server.loop, events=self.events, limits=limits))
        self.server.open(self.sessions[-1])
        return self.sessions[-1].key

    def close(self):
        self.events.put(Event(EventKind.EXIT))
        self.thread.join()
        self.server.close()

    @property
    def requests(self):
        return [request for batch in self.engine.requests for request in batch]


@pytest.fixture
def serve(native_lm):
    started = []

    def start(**changes):
        started.append(Served(native_lm, **changes))
        return started[-1]

    yield start
    for each in started:
        each.close()


def follow_up(answer: dict, body: dict = HELLO) -> dict:
    message = answer["choices"][0]["message"]
    return {"messages": [*body["messages"], message, {"role": "user", "content": "and?"}]}


def joined(first, second) -> bool:
    """Return whether a request's prompt continues another one and its response."""
    ids = first.prompt.ids
    return len(second.prompt.ids) > len(ids) and np.array_equal(second.prompt.ids[: len(ids)], ids)


def test_history_is_joined_and_separated_by_key(serve):
    served = serve()
    mine, other = served.open(), served.open()
    status, answer = post(served.server, HELLO, key=mine)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "word 1"
    body = follow_up(answer)
    # the client may be faster than the note that it has got the answer
    until(lambda: len(served.histories) == 1)
    assert post(served.server, body, key=mine)[0] == 200
    assert post(served.server, body, key=other)[0] == 200
    first, second, foreign = served.requests
    response = served.context.encode_response("word 1")
    start = np.concatenate([first.prompt.ids, response])
    assert np.array_equal(second.prompt.ids[: len(start)], start)
    # the other key's prompt is a rendering; here it has the same ids, since the response is the template's own
    until(lambda: len(served.histories) == 3)
    conversations = [served.histories.conversation(key) for key in (mine, other)]
    assert [len(each.calls) for each in conversations] == [2, 1]
    assert foreign.prompt.ids.tolist() == second.prompt.ids.tolist()


def test_answers_that_no_client_got_are_no_history(serve):
    served = serve()
    key = served.open()
    session = served.sessions[0]
    gate = threading.Event()
    write = served.engine.write
    served.engine.write = lambda *place: (gate.wait(600), write(*place))[1]
    connection = send(served.server, HELLO, key=key)
    until(lambda: len(session._waiting) == 1 and served.engine.requests != [])
    (call,) = session._waiting
    hang_up(connection)
    until(lambda: call.clients == 0)
    gate.set()
    assert post(served.server, HELLO | {"user": "another"}, key=key)[0] == 200
    until(lambda: len(served.histories) == 1)
    assert len(served.requests) == 2
    # the client comes back: the answer is given, and then known
    status, answer = post(served.server, HELLO, key=key)
    assert (status, answer["id"]) == (200, call.id)
    until(lambda: len(served.histories) == 2)
    assert len(served.requests) == 2


def test_answers_that_clients_are_getting_are_recorded_however_many_there_are(serve, monkeypatch):
    monkeypatch.setattr("ragen_pl.deployment.answering._MAX_WAITING", 0)
    served = serve()
    key = served.open()
    for number in range(2):
        assert post(served.server, HELLO | {"user": str(number)}, key=key)[0] == 200
    until(lambda: len(served.histories) == 2)


def test_histories_are_bounded(serve):
    served = serve(max_calls=3)
    key = served.open()
    for number in range(5):
        assert post(served.server, HELLO | {"user": str(number)}, key=key)[0] == 200
    until(lambda: len(served.histories.conversation(key).calls) == 3)
    size = served.histories.bytes
    assert size > 0
    small = serve(max_bytes=1)
    key = small.open()
    status, answer = post(small.server, HELLO, key=key)
    assert post(small.server, follow_up(answer), key=key)[0] == status == 200
    assert (len(small.histories), small.histories.bytes) == (0, 0)


def test_sampling_of_a_request(serve):
    served = serve(temperature=0.7)
    key = served.open()
    post(served.server, HELLO | {"temperature": 0, "max_tokens": 5}, key=key)
    post(served.server, HELLO | {"top_p": 0.5, "max_tokens": 5000, "seed": 3}, key=key)
    greedy, sampled = served.requests
    assert (greedy.temperature, greedy.truncation, greedy.max_tokens) == (0.0, None, 5)
    assert (sampled.temperature, sampled.truncation.top_p, sampled.max_tokens) == (0.7, 0.5, 64)
    status, answer = post(served.server, HELLO | {"temperature": 9}, key=key)
    assert status == 400
    assert "temperature=9" in answer["error"]["message"]


def test_too_long_request_and_failing_engine_end_nothing(serve):
    served = serve()
    key = served.open()
    long = {"messages": [{"role": "user", "content": "word " * 500}]}
    status, answer = post(served.server, long, key=key)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    write = served.engine.write
    served.engine.write = lambda *_: 1 / 0
    connection = send(served.server, HELLO, key=key)
    response = connection.getresponse()
    assert (response.status, response.headers["x-should-retry"]) == (503, "false")
    response.read()
    connection.close()
    served.engine.write = write
    assert post(served.server, HELLO, key=key)[0] == 200


def test_a_response_that_no_policy_can_have_sampled_ends_all_requests(serve, monkeypatch):
    served, looks = serve(), []
    monkeypatch.setattr(served.engine, "continuous", True)

    def later(*, wait):
        # one of both requests has finished, after the steps that began them
        looks.append(len(served.engine.pending))
        if looks.count(2) < 2:
            return []
        session, generation = served.engine.pending.pop()
        generation.logprobs[0] = np.nan
        return [(session, generation)]

    monkeypatch.setattr(served.engine, "collect", later)
    key = served.open()
    connections = [send(served.server, HELLO | {"user": str(n)}, key=key) for n in range(2)]
    for connection in connections:
        connection.sock.settimeout(10)
        assert connection.getresponse().status == 503
        connection.close()


def test_many_clients_at_once(serve):
    served = serve(num_envs=4)
    keys = [served.open() for _ in range(3)]
    connections = [
        send(served.server, HELLO | {"user": str(number)}, key=keys[number % 3])
        for number in range(24)
    ]
    texts = []
    for connection in connections:
        response = connection.getresponse()
        texts.append(response.read())
        connection.close()
        assert response.status == 200
    assert len(set(texts)) == 24
    assert max(map(len, served.engine.requests)) <= 4
