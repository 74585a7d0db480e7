"""Each answer that a client got is delivered once, and none that no client got."""

from __future__ import annotations

import socket

import pytest
from support.servers.endpoint_clients import (
    CHAT,
    HELLO,
    answer_of,
    assembled,
    connect,
    hang_up,
    opened,
    post,
    read,
    send,
    take,
    until,
)

from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.server import AgentServer
from ragen_pl.agent_programs.serving.session import EventKind

AGAIN = {"x-stainless-retry-count": "1"}
DELIVERED, GONE = EventKind.DELIVERED, EventKind.GONE
# more than the buffers of both sides of a connection take
LONG = "x" * 16_000_000


@pytest.fixture
def session(server):
    session = opened(server)
    yield session
    server.end(session)


def test_retry_of_a_request_in_flight_gets_the_same_answer(server, session):
    first = send(server, HELLO, key=session.key)
    call = take(session)
    second = send(server, HELLO, key=session.key, headers=AGAIN)
    until(lambda: call.clients == 2)
    session.answer(call, answer_of(call))
    assert read(first) == read(second)
    assert take(session, DELIVERED) is call
    until(lambda: call.clients == 0)
    assert session.events.empty()
    assert session.counts == {"retries": 1}


def test_client_that_times_out_and_comes_back_gets_the_answer(server, session):
    first = send(server, HELLO, key=session.key)
    call = take(session)
    hang_up(first)
    until(lambda: call.clients == 0)
    second = send(server, HELLO, key=session.key, headers=AGAIN)
    until(lambda: call.clients == 1)
    session.answer(call, answer_of(call))
    assert read(second)[0] == 200
    assert take(session, DELIVERED) is call
    assert session.events.empty()


@pytest.mark.parametrize("headers", [AGAIN, {}])
def test_answer_without_a_client_waits_for_one(server, session, headers):
    first = send(server, HELLO, key=session.key)
    call = take(session)
    hang_up(first)
    until(lambda: call.clients == 0)
    session.answer(call, answer_of(call))
    assert take(session, GONE) is call
    status, answer = post(server, HELLO, key=session.key, headers=headers)
    assert (status, answer["id"]) == (200, call.id)
    assert take(session, DELIVERED) is call
    assert session.events.empty()


def test_forgotten_answer_is_not_given_again(server, session):
    first = send(server, HELLO, key=session.key)
    call = take(session)
    hang_up(first)
    until(lambda: call.clients == 0)
    session.answer(call, answer_of(call))
    assert take(session, GONE) is call
    assert session.withdraw_answer(call)
    second = send(server, HELLO, key=session.key, headers=AGAIN)
    new = take(session)
    assert new.id != call.id
    session.answer(new, answer_of(new, "other"))
    assert read(second)[1]["choices"][0]["message"]["content"] == "other"
    assert take(session, DELIVERED) is new


def test_retry_after_delivery_gets_the_same_answer_and_is_not_told(server, session):
    first = send(server, HELLO, key=session.key)
    call = take(session)
    session.answer(call, answer_of(call))
    assert take(session, DELIVERED) is call
    answer = read(first)
    assert post(server, HELLO, key=session.key, headers=AGAIN) == answer
    assert session.events.empty()


def test_same_body_without_the_header_is_a_new_call(server, session):
    first, second = (send(server, HELLO, key=session.key) for _ in range(2))
    calls = [take(session), take(session)]
    for number, call in enumerate(calls):
        session.answer(call, answer_of(call, f"answer {number}"))
    answers = [read(each)[1] for each in (first, second)]
    assert {answer["choices"][0]["message"]["content"] for answer in answers} == {
        "answer 0",
        "answer 1",
    }
    assert {take(session, DELIVERED), take(session, DELIVERED)} == set(calls)
    third = send(server, HELLO, key=session.key)
    call = take(session)
    assert call not in calls
    session.answer(call, answer_of(call, "answer 2"))
    assert read(third)[0] == 200
    assert take(session, DELIVERED) is call
    # a retry is one of the newest call with the body
    assert post(server, HELLO, key=session.key, headers=AGAIN)[1]["id"] == call.id


def test_retry_that_was_never_seen_is_a_new_call(server, session):
    connection = send(server, HELLO, key=session.key, headers=AGAIN)
    call = take(session)
    session.answer(call, answer_of(call))
    assert read(connection)[0] == 200
    assert session.counts == {}


def test_retry_after_a_refusal_is_a_new_call(server, session):
    connection = send(server, HELLO, key=session.key)
    session.answer(take(session), RequestError(400, "no", code="context_length_exceeded"))
    status, answer = read(connection)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    second = send(server, HELLO, key=session.key, headers=AGAIN)
    call = take(session)
    session.answer(call, answer_of(call))
    assert read(second)[0] == 200
    assert take(session, DELIVERED) is call
    assert session.counts == {"refused_context_length_exceeded": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_in_the_midst_of_the_answer(server, session, stream):
    connection = send(server, HELLO | {"stream": stream}, key=session.key)
    call = take(session)
    session.answer(call, answer_of(call, LONG))
    response = connection.getresponse()
    assert response.read(100)
    # waits, since the client does not read on
    assert call.clients == 1 and session.events.empty()
    assert not session.withdraw_answer(call)
    response.close()
    hang_up(connection)
    assert take(session, GONE) is call
    assert not call.delivered
    # the whole answer, to who comes back
    found = post(server, HELLO | {"stream": stream}, key=session.key, headers=AGAIN)[1]
    answer = assembled(found) if stream else found
    assert answer["choices"][0]["message"]["content"] == LONG
    assert take(session, DELIVERED) is call
    assert not session.withdraw_answer(call)


def test_client_that_leaves_after_the_answer_has_got_it(server, session):
    connection = send(server, HELLO, key=session.key)
    call = take(session)
    session.answer(call, answer_of(call))
    assert read(connection)[0] == 200
    assert take(session, DELIVERED) is call
    assert session.events.empty()


def test_client_that_leaves_while_its_body_is_sent_makes_no_call(server, session):
    connection = connect(server)
    connection.connect()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {session.key}\r\n"
    connection.sock.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    hang_up(connection)
    answered = send(server, HELLO, key=session.key)
    session.answer(call := take(session), answer_of(call))
    assert read(answered)[0] == 200
    assert take(session, DELIVERED) is call
    assert session.events.empty()


def test_known_bodies_are_bounded_and_keep_no_messages(server, session):
    calls = []
    for number in range(300):
        connection = send(server, HELLO | {"user": str(number)}, key=session.key)
        calls.append(take(session))
        session.answer(calls[-1], answer_of(calls[-1]))
        assert read(connection)[0] == 200
        assert take(session, DELIVERED) is calls[-1]
    assert len(session._known) == 256
    assert all(call.client.chat.messages == [] for call in calls)


def test_session_takes_so_many_requests_at_once(server):
    session = opened(server)
    session.limits.open_requests = 2
    waiting = [send(server, HELLO, key=session.key) for _ in range(2)]
    calls = [take(session), take(session)]
    status, answer = post(server, HELLO, key=session.key)
    assert (status, answer["error"]["code"]) == (400, "too_many_requests")
    session.answer(calls[0], answer_of(calls[0]))
    assert take(session, DELIVERED) is calls[0]
    waiting.append(send(server, HELLO, key=session.key))
    assert take(session) not in calls
    server.end(session)
    assert sorted(read(each)[0] for each in waiting) == [200, 410, 410]


def test_end_of_a_session_refuses_what_waits_and_what_comes_later(server):
    session = opened(server)
    waiting = [
        send(server, HELLO | {"stream": stream}, key=session.key) for stream in (False, True)
    ]
    for _ in waiting:
        take(session)
    server.end(session)
    assert [read(each)[0] for each in waiting] == [410, 410]
    assert post(server, HELLO, key=session.key)[0] == 410
    assert post(server, HELLO, key="0" * 64)[0] == 401


def test_waiting_stream_gets_comments_and_errors_as_events():
    server = AgentServer(comment_s=0.01)
    session = opened(server)
    connection = send(server, HELLO | {"stream": True}, key=session.key)
    call = take(session)
    response = connection.getresponse()
    assert response.read(12) == b": waiting\n\n:"
    session.answer(call, RequestError(400, "no", code="template_error"))
    rest = response.read().decode().split("\n\n")
    assert '"code": "template_error"' in rest[-2]
    connection.close()
    second = send(server, HELLO | {"stream": True}, key=session.key)
    call = take(session)
    response = second.getresponse()
    response.read(12)
    session.answer(call, answer_of(call))
    events = [line for line in response.read().decode().split("\n\n")[:-1] if line[:1] == "d"]
    assert assembled(events)["choices"][0]["message"]["content"] == "hi"
    assert take(session, DELIVERED) is call
    second.close()
    server.close()


def test_server_takes_connections_as_soon_as_it_is_made():
    server = AgentServer()
    socket.create_connection(("127.0.0.1", connect(server).port)).close()
    server.close()


def retried(count: int) -> dict[str, str]:
    return {"x-stainless-retry-count": str(count)}


@pytest.mark.parametrize("noticed", [False, True], ids=["connections open", "connections closed"])
@pytest.mark.parametrize("attempts", [1, 2])
def test_parallel_retries_of_equal_requests_each_get_an_answer_of_their_own(
    server, session, noticed, attempts
):
    """Whether or not the server has noticed that the clients gave up their first connections."""
    number = 3
    connections = [send(server, HELLO, key=session.key) for _ in range(number)]
    calls = [take(session) for _ in range(number)]
    for attempt in range(attempts):
        before = [call.clients for call in calls]
        if noticed:
            for connection in connections:
                hang_up(connection)
            until(lambda: all(call.clients == 0 for call in calls))
            before = [0] * number
        left, connections = connections, []
        for _ in range(number):
            waiting = sum(call.clients for call in calls)
            connections.append(send(server, HELLO, key=session.key, headers=retried(attempt + 1)))
            until(lambda waiting=waiting: sum(call.clients for call in calls) == waiting + 1)
        assert [call.clients for call in calls] == [count + 1 for count in before]
        if not noticed:
            for connection in left:
                hang_up(connection)
            until(lambda: all(call.clients == 1 for call in calls))
    for place, call in enumerate(calls):
        session.answer(call, answer_of(call, f"answer {place}"))
    answers = [read(connection)[1] for connection in connections]
    assert len({answer["id"] for answer in answers}) == number
    assert {take(session, DELIVERED) for _ in calls} == set(calls)
    assert session.events.empty() and session.counts == {"retries": number * attempts}
