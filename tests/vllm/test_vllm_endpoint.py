"""`endpoint=openai` against a server of vLLM."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.models.vllm_models import KINDS, build
from support.runs.composing import evaluation_config
from support.servers.vllm_servers import UserServer

from ragen_pl.evaluation.evaluator import Evaluation, evaluate

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
ENVIRONMENTS = {"text": "frozenlake", "images": "frozenlake_visual"}
COUNTERS = {
    "requests": "vllm:request_success_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "completion_tokens": "vllm:generation_tokens_total",
}


class Server(UserServer):
    """A server of a tiny model that counts."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        build(kind).save(folder / "model")
        super().__init__(folder / "model", "--served-model-name", "tiny")

    def counted(self) -> dict[str, int]:
        """Return what the server itself has counted."""
        text = urlopen(f"{self.url}/metrics").read().decode()
        return {
            name: sum(int(float(each)) for each in re.findall(rf"^{key}{{.*}} (\S+)$", text, re.M))
            for name, key in COUNTERS.items()
        }


@pytest.fixture(scope="module", params=KINDS)
def server(request, tmp_path_factory):
    started = Server(tmp_path_factory.mktemp("server"), request.param)
    try:
        started.wait()
        yield started
    finally:
        started.kill()


def evaluated(server: Server, root: Path, *more: str) -> Evaluation:
    """Evaluate the server's model in three episodes of two turns, with the endpoint's row alone."""
    settings = (
        f"env={ENVIRONMENTS[server.kind]}", "env.max_turns=2", "env.invalid_ends=false",
        "validation.episodes=3", "endpoint=openai", "endpoint.model=tiny", "mlflow=false",
        f"endpoint.base_url={server.url}/v1", "endpoint.max_tokens=12", "samples=2",
        f"paths.root={root}", f"to={root}/out", *more,
    )  # fmt: skip
    return evaluate(evaluation_config(*settings))


def test_answers_and_tokens_are_the_servers(server, tmp_path):
    before = server.counted()
    results = evaluated(server, tmp_path)
    used = results.about["endpoint"]
    after = server.counted()
    assert {name: used[name] for name in COUNTERS} == {
        name: after[name] - before[name] for name in COUNTERS
    }
    # three episodes of two turns, each twice
    assert used["requests"] == 12 and 12 < used["completion_tokens"] <= 12 * 12
    (row,) = [
        policies["tiny"]
        for validation_set in results.validation_sets.values()
        for name, policies in validation_set.items()
        if name == "policies"
    ]
    assert row["turns"] == 2.0 and 0 <= row["valid_actions"] < 1

    # what is known is not asked for again
    answers = tmp_path / "endpoint_answers.jsonl"
    lines = answers.read_text().splitlines(keepends=True)
    assert len(lines) == 12
    again = evaluated(server, tmp_path)
    assert server.counted() == after and again.about["endpoint"]["known"] == 12
    assert again.validation_sets == results.validation_sets
    answers.write_text("".join(lines[:5]))
    resumed = evaluated(server, tmp_path)
    asked = server.counted()["requests"] - after["requests"]
    assert asked == resumed.about["endpoint"]["requests"] == 12 - resumed.about["endpoint"]["known"]
    assert resumed.about["endpoint"]["known"] == 5
    # equal seeds give equal answers here
    assert resumed.validation_sets == results.validation_sets


def test_a_longer_dialogue_than_the_server_takes_is_reported(server, tmp_path):
    with pytest.raises(ValueError, match=r"endpoint\.model=tiny at .* refuses a request"):
        evaluated(server, tmp_path, "endpoint.max_tokens=100000")
    assert server.process.poll() is None
