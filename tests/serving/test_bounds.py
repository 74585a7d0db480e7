"""Large requests are bounded by cheap counts before work is done for them. Work is processor time of this thread."""

from __future__ import annotations

import base64
import io
import json
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.servers.endpoint_clients import HELLO, owned, post

from ragen_pl.agent_programs.results import read_result
from ragen_pl.agent_programs.serving.chat_request import read_json, read_request
from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.responses_api import read_responses_request
from ragen_pl.agent_programs.serving.rewards import ResponseRewards
from ragen_pl.agent_programs.serving.strict_json import has_more_values
from ragen_pl.base.records import read_image

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


def calls_of(number: int, arguments: str) -> list[dict[str, Any]]:
    function = {"name": "tool", "arguments": arguments}
    calls = [{"id": f"{one}", "type": "function", "function": function} for one in range(number)]
    results = [{"role": "tool", "tool_call_id": f"{one}", "content": ""} for one in range(number)]
    return [HELLO["messages"][0], {"role": "assistant", "tool_calls": calls}, *results]


def test_values_of_the_arguments_of_all_calls_are_bounded():
    """Each text is within the limit, and 70 of them took 9 s."""
    lists = '{"a": [' + "[]," * 120_000 + "0]}"

    def read() -> None:
        with pytest.raises(RequestError, match=r"tool_calls: the arguments .* than 250000 values"):
            read_request({"messages": calls_of(70, lists)}, ImageReader())

    assert processor_s(read) < 2.0
    # signs in their texts are no values
    texts = json.dumps({"code": "[{," * 100_000})
    chat = read_request({"messages": calls_of(20, texts)}, ImageReader()).chat
    assert [call["arguments"] for call in chat.messages[1]["tool_calls"]] == [
        json.loads(texts)
    ] * 20


def test_scans_of_a_picture_are_bounded():
    """Each scan has 33 bytes and goes over all pixels: a megabyte of them took minutes."""
    file = io.BytesIO()
    Image.new("L", (4096, 4096), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    scan = data[data.rfind(b"\xff\xda") : -2]

    def read(scans: int) -> tuple[int, ...]:
        whole = base64.b64encode(data[:-2] + scan * scans + data[-2:]).decode()
        return ImageReader().read(f"data:image/jpeg;base64,{whole}")[1].shape

    assert read(4) == (4096, 4096, 3)

    def refused() -> None:
        with pytest.raises(RequestError, match="a JPEG of 30006 scans, expected at most 100"):
            read(30_000)

    assert processor_s(refused) < 2.0


def with_parts(kind: str, part: bytes, count: int) -> bytes:
    """Return a file of 8 x 8 pixels with parts that say nothing."""
    file = io.BytesIO()
    # of a WebP with room for parts
    Image.new("RGB", (8, 8)).save(file, kind, **({"xmp": b"a"} if kind == "WEBP" else {}))
    data, start = file.getvalue(), {"PNG": 33, "JPEG": 2, "WEBP": 0}[kind]
    start = start or len(data)
    data = data[:start] + part * count + data[start:]
    size = (len(data) - 8).to_bytes(4, "little")
    return data[:4] + size + data[8:] if kind == "WEBP" else data


PHOTOSHOP = b"Photoshop 3.0\x00" + b"8BIM\x04\x04" + bytes(6) + b"8BIM\x04\x05" + bytes(6)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("PNG", bytes(4) + b"teSt" + zlib.crc32(b"teSt").to_bytes(4, "big")),
        ("JPEG", b"\xff\xfe\x00\x02"),
        ("JPEG", b"\xff"),
        ("JPEG", b"\xff\xd0"),
        ("JPEG", b"\xff\xed" + (2 + len(PHOTOSHOP)).to_bytes(2, "big") + PHOTOSHOP),
        ("WEBP", b"TEST" + bytes(4)),
    ],
    ids=["chunk", "segment", "filling", "mark", "entry", "chunk of WebP"],
)
def test_parts_of_a_picture_are_bounded(kind, part, tmp_path):
    """Pillow reads each in Python: 1.5 million chunks took three seconds."""

    def read(count: int) -> tuple[int, ...]:
        whole = base64.b64encode(with_parts(kind, part, count)).decode()
        return ImageReader().read(f"data:image/{kind.lower()};base64,{whole}")[1].shape

    assert read(1000) == (8, 8, 3)
    with pytest.raises(RequestError, match="image_url: a file of more than 4096 parts") as refused:
        read(4096)
    assert refused.value.code == "image_too_large"
    for count, expected in ((1000, True), (4096, False)):
        (tmp_path / "a").write_bytes(with_parts(kind, part, count))
        assert (read_image(tmp_path, "a", formats=(kind,)) is not None) == expected


def test_an_answer_does_not_repeat_a_large_request():
    body = {"messages": [{"role": "u" * MIB, "content": "a"}]}
    with pytest.raises(
        RequestError, match=r"^messages\[0\]\.role='u.*expected one of system, "
    ) as refused:
        read_request(body, ImageReader())
    assert len(str(refused.value)) < 2100


def test_a_result_with_a_name_given_twice_among_many_is_refused_at_once():
    names = ",".join(f'"name{number}": 1' for number in range(90_000))
    text = f'{{"reward": 1, "info": {{{names}, "name89999": 2}}}}'

    def read() -> None:
        with pytest.raises(ValueError, match="'name89999' is given twice"):
            read_result(text, posted=ResponseRewards(), call_ids=[])

    # with a count of each name it took more than a minute
    assert processor_s(read) < 2.0


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [5] * 100_000}]},
        {"messages": [{"role": "assistant", "tool_calls": [5] * 100_000}]},
        {"messages": [5] * 100_000},
        {"messages": [{"role": "user"}], "stop": [5] * 100_000},
        {"messages": [{"role": "user"}], "tools": [5] * 100_000},
    ],
)
def test_the_first_wrong_item_is_the_last_that_is_read(body):
    def read() -> None:
        with pytest.raises(RequestError, match="5"):
            read_request(body, ImageReader())

    # all of them took 2 s
    assert processor_s(read) < 0.1


def test_items_of_the_responses_api_are_bounded():
    items = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="found 5000, expected at most 4096"):
        read_responses_request({"input": items * 5000}, ImageReader())
    with pytest.raises(RequestError, match="found 20000, expected at most 16384"):
        read_responses_request({"input": items * 20_000}, ImageReader())
