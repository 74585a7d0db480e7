"""The template of an environment of one's own: what it writes passes its test and is trained as printed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs.module_process import run_module

from ragen_pl.config import ConfigError
from ragen_pl.environments.template import main, write

SHORT = (
    "logger=none", "callbacks.progress=null", "callbacks.plots=null", "trainer.max_epochs=1",
    "warm_start.steps=2", "warm_start.episodes=16", "warm_start.batch_size=8", "rollout.groups=2",
    "validation.episodes=4", "rollout.max_response_tokens=16",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--images",)], ids=["text", "images"])
def test_what_it_writes_passes_its_test_and_is_trained_as_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["my_shop", *options])
    printed = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    written = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.*")}
    assert written == {"my_shop.py", "conf/env/my_shop.yaml", "test_my_shop.py"}

    for name, added in (("test", ()), ("train", ("env.kwargs.cells=4", *SHORT))):
        program, option, module, *arguments = shlex.split(printed[name])
        assert (program, option) == ("python", "-m")
        code, output = run_module(module, [*arguments, *added], folder=tmp_path, timeout=600)
        assert code == 0, output[-3000:]
    (run,) = (tmp_path / "runs" / "my_shop").iterdir()
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["optimal_policy/success"] == 1.0


def test_its_test_fails_where_the_rules_are_broken(tmp_path: Path) -> None:
    write("my_shop", images=False, folder=tmp_path)
    module = tmp_path / "my_shop.py"
    module.write_text(module.read_text().replace("float(found), found", "0.0, found"))
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "test_my_shop"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "FAILED (failures=1)" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MyShop", "expected a name of a Python module, of small letters"),
        ("my-shop", "expected a name of a Python module"),
        ("../shop", "expected a name of a Python module"),
        ("class", "expected a name of a Python module"),
        ("bandit", "env=bandit is an environment of ragen_pl"),
        ("os", "Python has a module of this name"),
        ("random", "Python has a module of this name"),
        ("torch", "Python has a module of this name"),
    ],
)
def test_a_name_that_is_taken_or_none_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^NAME={name}: .*{message}"):
        write(name, images=False, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "test_my_shop.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"test_my_shop\.py exists"):
        write("my_shop", images=False, folder=tmp_path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]
