"""The support desk as a program learns as the environment does: the same responses, iteration after iteration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from support.episodes.agent_programs import AGENTS
from support.runs.module_process import run_module
from support.runs.small_runs import ROOT, TESTS

from ragen_pl.checkpoints.sharded_checkpoint import CheckpointFiles

# a run of two takes minutes where the machine is busy
LIMIT_S = 900
# steps of a warm start after which some episodes succeed
LONG = 500
BOTH = (
    "++model.build.text.hidden_size=64",
    "++model.build.text.intermediate_size=128",
    "context.max_tokens=4096",
    "env.format_penalty=0.25",
    "rollout.groups=8",
    "rollout.group_size=2",
    "rollout.max_response_tokens=40",
    # env=program has a lower one of its own
    "optimizer.lr=6e-4",
    "validation.episodes=16",
    "validation.held_out=false",
    "validation.baselines=null",
    "trainer.max_epochs=2",
    "algorithm.loss.policy.aggregation=token-mean",
    "algorithm.loss.kl.aggregation=token-mean",
    "logger=none",
    "callbacks.progress=null",
    "callbacks.trajectories=null",
    "callbacks.plots=null",
    "+callbacks.record._target_=support.runs.killing.Record",
)


def trained(folder: Path, *overrides: str) -> tuple[dict[str, list[list[int]]], dict[str, float]]:
    """Run `python -m ragen_pl.fit` in a folder; return the responses of every iteration and the last metrics."""
    run = folder / "run"
    folder.mkdir()
    # programs find modules in the run's working folder
    (folder / "support_desk.py").symlink_to(AGENTS / "support_desk.py")
    places = (f"paths.run_dir={run}", f"+callbacks.record.folder={folder}")
    code, output = run_module(
        "ragen_pl.fit",
        [*BOTH, *overrides, *places],
        folder=folder,
        paths=(TESTS, ROOT),
        timeout=LIMIT_S,
    )
    assert code == 0, output[-3000:]
    record = json.loads((folder / "rank_0.json").read_text())
    return record["responses"], json.loads((run / "metrics.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20, pytest.param(LONG, marks=pytest.mark.soak)])
def test_a_program_learns_as_the_environment_does(tmp_path, steps):
    """From any policy; only after a long warm start is it one whose episodes have different returns."""
    environment, program = tmp_path / "environment", tmp_path / "program"
    expected, metrics = trained(
        environment,
        "env=support_desk",
        "env.prompt_format=native",
        "context.system_prompt=instructions",
        f"warm_start.steps={steps}",
        "warm_start.batch_size=8",
        f"warm_start.episodes={1024 if steps == LONG else 64}",
        "warm_start.optimizer.lr=4e-3",
    )
    words = yaml.safe_load((environment / "run" / "config.yaml").read_text())["model"]["build"][
        "words"
    ]
    found, other_metrics = trained(
        program,
        "env=program",
        "env.function=support_desk.episode",
        f"+env.words={json.dumps(words)}",
        "warm_start=demonstrations",
        f"warm_start.weights={environment / 'run' / 'warm_start.pt'}",
    )
    assert found == expected
    if steps == LONG:
        assert metrics["rollout/return_std"] > 0 and metrics["rollout/valid_actions"] > 0
    for name in ("rollout/return", "rollout/valid_actions", "val/return", "val/success"):
        assert other_metrics[name] == pytest.approx(metrics[name], abs=1e-6)
    weights, others = (
        CheckpointFiles().load_checkpoint(
            folder / "run" / "checkpoints" / "last.ckpt", weights_only=True
        )["state_dict"]
        for folder in (environment, program)
    )
    torch.testing.assert_close(others, weights, rtol=0.0, atol=1e-6)
    first = torch.load(environment / "run" / "warm_start.pt", weights_only=True)["module"]
    assert any(not weights[name].equal(value) for name, value in first.items())
