"""A model behind an OpenAI-compatible API, played by a server of this test that walks towards the goal."""

from __future__ import annotations

import base64
import io
import json
import logging
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException
from PIL import Image
from rich.console import Console
from support.runs.composing import composed, evaluation_config
from support.servers.chat_server import KEY, ChatServer, serving

import envs  # noqa: F401
from ragen_pl.base.records import read_records
from ragen_pl.callbacks.summary import summary_table
from ragen_pl.config import ConfigError
from ragen_pl.config.hydra_errors import translated
from ragen_pl.evaluation.checks import check_evaluation
from ragen_pl.evaluation.evaluator import Evaluation, Evaluator, evaluate
from ragen_pl.evaluation.report import difficulty_rows, main_rows, notes
from ragen_pl.playing.checks import check_play
from ragen_pl.playing.play import play


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving() as server:
        yield server


def settings(server: ChatServer, root: Path, *more: str) -> list[str]:
    return [
        "env=frozenlake", "env.kwargs.hole_fraction=0.0", "endpoint=openai", "endpoint.model=walker",
        f"endpoint.base_url={server.url}", "validation.episodes=12", f"paths.root={root}", *more,
    ]  # fmt: skip


def evaluated(server: ChatServer, root: Path, *more: str) -> Evaluation:
    cfg = evaluation_config(*settings(server, root, "mlflow=false", f"to={root}/out", *more))
    check_evaluation(cfg)
    return evaluate(cfg)


def test_its_column_stands_beside_the_others(server: ChatServer, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    results = evaluated(server, tmp_path, "endpoint.input_price=1.0", "endpoint.output_price=5.0")
    policies = results.validation_sets["held_out"]["policies"]
    players = ["random", "garbage", "optimal", "cycle"]
    assert list(policies) == ["walker", *players]
    assert policies["walker"]["success"] == 1.0 == results.objective
    assert policies["walker"]["return"] > policies["random"]["return"]
    usage = results.about["endpoint"]
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written["about"]["endpoint"] == usage
    assert usage["requests"] == len(server.requests) > 12
    assert usage["prompt_tokens"] == 100 * usage["requests"]
    assert usage["cost"] == pytest.approx(usage["requests"] * (100 * 1.0 + 10 * 5.0) / 1e6)
    first, later = server.requests[0], max(server.requests, key=lambda each: len(each["messages"]))
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert "<answer>" in first["messages"][0]["content"]
    assert later["messages"][2]["content"].startswith("<think>on my way")
    assert first["temperature"] == 0.0 and first["max_completion_tokens"] == 1024
    assert server.keys == {f"Bearer {KEY}"}
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 3 and KEY not in "".join(written) + caplog.text
    assert "HTTP" not in caplog.text


def test_its_row_stands_beside_a_model(server: ChatServer, tmp_path: Path) -> None:
    small = ["model=small_lm", "validation.episodes=2", "env.max_turns=2"]
    results = evaluated(server, tmp_path, *small)
    (validation_set,) = results.validation_sets.values()
    players = ["random", "garbage", "optimal", "cycle"]
    assert list(validation_set["policies"]) == ["policy", "walker", *players]
    assert results.objective == validation_set["policies"]["policy"]["success"]
    assert validation_set["policies"]["walker"]["valid_actions"] == 1.0


def test_its_name_is_that_of_no_other_row(server: ChatServer, tmp_path: Path) -> None:
    few = ["validation.episodes=2", "env.max_turns=2"]
    evaluated(server, tmp_path, *few, "endpoint.model=lab/walker-4.1-mini")
    page = tmp_path / "out" / "held_out" / "page.html"
    assert "<title>walker-4.1-mini, validation set held_out" in page.read_text()
    # in the same folder
    few += ["endpoint.model=random", "trajectories=false"]
    (validation_set,) = evaluated(server, tmp_path, *few).validation_sets.values()
    players = ["random (API)", "random", "garbage", "optimal", "cycle"]
    assert list(validation_set["policies"]) == players
    # its episodes are not those of the evaluation before
    assert not [*page.parent.glob("*.*")]


def test_what_was_played_is_written_before_an_interruption(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(evaluator: Evaluator, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluator, "_scripted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluated(server, tmp_path, "validation.episodes=2", "env.max_turns=2")
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert list(written["validation_sets"]["held_out"]["policies"]) == ["walker"]


def test_tables_have_a_dash_for_what_failed_episodes_leave_out() -> None:
    def metrics(*levels: int, **more: float) -> dict[str, Any]:
        whole = {"episodes": 2.0, "success": 0.5, "success_low": 0.1, "success_high": 0.9}
        return whole | more | {"by_difficulty": {str(level): whole for level in levels}}

    passed = {"pass@2": 0.5, "pass@2_low": 0.1, "pass@2_high": 0.9}
    for policies in (
        {"policy": metrics(2), "random": metrics(1, 2, 10, **passed)},
        {"policy": metrics(1, 2, 10, **passed), "random": metrics(2)},
    ):
        head, rows = main_rows({"held_out": {"policies": policies}})
        cells = [row[head.index("pass@2")] for row in rows]
        assert sorted(cells) == ["-", "0.500 [0.100, 0.900]"]
        _, rows = difficulty_rows({"held_out": {"policies": policies}})
        assert [row[1:3] for row in rows] == [["1", "2"], ["2", "2"], ["10", "2"]]
        assert sorted(rows[0][3:])[0] == "-"


def test_tables_have_a_dash_for_success_that_no_step_reports() -> None:
    whole = {"success": 0.0, "success_low": 0.0, "success_high": 0.3, "return": 2.5, "episodes": 8}
    silent = whole | {"success_reported": 0.0, "by_difficulty": {"1": whole, "2": whole}}
    held_out = {
        "key": "held_out", "set_aside": 8, "initial_states": 8, "policies": {"policy": silent},
    }  # fmt: skip
    about = {
        "checkpoint": "last.ckpt", "greedy": True, "truncation": {}, "samples": 1, "seed": 0,
    }  # fmt: skip
    said = "held_out: no step says whether the task is solved"
    for policies, dashes in (({"policy": silent}, 1), ({"policy": silent, "random": whole}, 1)):
        sets = {"held_out": held_out | {"policies": policies}}
        head, rows = main_rows(sets)
        assert [row[head.index("success")] for row in rows].count("-") == dashes
        assert all(row[head.index("return")] == "2.500" for row in rows)
        alone = len(policies) == 1
        assert bool(difficulty_rows(sets)[1]) is not alone
        assert any(line.startswith(said) for line in notes(about, sets)) is alone
    out = io.StringIO()
    Console(file=out, width=120).print(summary_table({"after": silent}))
    assert "2.500" in out.getvalue() and "0.000" not in out.getvalue()


def test_there_is_none_by_default(tmp_path: Path) -> None:
    small = ["env=frozenlake", "model=small_lm", "validation.episodes=2", "env.max_turns=2"]
    cfg = evaluation_config(*small, "mlflow=false", f"to={tmp_path}")
    check_evaluation(cfg)
    assert "endpoint" not in evaluate(cfg).about
    cfg = evaluation_config(*small[:2], "policy=endpoint", f"save={tmp_path}/a.png", command="play")
    with pytest.raises(ConfigError, match="policy=endpoint: there is none"):
        check_play(cfg)


def test_answers_come_in_any_order_a_few_at_a_time(server: ChatServer, tmp_path: Path) -> None:
    server.delay, server.together = 0.02, 3
    first = evaluated(server, tmp_path / "a", "endpoint.concurrency=3", "samples=2")
    assert server.most_under_way == 3
    assert {request["temperature"] for request in server.requests} == {1.0}
    seeds = [request["seed"] for request in server.requests]
    assert len(set(seeds)) == len(seeds)
    server.delay = 0.0
    second = evaluated(server, tmp_path / "b", "endpoint.concurrency=1", "samples=2")
    assert first.validation_sets == second.validation_sets


def test_truncated_sampling_is_requested_and_reported(server: ChatServer, tmp_path: Path) -> None:
    limits = {"top_p": 0.9, "top_k": 40, "min_p": 0.05}
    few = ["validation.episodes=2", "env.max_turns=2"]
    changed = [*few, *(f"rollout.{name}={value}" for name, value in limits.items())]
    results = evaluated(server, tmp_path / "a", "greedy=false", *changed)
    assert all(limits.items() <= request.items() for request in server.requests)
    assert ", top_p 0.9, top_k 40, min_p 0.05," in notes(results.about, results.validation_sets)[0]
    server.requests.clear()
    results = evaluated(server, tmp_path / "b", *changed)
    assert not any(limits.keys() & request.keys() for request in server.requests)
    assert "top_p" not in notes(results.about, results.validation_sets)[0]


def test_samples_of_an_api_without_seeds_are_asked_for_one_by_one(
    server: ChatServer, tmp_path: Path
) -> None:
    more = [
        "samples=3",
        "rollout.num_envs=1",
        "+endpoint.parameters={seed: null}",
        "validation.episodes=2",
    ]
    results = evaluated(server, tmp_path, *more)
    assert all("seed" not in request for request in server.requests)
    assert results.about["endpoint"]["known"] == 0
    # asked again, each has the answer of its own
    asked = len(server.requests)
    again = evaluated(server, tmp_path, *more)
    assert len(server.requests) == asked and again.about["endpoint"]["known"] == asked


def test_images_are_sent_as_png(server: ChatServer, tmp_path: Path) -> None:
    evaluated(server, tmp_path, "env=frozenlake_visual", "env.max_turns=2", "validation.episodes=1")
    image, text = server.requests[0]["messages"][1]["content"]
    kind, data = image["image_url"]["url"].split(",")
    assert kind == "data:image/png;base64" and text["type"] == "text"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (64, 64)


@pytest.mark.parametrize("fault", ["html", 400])
def test_a_request_that_fails_costs_its_own_episode(
    server: ChatServer, tmp_path: Path, fault: int | str
) -> None:
    def begins(request: dict) -> str:
        return request["messages"][1]["content"]

    few = ["validation.baselines=null", "validation.episodes=4", "endpoint.max_retries=0"]
    server.faults = [fault]
    results = evaluated(server, tmp_path, *few)
    assert results.about["endpoint"]["failed"] == 1
    assert results.validation_sets["held_out"]["policies"]["walker"]["failed"] == 0.25
    records = list(read_records(tmp_path / "out" / "held_out" / "trajectories.jsonl"))
    errors = [record["error"] for record in records if record["status"] == "failed"]
    assert len(records) == 4 and len(errors) == 1 and errors[0].startswith("endpoint: ")
    # it is asked for again, the others are not
    played = {begins(request) for request in server.requests}
    server.requests = []
    assert evaluated(server, tmp_path, *few).objective == 1.0
    assert len({begins(request) for request in server.requests} | played) == 4
    assert len({begins(request) for request in server.requests}) == 1


def test_nothing_is_asked_twice_after_an_interruption(server: ChatServer, tmp_path: Path) -> None:
    server.fails_from = 7
    with pytest.raises(ConfigError, match=r"goes on with the answers in .*endpoint_answers\.jsonl"):
        evaluated(server, tmp_path, "endpoint.concurrency=2")
    while server.under_way:  # what was cancelled
        time.sleep(0.01)
    answers = tmp_path / "endpoint_answers.jsonl"
    known = len(answers.read_text().splitlines())
    assert known >= 6
    # killed while it wrote
    answers.write_text(answers.read_text() + '{"request": "abc')
    server.fails_from, server.requests = None, []
    results = evaluated(server, tmp_path)
    usage = results.about["endpoint"]
    # a request that was cancelled on its way may have arrived since
    asked = {json.dumps(request, sort_keys=True) for request in server.requests}
    assert usage["known"] == known and usage["requests"] == len(asked)
    server.requests = []
    again = evaluated(server, tmp_path)
    assert again.validation_sets == results.validation_sets and server.requests == []
    # another request is another answer
    evaluated(
        server, tmp_path, "+endpoint.parameters.reasoning_effort=low", "validation.episodes=1"
    )
    assert server.requests[0]["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (401, "the key in OPENAI_API_KEY was refused"),
        (404, "no such model or address"),
        (400, "endpoint.parameters changes its fields"),
        (500, "requests failed, the last: status 500"),
        ("close", "cannot be reached"),
        ("garbage", "expected a chat completion"),
    ],
)
def test_failures_are_reported_in_one_line(
    server: ChatServer, tmp_path: Path, fault, message
) -> None:
    server.faults = 50 * [fault]
    with pytest.raises(ConfigError, match=message) as caught:
        evaluated(server, tmp_path, "endpoint.max_retries=0")
    # the endpoint is closed
    assert not any("run_forever" in thread.name for thread in threading.enumerate())
    assert "\n" not in str(caught.value)
    # with `debug=true`
    assert KEY not in "".join(traceback.format_exception(caught.value))


def test_a_response_without_its_end_is_no_answer(server: ChatServer, tmp_path: Path) -> None:
    server.finish_reason = "length"
    results = evaluated(server, tmp_path, "validation.episodes=2")
    assert results.validation_sets["held_out"]["policies"]["walker"]["valid_actions"] == 0.0


@pytest.mark.parametrize("text", ["", "\ud800 \x00 <answer>", "<answer>" * 5000, "قف \u202e{}[]"])
def test_no_text_ends_the_evaluation(server: ChatServer, tmp_path: Path, text: str) -> None:
    server.text = text
    results = evaluated(server, tmp_path, "validation.episodes=2")
    assert results.validation_sets["held_out"]["policies"]["walker"]["valid_actions"] == 0.0


def test_it_plays_an_episode(server: ChatServer, tmp_path: Path, capsys) -> None:
    more = ["policy=endpoint", f"save={tmp_path}/episode.png"]
    arguments = [each for each in settings(server, tmp_path, *more) if "episodes" not in each]
    trajectory = play(evaluation_config(*arguments, command="play"))
    assert trajectory.success and "requests" in capsys.readouterr().out


def test_a_key_is_needed(server: ChatServer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="api_key_variable=OPENAI_API_KEY: this environment"):
        evaluated(server, tmp_path, "endpoint.base_url=null")
    evaluated(server, tmp_path, "validation.episodes=1")
    assert server.keys == {"Bearer none"}


def test_settings_are_checked(server: ChatServer, tmp_path: Path) -> None:
    for wrong in ("endpoint.window=0", "endpoint.timeout_s=0", "endpoint.turn_template=hello"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            evaluation_config(*settings(server, tmp_path, wrong))


def test_training_is_refused_with_the_reason() -> None:
    with pytest.raises(HydraException) as caught:
        composed("rollout/engine=openai")
    assert "log-probs of the sampled ids" in translated(caught.value)
