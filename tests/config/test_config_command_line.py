"""The command line: Hydra's options, errors in one line, no slow import before they are printed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAM = """
import sys
from ragen_pl.config import ConfigError, hydra_main

@hydra_main("small")
def main(cfg):
    heavy = {"torch", "transformers", "lightning"} & set(sys.modules)
    print("run", cfg.seed, cfg.env.name, "heavy" if heavy else "light")
    if cfg.seed == 13:
        raise ConfigError("seed=13: brings\\nbad luck")
    if cfg.seed == 14:
        raise RuntimeError("a fault of the program")

main()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def call(program: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(program), "--config-path", str(HERE / "conf"), *arguments],
        capture_output=True,
        text=True,
        cwd=program.parent,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), **env},
        timeout=600,
        check=False,
    )


def cpu_seconds() -> float:
    """Return the CPU time of this process's finished children, which other processes do not prolong."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed=abc"], "seed=abc: expected a whole number"),
        (
            ["trainer.max_epoch=3"],
            "unknown key trainer.max_epoch; did you mean trainer.max_epochs?",
        ),
        (["+sead=3"], "unknown key sead; did you mean seed?"),
        (["--foo"], "--foo: there is no such option; did you mean --info?"),
        (
            ["--nonsense=3"],
            "--nonsense=3: there is no such option; settings have no dashes: nonsense=3",
        ),
        (["--seed=1"], "--seed=1: there is no such option; settings have no dashes: seed=1"),
        (
            ["--max-epochs", "3"],
            "--max-epochs: there is no such option; settings have no dashes: trainer.max_epochs=…",
        ),
        (["--multi-run"], "--multi-run: there is no such option; did you mean --multirun?"),
        (["--config-dir"], "argument --config-dir/-cd: expected one argument; see --help"),
        (
            ["trainer={}"],
            "trainer={}: an empty mapping changes nothing of trainer; give keys, such as trainer.max_epochs=…",
        ),
        (
            ["trainer={max_epoch: 3}"],
            "unknown key trainer.max_epoch; did you mean trainer.max_epochs?",
        ),
        (
            ["environment=lakes"],
            "environment=lakes: no such option; did you mean lake? environment is one of bandit, lake",
        ),
        (["environment=null"], "environment=null: environment is one of bandit, lake"),
        (["wrld=lake"], "unknown key wrld"),
        (["+environment=nope"], "environment=nope: no such option"),
        (["ckpt_path=gone.ckpt"], "ckpt_path=gone.ckpt: expected a path that exists"),
        (["ckpt_path=~/gone.ckpt"], f"ckpt_path={Path.home()}/gone.ckpt: expected"),
        (["seed"], "seed: expected key=value; --help shows the keys"),
        (["runs/"], "runs/: expected key=value; --help shows the keys"),
        (["frozenlake"], "frozenlake: expected key=value; did you mean env=frozenlake?"),
        (["seed=["], "seed=[: expected key=value; quote a value with signs in it"),
        (["-m", "seed=1,2", "--cfg", "job"], "--cfg shows one configuration: leave out --multirun"),
        (["~sed"], "unknown key sed; did you mean seed?"),
        (["seed=1,2"], "add --multirun"),
        (["--multirun", "seed=1,2,x"], "seed=x: expected a whole number"),
        (["seed=13"], "seed=13: brings bad luck"),
    ],
)
def test_a_mistake_is_refused_in_one_line(
    program: Path, arguments: list[str], message: str
) -> None:
    before = cpu_seconds()
    done = call(program, *arguments)
    assert cpu_seconds() - before < 5
    assert done.returncode == 2
    assert done.stderr.startswith("ragen_pl: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "run" not in done.stdout or "13" in arguments[0]


def test_options_of_hydra_work(program: Path) -> None:
    assert call(program).stdout == "run 0 lake light\n"
    assert call(program, "environment=bandit", "seed=3").stdout == "run 3 bandit light\n"
    shown = call(program, "--cfg", "job", "seed=5")
    assert shown.returncode == 0
    assert "seed: 5" in shown.stdout
    assert "environment" in call(program, "--help").stdout
    swept = call(program, "-m", "seed=1,2", "environment=lake,bandit").stdout
    assert [line for line in swept.splitlines() if line.startswith("run")] == [
        f"run {seed} {name} light" for seed in (1, 2) for name in ("lake", "bandit")
    ]


def test_tracebacks_are_shown_on_request_and_for_errors_of_the_program(program: Path) -> None:
    assert "Traceback" in call(program, "seed=x", "debug=true").stderr
    assert "Traceback" in call(program, "seed=x", HYDRA_FULL_ERROR="1").stderr
    fault = call(program, "seed=14")
    assert fault.returncode == 1
    assert "a fault of the program" in fault.stderr
    assert "Traceback" in fault.stderr
