"""Run every example and check its result."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.episodes.trajectories import responses
from support.models.family_models import tiny
from support.models.vllm_models import gap, play, request
from support.runs.module_process import run_module

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import generate
from ragen_pl.modules.policy import PolicyModule

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN_ENGINE = EXAMPLES / "own_engine"
LIMIT_S = 240
TINY = (
    "logger=none",
    "callbacks.progress=null",
    "callbacks.trajectories=null",
    "callbacks.plots=null",
    "trainer.max_epochs=1",
    "warm_start.steps=2",
    "warm_start.episodes=8",
    "warm_start.batch_size=8",
    "rollout.groups=4",
    "validation.episodes=4",
)
NO_WARM_START = (*(each for each in TINY if not each.startswith("warm_start")), "warm_start=none")


def load(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Import a script under its own module name, which its class paths refer to."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def call(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fit(*arguments: str, cwd: Path, run_dir: Path) -> tuple[int | None, str]:
    """Run `python -m ragen_pl.fit` in a folder; return its exit code and output."""
    output = run_dir.with_name("output.txt")
    arguments = (*arguments, f"paths.run_dir={run_dir}")
    return run_module("ragen_pl.fit", arguments, folder=cwd, output=output, timeout=LIMIT_S)


def test_advantages_only_learns_without_lightning_and_transformers():
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import advantages_only\ncurve = advantages_only.main(updates=60)\n"
        "assert curve[0] < 0.5 and curve[-1] > 1.9, curve\n"
        "print(sorted({'lightning', 'transformers', 'hydra', 'mlflow'} & set(sys.modules)))"
    )
    assert call("-c", code, cwd=EXAMPLES).endswith("[]\n")


@pytest.mark.filterwarnings("ignore")
def test_own_conversations_learns(monkeypatch):
    first, last = load(EXAMPLES / "own_conversations.py", monkeypatch).main(epochs=25)
    assert first > 5 and last < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_own_module_learns(monkeypatch):
    returns = load(EXAMPLES / "own_module.py", monkeypatch).main(iterations=15)
    assert sum(returns[:3]) / 3 < 0.65 and sum(returns[-3:]) / 3 > 0.75


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "env"),
    [("own_environments", "guess"), ("own_environments", "bright_side"), ("invoice", "invoice")],
)
def test_own_environment_runs_from_its_own_folder(tmp_path, folder, env):
    arguments = ("--config-dir", "conf", f"env={env}", *TINY)
    code, output = fit(*arguments, cwd=EXAMPLES / folder, run_dir=tmp_path / "run")
    assert code == 0, output
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["val/episodes"] == 4
    assert metrics["random_policy/failed"] == 0


# ---- own engine


@pytest.mark.parametrize("name", ["llama3_2", "qwen2_5_vl"])
def test_own_engine_samples_as_the_in_process_engine(monkeypatch, name):
    bundle = tiny(name)
    own = load(OWN_ENGINE / "my_engine.py", monkeypatch).GenerateEngine(PolicyModule(bundle))
    own.load_weights(7)
    trajectories = play(own, temperature=0.7, groups=2)
    assert responses(trajectories) == responses(
        play(TransformersEngine(PolicyModule(bundle)), temperature=0.7, groups=2)
    )
    assert gap(bundle, trajectories) < 1e-4
    # whatever else is in the batch
    assert responses(play(own, temperature=0.7, groups=2, num_envs=1)) == responses(trajectories)
    single = request(bundle, "Go.")
    limits = [replace(single, session=number, max_tokens=number + 1) for number in range(3)]
    generations = generate(own, limits, keep=False)
    assert all(
        len(one.ids) <= limit.max_tokens for one, limit in zip(generations, limits, strict=True)
    )
    assert {one.version for one in generations} == {7}
    own.submit([single], keep=False)
    own.release()
    assert own.collect() == []


def test_own_engine_ignores_the_penalty_of_a_checkpoint(monkeypatch):
    bundle = tiny("llama3_2")
    bundle.model.generation_config.repetition_penalty = 5.0
    own = load(OWN_ENGINE / "my_engine.py", monkeypatch).GenerateEngine(PolicyModule(bundle))
    assert gap(bundle, play(own, groups=2)) < 1e-4


def test_docs_show_the_own_engine():
    page = (EXAMPLES.parent / "docs" / "engines.md").read_text()
    for name in ("my_engine.py", "conf/rollout/engine/own.yaml"):
        kind = "python" if name.endswith(".py") else "yaml"
        assert f"```{kind}\n# {name}\n{(OWN_ENGINE / name).read_text()}```\n" in page


@pytest.mark.slow
def test_own_engine_runs(tmp_path):
    own = ("--config-dir", "conf", "rollout/engine=own", "env=frozenlake")
    code, output = fit(*own, *NO_WARM_START, cwd=OWN_ENGINE, run_dir=tmp_path / "run")
    assert code == 0, output
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["rollout/logprob_mismatch_max"] < 1e-4
    assert metrics["val/episodes"] == 4


@pytest.mark.slow
def test_own_engine_with_logprobs_before_the_bans_is_refused(tmp_path):
    code = (OWN_ENGINE / "my_engine.py").read_text()
    raw = "scores.log_softmax(-1).gather(1, sampled.tokens[:, None])[:, 0]"
    assert code.count("add(self.rows, sampled)") == 1
    wrong = code.replace("sampled)\n", f"sampled._replace(logprobs={raw}))\n")
    (tmp_path / "my_engine.py").write_text(wrong)
    own = ("--config-dir", str(OWN_ENGINE / "conf"), "rollout/engine=own", "env=frozenlake")
    code, output = fit(*own, *NO_WARM_START, cwd=tmp_path, run_dir=tmp_path / "run")
    assert code == 2, output
    assert "rollout.engine: log-probs of the rollout engine differ by" in output


# ---- invoice


@pytest.fixture
def invoice(monkeypatch):
    return load(EXAMPLES / "invoice" / "invoice.py", monkeypatch)


def test_invoice_has_at_most_one_wrong_field_and_describes_it(invoice):
    environment, wrong = invoice.InvoiceCheck(), []
    for seed in range(300):
        text, _ = environment.reset(seed=seed)
        wrong.append([field for line in environment.invoice for field in line.wrong()])
        first = environment.invoice[0]
        assert text.startswith(f"line 1 of 3 order {first.ordered} at {first.agreed} bill ")
        for field in invoice.FIELDS:
            text_of_field = f"{field} off" if field in first.wrong() else f"{field} ok"
            assert text_of_field in environment.describe()
    assert {len(fields) for fields in wrong} == {0, 1}
    assert 0.4 < np.mean([len(fields) for fields in wrong]) < 0.6
    assert {field for fields in wrong for field in fields} == set(invoice.FIELDS)


def test_invoice_rewards(invoice):
    environment = invoice.InvoiceCheck(read_cost=0.25)
    right = [invoice.Line.correct(2, 3)] * 3
    name = environment.action_names.index

    def play(lines, *actions):
        environment.reset(seed=0)
        environment.invoice, total = list(lines), 0.0
        for action in actions:
            _, reward, over, _, info = environment.step(name(action))
            total += reward
        assert over
        return total, info["success"]

    overpriced = invoice.Line(2, 3, count=2, price=4, sum=8)
    assert overpriced.wrong() == ("price",)
    assert play(right, "Next", "Next", "Accept") == (0.5, True)
    assert play([right[0], overpriced, right[0]], "Next", "Price") == (0.75, True)
    assert play([right[0], overpriced, right[0]], "Price") == (
        0.0,
        False,
    )  # a guess: the line has not been read
    assert play([right[0], overpriced, right[0]], "Accept") == (-1.0, False)
    assert play(right, "Sum") == (0.0, False)


def test_reading_the_invoice_beats_blind_policies(invoice):
    environment, rng = invoice.InvoiceCheck(), np.random.default_rng(0)

    def mean_return(choose):
        total = 0.0
        for seed in range(400):
            environment.reset(seed=seed)
            over = False
            while not over:
                _, reward, over, _, _ = environment.step(choose())
                total += reward
        return total / 400

    assert mean_return(lambda: environment.optimal_action(rng)) > 0.97
    assert max(mean_return(lambda decision=decision: decision) for decision in range(1, 5)) < 0.2
