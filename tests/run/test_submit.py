"""`python -m ragen_pl.submit`: a job's file, and what is refused before it is submitted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from support.runs.composing import composed

from ragen_pl.config import config_dir
from ragen_pl.config.own_files import is_own
from ragen_pl.slurm import submit as command
from ragen_pl.slurm.job_file import SlurmSettings, job_file

OPTION = "#SBATCH "


def options(text: str) -> list[str]:
    return [line.removeprefix(OPTION) for line in text.splitlines() if line.startswith(OPTION)]


def test_a_job_asks_for_the_ranks_of_the_config(tmp_path):
    cfg = composed("env=frozenlake", "trainer=machines_hybrid", "trainer.num_nodes=8")
    settings = SlurmSettings(
        partition="gpu", time="24:00:00", cpus_per_task=12, setup="module load cuda", options=["--exclusive"]
    )  # fmt: skip
    arguments = ["env=frozenlake", "context.system_prompt=it's a lake"]
    text = job_file(cfg, settings, folder=tmp_path, arguments=arguments)
    asked = options(text)
    for option in (
        "--nodes=8", "--ntasks-per-node=8", "--gpus-per-node=8", "--partition=gpu", "--time=24:00:00",
        "--cpus-per-task=12", "--requeue", "--open-mode=append", "--signal=TERM@180", "--exclusive",
    ):  # fmt: skip
        assert option in asked
    before, _, run = text.partition("srun --kill-on-bad-exit=1 ")
    assert before.endswith("module load cuda\n")
    words = shlex.split(run.splitlines()[0])
    assert words == [sys.executable, "-m", "ragen_pl.fit", *arguments]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def run_job(folder, settings: SlurmSettings, *, code: int, requeues: int = 0) -> tuple[bool, str]:
    """Run a job's file on doubles of SLURM's commands, and return whether it requeues itself, and its errors."""
    cfg = composed("env=frozenlake", "trainer.accelerator=cpu")
    text = job_file(cfg, settings, folder=folder, arguments=[])
    assert not any(option.startswith("--gpus") for option in options(text))
    answers = {
        "srun": f"exit {code}", "scontrol": 'echo "$@" >> said; [ $1 = show ] && echo n1', "sleep": "true",
    }  # fmt: skip
    for name, answer in answers.items():
        file = folder / name
        file.write_text(
            f"#!/bin/sh\n{answer}\ntrue\n" if name == "scontrol" else f"#!/bin/sh\n{answer}\n"
        )
        file.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, check=False,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1",
             **({"SLURM_RESTART_COUNT": str(requeues)} if requeues else {})},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == code
    return "requeue 7" in (folder / "said").read_text(), done.stderr


@pytest.mark.parametrize(
    ("code", "requeued"), [(0, False), (1, True), (2, False), (130, False), (137, True), (143, True)]
)  # fmt: skip
def test_a_job_is_requeued_unless_it_has_ended_by_itself(tmp_path, code, requeued):
    assert run_job(tmp_path, SlurmSettings(), code=code) == (requeued, "")


@pytest.mark.parametrize(
    ("most", "requeues", "requeued"), [(2, 0, True), (2, 1, True), (2, 2, False), (None, 1000, True)]
)  # fmt: skip
def test_a_job_is_requeued_so_many_times_at_most(tmp_path, most, requeues, requeued):
    settings = SlurmSettings(max_requeues=most)
    found, err = run_job(tmp_path, settings, code=143, requeues=requeues)
    line = "requeued 2 times, slurm.max_requeues=2; submit the job again to go on"
    assert found == requeued and (line in err) != requeued


@pytest.mark.parametrize("cpus", ["12", None])
def test_ranks_get_the_cpus_that_the_job_asks_for(tmp_path, cpus, monkeypatch):
    # srun reads the job's own up to SLURM 22.05 only
    text = job_file(composed("env=frozenlake"), SlurmSettings(), folder=tmp_path, arguments=[])
    before, _, _ = text.partition("srun --kill-on-bad-exit=1 ")
    for name in ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    if cpus is not None:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
    script = before.replace("scontrol", "true") + 'env | grep "^SRUN_CPUS" || true'
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ("" if cpus is None else f"SRUN_CPUS_PER_TASK={cpus}")


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """An sbatch that takes every job, and its answer's file."""
    file = tmp_path / "bin" / "sbatch"
    file.parent.mkdir()
    file.write_text('#!/bin/sh\necho "$1" > submitted\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(file.parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "submitted"


def test_a_job_is_written_into_the_runs_folder_and_submitted(sbatch, tmp_path):
    folder = command.submit(["env=frozenlake", "seed=3", f"paths.run_dir={tmp_path / 'run'}"])
    assert sbatch.read_text().strip() == str(folder / "job.sbatch")
    text = (folder / "job.sbatch").read_text()
    assert f"seed=3 ckpt_path=auto paths.run_dir={folder}" in text
    saved = (folder / "config.yaml").read_text()
    assert "seed: 3" in saved and "${" not in saved and is_own(folder / "config.yaml")


@pytest.mark.parametrize(
    "name", ["a b", "Universität (2)", "o'brien", 'a"b', "a,b=c", "run#3", "back\\slash", "50%j"]
)
def test_a_job_reads_paths_as_they_are(name, sbatch, tmp_path, monkeypatch):
    place = tmp_path / name
    place.mkdir()
    monkeypatch.chdir(place)
    folder = command.submit(
        ["env=frozenlake", "slurm.options=['--comment=my # job', '--constraint=\"[a|b]\"']"]
    )
    assert folder.parent == place / "runs" / "frozenlake"
    text = (folder / "job.sbatch").read_text()
    # sbatch reads quotes, backslashes and comments as a shell does
    read = [shlex.split(option, comments=True) for option in options(text)]
    for option in (
        f"--output={str(folder).replace('%', '%%')}/slurm-%j.txt",
        f"--chdir={place}",
        "--comment=my # job",
        "--constraint=[a|b]",
    ):
        assert [option] in read
    (run,) = (line for line in text.splitlines() if line.startswith("srun"))
    overrides = shlex.split(run)[shlex.split(run).index("ragen_pl.fit") + 1 :]
    cfg = composed(*overrides)
    assert (cfg.paths.run_dir, cfg.ckpt_path) == (str(folder), "auto")


def test_a_dry_run_prints_the_file_only(sbatch, tmp_path, capsys):
    folder = command.submit(["env=frozenlake", "dry_run=true", "slurm.time=1-00:00:00"])
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=frozenlake\n")
    # a folder of its own, which the ranks of each start share
    assert folder.parent == tmp_path / "runs" / "frozenlake"
    assert not folder.exists() and not sbatch.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("env=frozenlake trainer.devices=auto", "trainer.devices=auto: a job asks for a number"),
        ("env=frozenlake slurm.gpus=8", "unknown key slurm.gpus: expected partition, account"),
        ("env=frozenlake slurm.signal_s=soon", "signal_s=soon: expected a whole number"),
        ("env=frozenlake dry_run=maybe", "dry_run=maybe: expected true or false"),
        (
            "env=frozenlake --cfg job",
            "a job is one run: python -m ragen_pl.fit shows its configuration",
        ),
        ("-m env=frozenlake seed=0,1", "submit the runs of a sweep one by one"),
        ("env=frozenlake ckpt_path=last", "ckpt_path=last: a job that is requeued"),
        ("env=frozenlake rollout.groups=oops", "rollout.groups=oops: expected a whole number"),
        ("env=frozenlake trainer.strategy=deepspeed", "DeepSpeed .* set trainer.strategy=fsdp2"),
        ("env=frozenlake", "sbatch is not on this machine's PATH; .* dry_run=true"),
    ],
)
def test_a_wrong_setting_is_one_line(words, expected, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["submit", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    err = capsys.readouterr().err
    assert re.search(expected, err) and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_every_preset_of_the_trainer_can_be_run():
    names = sorted(file.stem for file in (config_dir() / "trainer").glob("*.yaml"))
    assert names == [
        "default", "machines_ddp", "machines_fsdp2", "machines_hybrid", "one_machine", "one_machine_fsdp2",
    ]  # fmt: skip
    for name in names:
        cfg = composed("env=frozenlake", f"trainer={name}", "trainer.accelerator=cpu")
        assert cfg.trainer.max_starts == 3
    hybrid = composed("env=frozenlake", "trainer=machines_hybrid", "trainer.devices=4").trainer
    assert hybrid.strategy.shard_size == 4
    # a preset for eight GPUs may be run on several machines
    many = composed("env=frozenlake_visual", "experiment=gpus_8x80gb", "trainer=machines_hybrid")
    assert (many.trainer.num_nodes, many.trainer.max_epochs) == (2, 300)
