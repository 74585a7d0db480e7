"""Requests of hostile or broken clients get the right status, and harm no other session."""

from __future__ import annotations

import base64
import gzip
import io
import json
import struct
import threading
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.servers.endpoint_clients import (
    CHAT,
    HELLO,
    LIMIT_S,
    Owner,
    answer_of,
    connect,
    opened,
    owned,
    post,
    read,
    send,
    take,
)

from ragen_pl.agent_programs.serving import chat_request
from ragen_pl.agent_programs.serving import server as server_module
from ragen_pl.agent_programs.serving.chat_request import read_json, read_request
from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.server import AgentServer
from ragen_pl.agent_programs.serving.session import Session


@pytest.fixture
def other(server):
    """Another session, which is answered after each of these requests."""
    with owned(server) as owner:
        yield owner
        before = len(owner.of("request"))
        assert post(server, HELLO, key=owner.session.key)[0] == 200
        assert len(owner.of("request")) == before + 1


def with_image(data: bytes, kind: str = "png") -> dict:
    url = f"data:image/{kind};base64," + base64.b64encode(data).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}]}


def png(width: int, height: int, *, rows: int | None = None) -> bytes:
    """Return the file of a black image, of which so many rows are there."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    packer = zlib.compressobj(9)
    row = bytes(1 + width)
    data = b"".join(packer.compress(row) for _ in range(rows or height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "key", ["", "0" * 64, "ü", "x" * 5000, "Bearer", "../../etc"], ids=range(6)
)
def test_wrong_key(server, other, key):
    header = f"Bearer {key}".encode().decode("latin-1")
    status, answer = post(server, HELLO, key="", headers={"Authorization": header})
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert other.events == []


def test_session_for_all_takes_any_key_from_this_machine_only():
    server = AgentServer()
    session = Session(server.loop)
    server.open_to_all(session)
    owner = Owner(session)
    for headers in ({}, {"Host": "localhost:1"}, {"Host": "[::1]"}, {"Origin": "http://127.0.0.1"}):
        assert post(server, HELLO, key="anything", headers=headers)[0] == 200
    foreign = (
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "[::1"},
    )
    for headers in foreign:
        assert post(server, HELLO, key="", headers=headers)[0] in (400, 403)
    assert len(owner.of("request")) == 4
    owner.end()
    server.close()


def test_key_in_the_path(server, other):
    key = other.session.key
    assert post(server, HELLO, key="", path=f"/s/{key}{CHAT}")[0] == 200
    # it is not another session's, whatever the header says
    assert post(server, HELLO, key=key, path=f"/s/wrong{CHAT}")[0] == 401


def test_key_of_an_ended_session_and_of_another_one(server, other):
    ended = opened(server)
    server.end(ended)
    status, answer = post(server, HELLO, key=ended.key)
    assert (status, answer["error"]["code"]) == (410, "session_ended")
    mine = opened(server)
    connection = send(server, HELLO, key=mine.key)
    # the same body under another key is no retry of it
    assert post(server, HELLO, key=other.session.key, headers={"x-stainless-retry-count": "1"})
    session_call = take(mine)
    assert session_call.clients == 1
    server.end(mine)
    assert read(connection)[0] == 410


def test_keys_of_ended_sessions_are_bounded_and_ended_in_any_thread(server, other, monkeypatch):
    monkeypatch.setattr(server_module, "_MAX_PAST", 20)
    failures = []

    def work() -> None:
        try:
            for _ in range(300):
                server.end(opened(server))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(server._past) == 20


def test_reward_key_is_no_key(server, other):
    session = opened(server, reward_key="r" * 64)
    assert post(server, HELLO, key="r" * 64)[0] == 401
    reward = {"id": "chatcmpl-000000", "reward": 1.0}
    assert post(server, reward, key=session.key, path="/v1/rewards")[0] == 401
    assert post(server, reward, key="r" * 64, path="/v1/rewards")[0] == 200
    assert post(server, {"id": 5}, key="r" * 64, path="/v1/rewards")[0] == 400
    assert session.rewards == {"chatcmpl-000000": {"program": 1.0}}
    server.end(session)
    assert post(server, reward, key="r" * 64, path="/v1/rewards")[0] == 410


def test_body_of_33_mib(server, other):
    body = json.dumps(HELLO | {"user": "x" * 33 * 1024 * 1024}).encode()
    status, answer = post(server, body, key=other.session.key)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


def test_body_of_31_mib(server, other):
    body = json.dumps(HELLO | {"user": "x" * 31 * 1024 * 1024}).encode()
    assert post(server, body, key=other.session.key)[0] == 200


def test_compressed_body_is_not_unpacked(server, other):
    body = gzip.compress(json.dumps(HELLO | {"user": "x" * 64 * 1024 * 1024}).encode())
    tracemalloc.start()
    headers = {"Content-Encoding": "gzip"}
    status, answer = post(server, body, key=other.session.key, headers=headers)
    assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
    tracemalloc.stop()
    assert status == 400
    assert "Content-Encoding" in answer["error"]["message"]


def test_slow_body():
    server = AgentServer(body_s=0.2)
    with owned(server) as owner:
        connection = connect(server)
        connection.putrequest("POST", CHAT)
        connection.putheader("Authorization", f"Bearer {owner.session.key}")
        connection.putheader("Content-Length", "100")
        connection.endheaders()
        connection.send(b"{")
        status, answer = read(connection)
        assert (status, answer["error"]["code"]) == (400, "body_too_slow")
        assert post(server, HELLO, key=owner.session.key)[0] == 200
    server.close()


def test_many_headers(server, other):
    headers = {f"x-{number}": "y" for number in range(10_000)}
    connection = connect(server)
    given = headers | {"Authorization": f"Bearer {other.session.key}"}
    connection.request("POST", CHAT, body=json.dumps(HELLO), headers=given)
    response = connection.getresponse()
    response.read()
    connection.close()
    assert response.status == 400


@pytest.mark.parametrize("side", [4097, 60_000])
def test_image_bomb(server, other, side):
    body = with_image(png(side, side, rows=min(side, 5000)))
    assert len(json.dumps(body)) < 1_000_000
    tracemalloc.start()
    status, answer = post(server, body, key=other.session.key)
    assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
    tracemalloc.stop()
    assert (status, answer["error"]["code"]) == (400, "image_too_large")


def test_images_of_a_request_are_bounded_together(server, other, monkeypatch):
    monkeypatch.setattr(chat_request, "MAX_IMAGE_BYTES", 3 * 100)
    body = with_image(png(10, 10))
    body["messages"] *= 3
    assert post(server, body, key=other.session.key)[0] == 200
    body["messages"] += with_image(png(1, 1))["messages"]
    status, answer = post(server, body, key=other.session.key)
    assert (status, answer["error"]["code"]) == (400, "image_too_large")


def test_images_that_are_kept_are_bounded():
    reader = ImageReader(max_bytes=10_000)
    for number in range(1, 40):
        reader.read(
            with_image(png(20, 30 + number))["messages"][0]["content"][0]["image_url"]["url"]
        )
    assert 0 < sum(image.nbytes for image in reader._images.values()) <= 10_000


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_image"),
        (b"no image", "invalid_image"),
        (png(30, 30)[:50], "invalid_image"),
        (png(30, 30).replace(b"IDAT", b"IDAX"), "invalid_image"),
    ],
)
def test_broken_images(server, other, data, code):
    status, answer = post(server, with_image(data), key=other.session.key)
    assert (status, answer["error"]["code"]) == (400, code)


def test_other_formats_are_not_decoded(server, other):
    file = io.BytesIO()
    Image.new("RGB", (3, 3)).save(file, "GIF")
    status, answer = post(server, with_image(file.getvalue()), key=other.session.key)
    assert (status, answer["error"]["code"]) == (400, "invalid_image")


def test_image_that_is_no_base64(server, other):
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,ä?"}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    status, answer = post(server, body, key=other.session.key)
    assert (status, answer["error"]["code"]) == (400, "invalid_image_url")


DEEP = 100_000
HELLO_TEXT = json.dumps(HELLO)[:-1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"\xff\xfe",
        b"[" * DEEP,
        b'{"messages":' + b"[" * DEEP + b"]" * DEEP + b"}",
        (HELLO_TEXT + ', "metadata": ' + '{"a":' * 65 + "1" + "}" * 66).encode(),
        (HELLO_TEXT + ', "temperature": NaN}').encode(),
        (HELLO_TEXT + ', "temperature": Infinity}').encode(),
        (HELLO_TEXT + ', "temperature": 1e999}').encode(),
        (HELLO_TEXT + ', "seed": ' + "9" * 5000 + "}").encode(),
        (HELLO_TEXT + ', "user": "\\ud800"}').encode(),
        (HELLO_TEXT + ', "\\udfff": null}').encode(),
    ],
    ids=range(14),
)
def test_body_that_is_no_json(server, other, data):
    status, answer = post(server, data, key=other.session.key)
    assert (status, answer["error"]["code"]) == (400, "invalid_json")
    assert other.events == []


def test_several_answers(server, other):
    status, answer = post(server, HELLO | {"n": 2}, key=other.session.key)
    assert status == 400
    assert "n=2" in answer["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a":' * 65 + "1" + "}" * 65, "[" * DEEP, "[1]", "{", "5"],
    ids=range(8),
)  # fmt: skip
def test_arguments_that_are_no_object_stay_text(arguments):
    call = {"id": "a", "function": {"name": "weather", "arguments": arguments}}
    assistant = {"role": "assistant", "tool_calls": [call]}
    body = {"messages": [assistant, {"role": "tool", "tool_call_id": "a", "content": ""}]}
    request = read_request(body, ImageReader())
    assert request.chat.messages[0]["tool_calls"][0]["arguments"] == arguments


def test_error_of_the_endpoint_itself_is_logged_and_not_sent_again(
    server, other, monkeypatch, caplog
):
    def fail(*_, **__):
        raise KeyError("a fault")

    monkeypatch.setattr(server_module, "_read", fail)
    connection = send(server, HELLO, key=other.session.key)
    response = connection.getresponse()
    response.read()
    connection.close()
    assert response.status == 500
    assert response.headers["x-should-retry"] == "false"
    assert "a fault" in caplog.text
    monkeypatch.undo()


def test_a_request_that_takes_long_to_read_keeps_no_other_client_waiting(server):
    """It is read elsewhere than on the event loop: here until another client has its answer."""
    begun, answered = threading.Event(), threading.Event()

    class Slow(ImageReader):
        def read(self, url):
            begun.set()
            assert answered.wait(LIMIT_S)
            return super().read(url)

    with owned(server, images=Slow()) as slow, owned(server) as other:
        waiting = send(server, with_image(png(4, 4)), key=slow.session.key)
        assert begun.wait(LIMIT_S)
        assert post(server, HELLO, key=other.session.key)[0] == 200
        answered.set()
        assert read(waiting)[0] == 200


def test_sessions_at_once_do_not_mix(server):
    def respond(call):
        return answer_of(call, call.client.chat.messages[0]["content"])

    owners = [Owner(opened(server), respond) for _ in range(16)]
    found: dict[int, list] = {}

    def client(number: int) -> None:
        key = owners[number].session.key
        found[number] = [
            post(server, {"messages": [{"role": "user", "content": f"{number}, {n}"}]}, key=key)[1]
            for n in range(5)
        ]

    threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, owner in enumerate(owners):
        texts = [answer["choices"][0]["message"]["content"] for answer in found[number]]
        assert texts == [f"{number}, {n}" for n in range(5)]
        owner.wait_for("delivered", count=5)
        assert len(owner.of("delivered")) == 5
        owner.end()
        server.end(owner.session)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "content", "role", "text", "id", "url", "arguments"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
KINDS = st.sampled_from(["function", "text", "image_url", "refusal", "auto", "json_object"])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES | JSON},
    optional={
        "content": JSON | st.lists(st.fixed_dictionaries({"type": KINDS}, optional={"text": JSON, "image_url": JSON})),
        "tool_calls": JSON | st.lists(JSON),
        "tool_call_id": JSON,
        "reasoning": JSON,
    },
)  # fmt: skip
NAMES = """tools tool_choice stop stream stream_options response_format metadata n max_tokens modalities logprobs model
logit_bias parallel_tool_calls"""
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3) | JSON}, optional=dict.fromkeys(NAMES.split(), JSON)
)


@settings(max_examples=100)
@given(BODY)
def test_any_json_is_read_or_refused(body):
    try:
        read_request(read_json(json.dumps(body).encode()), ImageReader())
    except RequestError as error:
        assert 400 <= error.status < 500
