"""The wheel, installed in an environment of its own and used from a stranger's folder.

The heavy dependencies are those of the running environment, put on the new one's path by a .pth file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = (
    "env=frozenlake", "callbacks.progress=null", "trainer.max_epochs=1", "warm_start.steps=2",
    "warm_start.episodes=8", "warm_start.batch_size=8", "rollout.groups=4", "validation.episodes=4",
)  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of the programs of an environment in which the wheel is installed."""
    place = tmp_path_factory.mktemp("installed")
    build = ("-m", "build", "--wheel", "--no-isolation", "-o", str(place), str(ROOT))
    subprocess.run([sys.executable, *build], capture_output=True, check=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    python = place / "venv" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    site = Path(done.stdout.strip())
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
    )
    subprocess.run([*pip, str(wheel)], capture_output=True, check=True)
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "dependencies.pth").write_text("\n".join(others))
    return python.parent


def call(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [program, *arguments],
        capture_output=True, text=True, cwd=cwd, check=False,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def own_package(folder: Path, name: str) -> None:
    """Write a package of the user's with a name that packages of the checkout have."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    text = (ROOT / "examples/own_environments/my_environments.py").read_text()
    (folder / name / "mine.py").write_text(text.replace("GuessTheNumber", "Sight"))


def test_fit_runs_outside_the_checkout(installed, tmp_path):
    own_package(tmp_path, "envs")
    own_package(tmp_path, "visual_envs")

    done = call(installed / "ragen-fit", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs" / "frozenlake").iterdir()
    assert json.loads((run / "metrics.json").read_text())["val/episodes"] == 4
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert (tmp_path / "runs" / "mlflow.db").exists()

    if (installed / "ragen-evaluate").exists():
        done = call(
            installed / "ragen-evaluate",
            "ckpt=last",
            "env=frozenlake",
            "validation.episodes=4",
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr

    own = (
        "env=custom",
        "env.target=envs.mine.Sight",
        "logger=none",
        "callbacks.plots=null",
        "validation.baselines=null",
        *TINY[1:],
    )
    done = call(installed / "ragen-fit", *own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_environment_is_registered_once_under_all_its_names(installed, tmp_path):
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import ragen_pl, envs.frozen_lake, ragen_pl.envs.frozen_lake as now, gymnasium\n"
        "assert envs.frozen_lake.FrozenLake is now.FrozenLake\n"
        "made = [gymnasium.make(f'{p}:ragen/FrozenLake-v0', disable_env_checker=True).unwrapped\n"
        "        for p in ('envs', 'ragen_pl.envs')]\n"
        "print({type(one) is now.FrozenLake for one in made})"
    )
    done = call(installed / "python", "-c", code, cwd=tmp_path)
    assert done.stdout == "{True}\n", done.stderr
    own_package(tmp_path, "envs")
    code = "import ragen_pl, envs.mine, ragen_pl.envs as now; print(envs.__file__, now.__file__)"
    done = call(installed / "python", "-c", code, cwd=tmp_path)
    theirs, ours = done.stdout.split()
    assert theirs == str(tmp_path / "envs" / "__init__.py") and "site-packages" in ours


def test_doctor_works_when_installed(installed, tmp_path):
    done = call(installed / "python", "-m", "ragen_pl.doctor", "--json", cwd=tmp_path)
    results = json.loads(done.stdout)
    assert results["configuration"]["found"].startswith(str(installed.parent))


def test_import_is_fast(installed, tmp_path):
    """The package itself in far less than the three seconds it may take; the algorithms load torch only."""
    code = "import time; t = time.process_time(); import ragen_pl; print(time.process_time() - t)"
    done = call(installed / "python", "-c", code, cwd=tmp_path)
    assert float(done.stdout) < 3
    code = (
        "import pkgutil, sys, importlib, ragen_pl.algorithms as a\n"
        "for one in pkgutil.walk_packages(a.__path__, a.__name__ + '.'): importlib.import_module(one.name)\n"
        "print(sorted({'transformers', 'lightning', 'hydra', 'mlflow'} & set(sys.modules)))"
    )
    done = call(installed / "python", "-c", code, cwd=tmp_path)
    assert done.stdout == "[]\n", done.stderr


def test_imports_are_not_collected(installed, tmp_path):
    code = (
        "import gc\n"
        "from ragen_pl.base.machine import collection_paused\n"
        "with collection_paused():\n"
        "    assert not gc.isenabled()\n"
        "    with collection_paused():\n"
        "        import torch\n"
        "    assert not gc.isenabled() and not gc.get_freeze_count()\n"
        "assert gc.isenabled()\n"
        "count = gc.get_freeze_count()\n"
        "with collection_paused():\n"
        "    values = [[number] for number in range(1000)]\n"
        "print(count > 10_000, gc.get_freeze_count() <= count)"
    )
    done = call(installed / "python", "-c", code, cwd=tmp_path)
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.parametrize("kind", ["command", "from Python"])
def test_a_process_that_has_imported_triton_ends_without_a_report_of_leaks(kind):
    """Lightning imports it. nanobind, with which it is made, would write thirty lines after a command's last one."""
    pytest.importorskip("triton")
    code = (
        "import atexit, sys\n"
        "from ragen_pl.base.machine import collection_paused, end_without_collection\n"
        f"if {kind == 'command'}:\n"
        "    atexit.register(end_without_collection)\n"
        "with collection_paused():\n"
        "    import triton._C.libtriton, torch\n"
        "print('last line', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == "last line\n"
