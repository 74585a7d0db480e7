"""Programs whose requests a chat endpoint answers in place of the policy."""

from __future__ import annotations

import json

from support.runs.composing import evaluation_config
from support.servers.chat_server import KEY, serving

from ragen_pl.evaluation.checks import check_evaluation
from ragen_pl.evaluation.evaluator import evaluate


def test_the_limits_of_a_request_are_sent_on(script, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    body = """
ask("a", max_tokens=5, stop=["END", "STOP"])
ask("b", max_tokens=4000)
ask("c")
report(reward=1)
"""
    with serving() as server:
        server.text = "well"
        cfg = evaluation_config(
            "env=program", f"env.command={json.dumps(script(body))}", "endpoint=openai", "endpoint.model=walker",
            f"endpoint.base_url={server.url}", "endpoint.max_tokens=900", "validation.episodes=1",
            f"paths.root={tmp_path}", f"to={tmp_path}/out", "mlflow=false",
        )  # fmt: skip
        check_evaluation(cfg)
        evaluate(cfg)
    limits = [(one["max_completion_tokens"], one.get("stop")) for one in server.requests]
    assert limits == [(5, ["END", "STOP"]), (900, None), (900, None)]
