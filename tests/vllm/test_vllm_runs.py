"""Whole runs whose rollouts are vLLM's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.models.vllm_models import build

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
SMALL = (
    "model=pretrained",
    "model.build.path=model",
    "algorithm=grpo",
    "env.invalid_ends=false",
    "env.max_turns=3",
    "curriculum=null",
    "context.window=all",
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.max_response_tokens=8",
    "optimizer.lr=1e-2",
    "validation.episodes=8",
    "validation.blank=false",
    "warm_start=none",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=2",
    "trainer.check_val_every_n_epoch=1",
    "logger=none",
    "paths.run_dir=run",
)
IN_PROCESS = ("rollout/engine=vllm", "rollout.engine.cache_bytes=67108864")


def run_fit(folder: Path, kind: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run `ragen_pl.fit` on a tiny model."""
    build(kind).save(folder / "model")
    env = "frozenlake" if kind == "text" else "frozenlake_visual"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, "-m", "ragen_pl.fit", f"env={env}", *SMALL, *overrides],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )


def fit(folder: Path, kind: str, *overrides: str) -> tuple[dict[str, float], str]:
    """Run `ragen_pl.fit` on a tiny model; return the last metrics and what was logged."""
    done = run_fit(folder, kind, *overrides)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    return metrics, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_run_samples_with_the_present_weights(tmp_path, kind):
    metrics, log = fit(tmp_path, kind, *IN_PROCESS)
    assert metrics["rollout/logprob_mismatch_max"] < 1e-4
    assert metrics["rollout/episodes"] == 16
    assert metrics["update/gradient_norm_policy"] > 0
    assert "since the rollout engine rounds otherwise" in log


def test_two_ranks_have_an_engine_each(tmp_path):
    metrics, _ = fit(tmp_path, "text", *IN_PROCESS, "trainer.devices=2", "trainer.strategy=ddp")
    assert metrics["rollout/logprob_mismatch_max"] < 1e-4
    assert metrics["rollout/episodes"] == 16 and metrics["val/episodes"] == 8


def test_sharded_weights_are_copied_whole(tmp_path):
    metrics, _ = fit(tmp_path, "text", *IN_PROCESS, "trainer.devices=2", "trainer.strategy=fsdp2")
    assert metrics["rollout/logprob_mismatch_max"] < 1e-4


SHARED_ENGINE = "rollout.engine.settings={tensor_parallel_size: 2}"


@pytest.mark.parametrize(
    "settings",
    [
        ("trainer.strategy=ddp",),
        # one rank has two batches of a validation, the other one has one
        ("trainer.strategy=fsdp2", "model.build.lora={r: 4}", "rollout.num_envs=4"),
    ],
    ids=["ddp", "fsdp2 and adapters"],
)
def test_two_ranks_share_an_engine(tmp_path, settings):
    metrics, log = fit(
        tmp_path,
        "text",
        *IN_PROCESS,
        SHARED_ENGINE,
        "trainer.devices=2",
        "rollout.groups=5",
        "validation.episodes=9",
        *settings,
    )
    assert metrics["rollout/logprob_mismatch_max"] < 1e-4
    assert metrics["rollout/episodes"] == 20 and metrics["val/episodes"] == 9
    assert metrics["update/gradient_norm_policy"] > 0
    assert "since the rollout engine rounds otherwise" in log


@pytest.mark.parametrize(
    ("moment", "rank", "name", "codes"),
    [
        ("rollout-1-2", 1, "SIGTERM", (143,)),
        ("validating-0-0", 0, "SIGTERM", (143,)),
        ("rollout-1-2", 1, "SIGKILL", (1, -9)),
    ],
)
def test_a_signal_to_one_of_the_ranks_that_share_an_engine_ends_both(
    tmp_path, moment, rank, name, codes
):
    done = run_fit(
        tmp_path,
        "text",
        *IN_PROCESS,
        SHARED_ENGINE,
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "validation.episodes=9",
        "rollout.num_envs=4",
        "+callbacks.kill._target_=support.runs.killing.KillAt",
        f"+callbacks.kill.moment={moment}",
        f"+callbacks.kill.rank={rank}",
        f"+callbacks.kill.signal_name={name}",
        "callbacks.checkpoint.grace_seconds=200",
    )
    assert done.returncode in codes, done.stdout[-2000:] + done.stderr[-5000:]
    assert (tmp_path / "run" / "killed").exists()
    assert name == "SIGKILL" or (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize(
    "settings",
    [
        ("trainer.strategy=ddp",),
        # one rank has two batches of a validation, the other one has one
        ("trainer.strategy=fsdp2", "model.build.lora={r: 4}", "rollout.num_envs=4"),
    ],
    ids=["ddp", "fsdp2 and adapters"],
)
def test_two_ranks_share_a_server(tmp_path, settings):
    metrics, log = fit(
        tmp_path,
        "text",
        "rollout/engine=vllm_server",
        "rollout.engine.settings={kv_cache_memory_bytes: 67108864}",
        "rollout.engine.timeout_s=600",
        "trainer.devices=2",
        "validation.episodes=9",
        *settings,
    )
    assert metrics["rollout/logprob_mismatch_max"] < 1e-4
    assert metrics["rollout/episodes"] == 16 and metrics["val/episodes"] == 9
    assert "since the rollout engine rounds otherwise" in log


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_samples_while_the_policy_trains(tmp_path, ranks):
    """With weights one update older than those that are trained."""
    settings = (
        "rollout/engine=vllm_server",
        "rollout.engine.settings={kv_cache_memory_bytes: 67108864}",
        "rollout.engine.timeout_s=600",
        "rollout.iterations_ahead=1",
        f"trainer.devices={ranks}",
        f"trainer.strategy={'auto' if ranks == 1 else 'fsdp2'}",
        "trainer.max_epochs=3",
    )
    metrics, _ = fit(tmp_path, "text", *settings)
    assert metrics["rollout/staleness"] == 1.0
    assert metrics["rollout/logprob_mismatch_max"] > 1e-3
    assert metrics["rollout/episodes"] == 16 and metrics["val/episodes"] == 8
