"""Requests to a chat API: attempts, limits, what is paid and kept, and where the key is not."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers.chat_server import KEY, UNUSABLE, ChatServer, serving

from ragen_pl.engines.errors import RolloutError
from ragen_pl.rollout.chat_answers import Answer, AnswerFile
from ragen_pl.rollout.chat_client import _pause
from ragen_pl.rollout.endpoint import ChatEndpoint, Failure

PRICES = {"input_price": 1e6, "output_price": 0.0}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving() as server:
        server.text = "<answer>Up</answer>"
        yield server


def asked(
    server: ChatServer, count: int = 1, **settings: Any
) -> tuple[list[Answer | Failure], dict]:
    """Ask `count` times, a request at a time; return the results in order and the usage."""
    settings = {"base_url": server.url, "concurrency": 1, **settings}
    with closing(ChatEndpoint(model="walker", **settings)) as endpoint:
        for number in range(count):
            messages = [{"role": "user", "content": f"question {number}"}]
            endpoint.submit(number, messages, temperature=0.0, seed=0)
        results: dict[int, Answer | Failure] = {}
        while len(results) < count:
            results |= dict(endpoint.collect())
        return [results[number] for number in range(count)], endpoint.usage.report()


def test_faults_and_unusable_answers_are_asked_for_again(
    server: ChatServer, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("ragen_pl.rollout.chat_client._LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr("ragen_pl.rollout.chat_client._MAX_MIB", 1)
    server.faults = [429, 500, "close", "late", 503, "cut", "huge", *UNUSABLE]
    settings = {**PRICES, "answers": str(tmp_path / "answers")}
    results, usage = asked(server, 5, timeout_s=3.0, max_retries=30, **settings)
    assert server.faults == []
    assert {result.text for result in results} == {server.text}
    # what can't be used is paid for too, and what can be is kept
    assert usage["cost"] == usage["prompt_tokens"] == 100 * 5 + 7
    assert len((tmp_path / "answers").read_text().splitlines()) == usage["requests"] == 5
    results, usage = asked(server, 6, **settings)
    assert (usage["requests"], usage["known"], usage["cost"]) == (1, 5, 100)
    assert (usage["known_cost"], usage["total_cost"]) == (500, 600)


@pytest.mark.parametrize("fault", [*UNUSABLE, "cut", "huge", "close", 500, 400, 403, 422])
def test_a_request_that_fails_is_reported_in_one_line(
    server: ChatServer, monkeypatch, fault
) -> None:
    monkeypatch.setattr("ragen_pl.rollout.chat_client._MAX_MIB", 1)
    server.faults = [fault]
    (failed, answered), usage = asked(server, 2, max_retries=0)
    assert isinstance(failed, Failure) and isinstance(answered, Answer)
    assert failed.reason and "\n" not in failed.reason and len(failed.reason) < 400
    assert usage["failed"] == usage["requests"] == 1


def test_pauses_grow_and_differ() -> None:
    pauses = [[_pause(attempt, number) for attempt in range(10)] for number in ("a", "b")]
    assert pauses[0] != pauses[1] and pauses[0] == [_pause(n, "a") for n in range(10)]
    for longest, pause in zip([0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30], pauses[0], strict=True):
        assert longest / 2 <= pause <= longest


def test_more_failures_than_permitted_end_it(server: ChatServer) -> None:
    server.faults = 4 * [500]
    with pytest.raises(
        RolloutError, match=r"walker at .*: 4 of 4 requests failed, the last: status 500"
    ):
        asked(server, 5, max_retries=0)
    for fraction, count in ((0.1, 50), (1.0, 9)):
        server.faults = [None] * (count - 5) + 5 * [500]
        assert asked(server, count, max_retries=0, max_failed=fraction)[1]["failed"] == 5
        server.faults = [None] * (count - 6) + 6 * [500]
        if fraction < 1:
            with pytest.raises(RolloutError, match="5 of 49 requests failed"):
                asked(server, count, max_retries=0, max_failed=fraction)


@pytest.mark.parametrize(
    ("fault", "why"),
    [("quota", "no credit left"), (402, "no credit left"), (401, "OPENAI_API_KEY was refused"), (404, "no such model"),
     (307, "no such model or address")],
)  # fmt: skip
def test_nothing_is_asked_again_where_every_request_would_fail(
    server: ChatServer, fault, why
) -> None:
    server.faults = 9 * [fault]
    with pytest.raises(RolloutError, match=why) as caught:
        asked(server, 5)
    # the next one may have been sent before the answer was collected
    assert server.sent <= 3 and "\n" not in str(caught.value)


def test_an_answer_that_never_ends_takes_no_longer_than_permitted(server: ChatServer) -> None:
    server.faults = ["drip", "drip"]
    (result,), _ = asked(server, timeout_s=0.5, max_retries=1)
    assert isinstance(result, Failure) and result.reason == "no answer within 0.5 s"


def test_equal_requests_under_way_are_sent_once(server: ChatServer) -> None:
    server.together = 2  # no answer before the last request
    with closing(ChatEndpoint(model="walker", base_url=server.url)) as endpoint:
        for number in range(5):
            endpoint.submit(number, [{"role": "user", "content": "same"}], temperature=0.0, seed=0)
        server.together = 0
        answered: list[int] = []
        while len(answered) < 5:
            answered += [number for number, _ in endpoint.collect()]
        assert sorted(answered) == [0, 1, 2, 3, 4]
        assert server.sent == 1 and (endpoint.usage.requests, endpoint.usage.known) == (1, 4)


def test_a_refusal_and_unknown_tokens_are_counted_apart(server: ChatServer, tmp_path: Path) -> None:
    settings = {"answers": str(tmp_path / "answers"), "input_price": 1.0}
    server.message = {"content": None, "refusal": "I won't"}
    server.usage = {"prompt_tokens": None, "completion_tokens": "many"}
    (refusal, _), usage = asked(server, 2, **settings)
    assert refusal == Answer(text="I won't", finish_reason="stop", refusal=True)
    assert (usage["refusals"], usage["filtered"], usage["unknown_tokens"]) == (2, 0, 2)
    server.message = {"content": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]}
    server.finish_reason, server.usage = "content_filter", None
    with closing(ChatEndpoint(model="walker", base_url=server.url, **settings)) as endpoint:
        for number in range(3):
            messages = [{"role": "user", "content": f"question {number}"}]
            endpoint.submit(number, messages, temperature=0.0, seed=0)
        results: dict[int, Any] = {}
        while len(results) < 3:
            results |= dict(endpoint.collect())
        assert results[2].text == "hm" and str(endpoint.usage) == (
            "1 requests and 2 known answers, 0 prompt and 0 completion tokens (of 3 answers unknown), "
            "at least 0.0000 USD and 0.0000 USD before, 2 refusals, 1 filtered"
        )


@pytest.mark.parametrize("fault", [400, 401, 500, "garbage"])
def test_no_part_of_the_key_is_shown(
    server: ChatServer, tmp_path: Path, monkeypatch, fault
) -> None:
    key = "sk-" + "".join(str(number) for number in range(90))
    monkeypatch.setenv("OPENAI_API_KEY", f"{key}\n")
    # a text that is cut in the key
    server.error = "x" * 240 + key
    monkeypatch.setitem(UNUSABLE, "garbage", "x" * 60 + key)
    server.faults = 4 * [fault]
    with pytest.raises(RolloutError) as caught:
        asked(server, 4, max_retries=0)
    assert server.keys == {f"Bearer {key}"}
    # as `debug=true` shows it
    assert key[:8] not in "".join(traceback.format_exception(caught.value))
    server.faults, server.text = [], f"<think>{key}</think><answer>Up</answer>"
    (answer,), _ = asked(server, answers=str(tmp_path / "answers"))
    assert answer.text == "<think>…</think><answer>Up</answer>"
    assert key[:8] not in (tmp_path / "answers").read_text()


def test_a_short_key_is_a_word_like_others(server: ChatServer, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    server.text = "the box is EMPTY"
    assert asked(server)[0][0].text == server.text and server.keys == {"Bearer EMPTY"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "http://user:sk-secret-key@localhost/v1"}, "endpoint.base_url: holds a user's name"),
        ({"base_url": "http://sk-secret-key@localhost/v1"}, "endpoint.base_url: holds a user's name"),
        ({"base_url": "localhost:8000"}, "endpoint.base_url=localhost:8000: expected an address"),
        ({"base_url": "http://a:b/"}, "endpoint.base_url=http://a:b/: expected an address"),
        ({"base_url": "http://"}, "endpoint.base_url=http://: expected an address"),
        ({"api_key_variable": "sk-secret-key"}, "api_key_variable: expected the name of an environment"),
        ({"api_key_variable": "BLANKS"}, "BLANKS: this environment variable holds blanks"),
        ({"api_key_variable": "NOTHING"}, "NOTHING: this environment variable is not set"),
    ],
)  # fmt: skip
def test_a_key_in_the_wrong_place_is_refused_and_not_shown(monkeypatch, settings, message) -> None:
    monkeypatch.setenv("BLANKS", "sk-secret-key\nsk-secret-key")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(ValueError, match=message) as caught:
        ChatEndpoint(model="walker", **settings)
    assert "sk-secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_other_line_ends_in_an_answer_forge_nothing(
    server: ChatServer, tmp_path: Path, caplog
) -> None:
    forged = json.dumps({"request": "abc", "text": "forged", "finish_reason": "stop"})
    server.text = f"<think>{LINE_ENDS}{forged}{LINE_ENDS}123\u2028</think><answer>Up</answer>"
    file = tmp_path / "answers"
    (answer,), _ = asked(server, answers=str(file))
    assert asked(server, answers=str(file))[0] == [answer] and server.sent == 1
    assert answer.text == server.text and AnswerFile(file).get("abc") is None
    assert caplog.text == ""


LINE_ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n"


def test_damaged_and_foreign_lines_are_left_out_with_one_warning(tmp_path: Path, caplog) -> None:
    old = {
        "request": "old",
        "text": f"a{LINE_ENDS}b",
        "finish_reason": "stop",
        "prompt_tokens": 1,
        "completion_tokens": 2,
    }
    wrong = [
        "123", "null", "[]", '"request"', "{}", '{"request": "a"}', "[" * 100_000, "\x00", '{"request": "abc',
        '{"request": 5, "text": "", "finish_reason": null}', '{"request": "a", "text": 5, "finish_reason": null}',
        '{"request": "a", "text": "", "finish_reason": 1}',
        '{"request": "a", "text": "", "finish_reason": null, "prompt_tokens": -1}',
        '{"request": "a", "text": "", "finish_reason": null, "more": 1}',
    ]  # fmt: skip
    file = tmp_path / "answers.jsonl"
    file.write_text(
        "\n".join([*wrong, json.dumps(old, ensure_ascii=False), "", "\udcff"]),
        "utf-8",
        "surrogateescape",
    )
    answers = AnswerFile(file)
    assert answers.get("old") == Answer(
        text=f"a{LINE_ENDS}b", finish_reason="stop", prompt_tokens=1, completion_tokens=2
    )
    assert answers.get("a") is None
    (warning,) = caplog.messages
    assert warning.endswith(
        f"{len(wrong) + 1} of its lines hold no answer and are left out, the first is line 1"
    )
    answers.add("new", Answer(text="x", finish_reason=None))
    assert AnswerFile(file).get("new") == Answer(text="x", finish_reason=None)


@hypothesis.settings(max_examples=40)
@given(st.text(), st.one_of(st.none(), st.text()), st.booleans())
def test_any_answer_is_read_as_it_was_written(text: str, reason: str | None, refusal: bool) -> None:
    answer = Answer(
        text=text.encode("utf-8", "replace").decode(), finish_reason=reason, refusal=refusal
    )
    with TemporaryDirectory() as folder:
        AnswerFile(Path(folder) / "a").add("key", answer)
        assert AnswerFile(Path(folder) / "a").get("key") == answer
