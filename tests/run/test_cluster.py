"""Job queues: SLURM's variables and signals, and machines with its commands where it is not used."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from support.runs.small_runs import JOB, SMALL, run_ranks

from ragen_pl.run.train import quieten
from ragen_pl.run.trainer import build_trainer

# one rank of it
TASK = JOB | {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}  # fmt: skip


@pytest.mark.slow
def test_sigusr1_before_the_end_of_a_slurm_job_saves_and_ends_all_ranks(tmp_path):
    run = tmp_path / "run"
    settings = (
        *SMALL,
        "warm_start.enabled=false",
        "validation.baselines=null",
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "trainer.max_epochs=2",
        f"paths.run_dir={run}",
    )
    signal = [
        "+callbacks.kill._target_=support.runs.killing.KillAt",
        "+callbacks.kill.moment=rollout-1-2",
        "+callbacks.kill.rank=1",
        "+callbacks.kill.signal_name=SIGUSR1",
    ]
    run.mkdir()
    # Lightning would load it instead of starting
    (run / "hpc_ckpt_1.ckpt").write_bytes(b"of Lightning's requeueing")
    first, second = run_ranks(tmp_path, [*settings, *signal], environment=JOB)
    # the second rank leaves the exit code to the first
    assert (first.code, second.code) == (143, 0), first.output + second.output
    assert "ragen_pl: stopped by SIGUSR1; the last checkpoint is" in first.line
    # of the iteration before the one in which it was received
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 8
    assert [file.name for file in run.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]


def test_slurm_is_detected_without_its_requeueing_and_its_checkpoints(tmp_path, monkeypatch):
    settings = {"accelerator": "cpu"}

    def made() -> pl.Trainer:
        return build_trainer(settings, logger=False, default_root_dir=tmp_path)

    def environment() -> object:
        return made()._accelerator_connector.cluster_environment

    assert isinstance(environment(), LightningEnvironment)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    slurm = environment()
    assert isinstance(slurm, SLURMEnvironment) and not slurm.auto_requeue
    torch.save({}, tmp_path / "hpc_ckpt_1.ckpt")
    stock = pl.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    assert stock._checkpoint_connector._hpc_resume_path is not None
    assert made()._checkpoint_connector._hpc_resume_path is None


def test_srun_on_the_path_is_no_reason_for_advice(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="srun"):
            SLURMEnvironment.detect()
        quieten()
        assert not SLURMEnvironment.detect()
        build_trainer({"accelerator": "cpu"}, logger=False)
