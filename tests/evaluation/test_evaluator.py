"""A small trained run: the same weights give the same table wherever they are loaded from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs.composing import composed, evaluation_config, resolved

from ragen_pl.assembly.weights import load_bundle, read_policy
from ragen_pl.base.records import read_records
from ragen_pl.config import ConfigError
from ragen_pl.config.own_files import is_own_folder
from ragen_pl.evaluation.comparison import compare
from ragen_pl.evaluation.evaluator import Evaluation, evaluate
from ragen_pl.evaluation.exporting import export
from ragen_pl.evaluation.played import Question, check_comparable, read_played
from ragen_pl.run.train import train

pytestmark = pytest.mark.slow
SMALL = [
    "env=frozenlake_visual", "env.invalid_ends=false", "env.max_turns=3", "curriculum=null",
    "model.build.text.hidden_size=32", "model.build.text.intermediate_size=64",
    "model.build.text.num_attention_heads=2", "model.build.vision.width=32",
    "model.build.vision.heads=2", "rollout.groups=4", "rollout.max_response_tokens=24",
    "validation.episodes=12", "validation.blank=false",
    "warm_start.steps=60", "warm_start.episodes=64", "warm_start.batch_size=32",
    "warm_start.optimizer.lr=1e-2", "trainer.max_epochs=1", "trainer.check_val_every_n_epoch=1",
    "update.epochs=1", "callbacks.progress=null", "callbacks.trajectories=null",
]  # fmt: skip
TRANSFORMERS_ONLY = """
import sys, numpy, torch
from transformers import AutoModelForImageTextToText, AutoProcessor
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], trust_remote_code=True)
processor = AutoProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)
image = numpy.arange(64 * 64 * 3, dtype=numpy.uint8).reshape(64, 64, 3)
inputs = processor(images=[image], text=["<|user|><|image|>reach the goal<|assistant|>"])
with torch.no_grad():
    numpy.save(sys.argv[2], model(**inputs).logits.numpy())
assert not any(name.startswith("ragen_pl") for name in sys.modules)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    root = tmp_path_factory.mktemp("runs")
    shutil.copy(empty_store, root / "mlflow.db")
    train(composed(*SMALL, f"paths.root={root}"))
    (folder,) = (root / "frozenlake_visual").iterdir()
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "policy"
    return export(evaluation_config(f"ckpt={run}", f"to={folder}", command="export"))


@pytest.fixture(scope="module")
def table(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    return evaluated(run, "last", tmp_path_factory.mktemp("first"))


def evaluated(run: Path, ckpt: str, folder: Path, *more: str) -> Evaluation:
    root = f"paths.root={run.parent.parent}"
    return evaluate(evaluation_config(f"ckpt={ckpt}", "samples=2", root, f"to={folder}", *more))


def test_table_compares_policies(table: Evaluation, run: Path) -> None:
    (validation_set,) = table.validation_sets.values()
    assert set(validation_set["policies"]) == {
        "policy",
        "warm start",
        "random",
        "garbage",
        "optimal",
        "cycle",
    }
    assert (
        validation_set["policies"]["optimal"]["pass@2"]
        > validation_set["policies"]["random"]["success"]
    )
    assert (
        validation_set["policies"]["policy"]["valid_actions"] > 0
    )  # or nothing below would say much
    assert validation_set["set_aside"] == validation_set["initial_states"] == 12
    greedy = evaluate(evaluation_config(f"ckpt={run}", "trajectories=false", "mlflow=false"))
    logged = json.loads((run / "metrics.json").read_text())
    policies = greedy.validation_sets["held_out"]["policies"]
    for name in ("success", "return", "turns", "valid_actions", "response_tokens"):
        assert policies["policy"][name] == pytest.approx(logged[f"val/{name}"], rel=1e-6)
        assert policies["random"][name] == pytest.approx(logged[f"random_policy/{name}"], rel=1e-6)
    (written,) = (run / "evaluations").iterdir()
    assert (
        json.loads((written / "evaluation.json").read_text())["validation_sets"]
        == greedy.validation_sets
    )


def test_the_last_validation_and_a_greedy_evaluation_of_the_last_weights_are_the_same(
    run: Path, tmp_path: Path
) -> None:
    evaluate(evaluation_config(f"ckpt={run}", f"to={tmp_path}", "mlflow=false"))
    found = compare([str(run)], [str(tmp_path)], Question())
    assert (found.episodes, found.iterations) == (12, ([1], [None]))
    sides = [read_played(str(folder), Question(), key="run") for folder in (run, tmp_path)]
    for one in sides[0].outcomes.values():
        assert one["state"] is not None
    assert sides[0].outcomes == sides[1].outcomes
    assert found.costs[0]["episodes"] == 4 and found.costs[0]["processor_seconds"] > 0
    # training may have used initial states that the run has not held out
    more = (f"ckpt={run}", f"to={tmp_path / 'more'}", "mlflow=false", "validation.episodes=14")
    evaluate(evaluation_config(*more, "validation.warm_start=false", "validation.baselines=null"))
    further = read_played(str(tmp_path / "more"), Question(), key="run")
    with pytest.raises(ConfigError, match="more: training may have used initial states"):
        check_comparable([[further]], Question())


def test_weights_that_are_not_finite_are_not_exported(run: Path, tmp_path: Path) -> None:
    saved = torch.load(run / "warm_start.pt", weights_only=True)
    name = next(name for name in saved["module"] if name.startswith("policy.model."))
    saved["module"][name].flatten()[0] = float("inf")
    torch.save(saved, tmp_path / "spoiled.pt")
    given = (f"ckpt={tmp_path / 'spoiled.pt'}", f"paths.run_dir={run}", f"to={tmp_path / 'to'}")
    weight = name.removeprefix("policy.model.")
    with pytest.raises(ConfigError, match=f"spoiled.pt: its entry state_dict.{weight} has NaN"):
        export(evaluation_config(*given, command="export"))
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("source", ["file", "run", "mlflow", "exported"])
def test_same_weights_give_the_same_table(
    source: str, run: Path, exported: Path, table: Evaluation, tmp_path: Path
) -> None:
    ckpt = {
        "file": str(run / "checkpoints" / "last.ckpt"),
        "run": str(run),
        "mlflow": json.loads((run / "mlflow_run.json").read_text())["run_id"],
        "exported": str(exported),
    }[source]
    assert evaluated(run, ckpt, tmp_path, "mlflow=false").validation_sets == table.validation_sets


def test_an_exported_policy_knows_what_its_training_held_out(run: Path, tmp_path: Path) -> None:
    changes = ("env.kwargs.hole_fraction=0.3", "validation.episodes=40")
    folder = export(
        evaluation_config(f"ckpt={run}", f"to={tmp_path / 'to'}", *changes, command="export")
    )
    found, trained = evaluation_config(f"ckpt={folder}"), evaluation_config(f"ckpt={run}")
    assert found.validation.episodes == 40 and trained.source.held_out == 12
    for key in ("held_out", "environment"):
        assert found.source[key] == trained.source[key]


def test_an_exported_folder_counts_as_written_by_this_account(exported: Path) -> None:
    assert is_own_folder(exported / "ragen_pl.yaml")


def test_seed_changes_sampled_responses(run: Path, table: Evaluation, tmp_path: Path) -> None:
    other = evaluated(run, str(run), tmp_path, "seed=1", "mlflow=false").validation_sets["held_out"]
    same = table.validation_sets["held_out"]
    assert other["digest"] == same["digest"]
    assert other["policies"]["random"] == same["policies"]["random"]
    assert other["policies"]["policy"] != same["policies"]["policy"]


def test_best_checkpoint_has_the_best_validation(run: Path) -> None:
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    (state,) = [
        state for name, state in best["callbacks"].items() if name.startswith("BestCheckpoint")
    ]
    assert state["best_model_path"] == str(run / "checkpoints" / "best.ckpt")
    cfg = evaluation_config("ckpt=best", "env=frozenlake_visual", f"paths.root={run.parent.parent}",
                   "env.max_turns=3", "env.invalid_ends=false", "mlflow=false", "trajectories=false")  # fmt: skip
    success = evaluate(cfg).validation_sets["held_out"]["policies"]["policy"]["success"]
    assert success == pytest.approx(float(state["best_model_score"]))


def test_transformers_alone_computes_the_same_logits(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", TRANSFORMERS_ONLY, str(exported), str(tmp_path / "logits.npy")],
        env={"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    bundle = load_bundle(evaluation_config(f"ckpt={run}"))
    image = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    inputs = bundle.processor(images=[image], text=["<|user|><|image|>reach the goal<|assistant|>"])
    with torch.no_grad():
        logits = bundle.model(**inputs).logits.numpy()
    assert np.array_equal(logits, np.load(tmp_path / "logits.npy"))


def test_evaluation_is_nested_under_the_run_in_mlflow(run: Path, table: Evaluation) -> None:
    from mlflow.tracking import MlflowClient

    known = json.loads((run / "mlflow_run.json").read_text())
    client = MlflowClient(known["tracking_uri"])
    (experiment,) = [
        candidate for candidate in client.search_experiments() if candidate.name == "ragen_pl"
    ]
    children = client.search_runs(
        [experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{known['run_id']}'"
    )
    assert len(children) == 1
    success = children[0].data.metrics["held_out/policy/success"]
    assert success == table.validation_sets["held_out"]["policies"]["policy"]["success"]
    names = {file.path for file in client.list_artifacts(children[0].info.run_id)}
    assert {"evaluation.json", "evaluation.md", "held_out"} <= names
    traces = client.search_traces(
        locations=[experiment.experiment_id], run_id=children[0].info.run_id
    )
    assert {trace.info.tags["validation_set"] for trace in traces} == {"held_out"} and len(
        traces
    ) == 2


def test_validation_sets_are_rows_and_episodes_are_written(run: Path, tmp_path: Path) -> None:
    arguments = [
        "validation_sets=frozenlake_visual",
        "validation.episodes=3",
        "validation_sets.dense.episodes=2",
        "validation.baselines=null",
        "mlflow=false",
    ]
    results = evaluated(run, str(run), tmp_path, *arguments).validation_sets
    sizes = [result["initial_states"] for result in results.values()]
    assert sizes.count(3) == len(results) - 1
    text = (tmp_path / "evaluation.md").read_text()
    assert all(f"| {name} | policy |" in text for name in results)
    records = list(read_records(tmp_path / "larger" / "trajectories.jsonl"))
    assert len(records) == 6 and {record["validation_set"] for record in records} == {"larger"}
    assert (tmp_path / "larger" / records[0]["turns"][0]["images"][0]).exists()


def test_unsuitable_weights_are_rejected(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds another model or algorithm"):
        load_bundle(evaluation_config(f"ckpt={run}", "model.build.text.hidden_size=64"))
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes((run / "checkpoints" / "last.ckpt").read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"broken\.ckpt: .*; give a checkpoint that a run"):
        read_policy(broken)
    overrides = resolved("model=small_lm", "env=frozenlake_visual", f"paths.root={tmp_path}")
    with pytest.raises(ConfigError, match=r"validation_sets\.held_out: .*reads text only"):
        evaluate(composed(*overrides, command="evaluate", checked=False))
