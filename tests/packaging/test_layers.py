"""Imports go downward only: each part may import the listed parts and no others. Files are short."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ragen_pl"
BASE = {
    "access", "checked", "constraints", "distributed", "error_text", "files", "finite", "foreign_files", "json_text",
    "known_pickle", "phases", "rank_states", "rgb", "run_facts", "seeding", "settings_files", "stop_signals",
    "tensor_files", "trajectory",
}  # fmt: skip
# of a rollout, from below
ROLLOUT = {"prompt_formats", "models", "engines", "prompts", "environments", "rollout"}
LEARNING = ROLLOUT | {"algorithms", "data", "loops", "metrics", "modules", "rewards"}
# A part is a folder of the package or a module beside the folders.
MAY_IMPORT = {
    "access": set(),
    "checked": {"constraints"},
    "constraints": set(),
    "data_url": set(),
    "distributed": {"error_text"},
    "error_text": set(),
    "files": set(),
    "finite": set(),
    "foreign_files": set(),
    "former_names": set(),
    "json_text": set(),
    "known_pickle": set(),
    "machine": set(),
    "muon": set(),
    "phases": set(),
    "rgb": set(),
    "run_facts": set(),
    "seeding": set(),
    "settings_files": set(),
    "stop_signals": set(),
    "trajectory": set(),
    "optimizers": {"distributed", "muon"},
    "prompt_formats": {"trajectory"},
    "rank_states": {"distributed", "files", "tensor_files"},
    "tensor_files": {"foreign_files"},
    "algorithms": {"checked", "constraints", "run_facts", "trajectory"},
    "config": {"constraints", "error_text", "former_names", "run_facts"},
    "lock": {"config"},
    "models": {"checked", "constraints", "foreign_files", "prompt_formats", "rgb", "run_facts"},
    "engines": BASE | {"data_url", "models"},
    "prompts": BASE | {"engines", "models", "prompt_formats"},
    "environments": BASE | {"config", "data_url", "machine", "prompt_formats", "prompts"},
    "rollout": BASE | ROLLOUT - {"rollout"} | {"data_url", "machine"},
    "serving": BASE,
    "programs": BASE | {"serving"},
    "rewards": BASE | ROLLOUT,
    "metrics": BASE | {"algorithms", "prompt_formats"},
    "data": BASE | ROLLOUT | {"algorithms", "metrics", "rewards"},
    "modules": BASE | ROLLOUT | {"algorithms", "data", "metrics", "optimizers"},
    "loops": BASE,
    "viewing": BASE | {"data", "lock", "metrics"},
    "callbacks": BASE
    | {"algorithms", "data", "loops", "machine", "metrics", "models", "modules", "viewing"},
    "run": BASE
    | LEARNING
    | {"callbacks", "config", "former_names", "lock", "machine", "optimizers", "viewing"},
    "memory": BASE | LEARNING | {"callbacks", "config", "machine", "optimizers", "run"},
    "evaluation": BASE | LEARNING | {"config", "run", "viewing"},
    "playing": BASE | LEARNING | {"config", "evaluation", "run", "viewing"},
    "deployment": BASE | LEARNING | {"config", "evaluation", "run", "serving"},
    "api": {"config", "memory", "run", "stop_signals"},
    "audit": {"config", "evaluation"},
    "doctor": {"config", "machine", "memory", "run"},
    "evaluate": {"config", "evaluation"},
    "export": {"config", "evaluation"},
    "fit": {"api", "config", "run", "stop_signals"},
    "import_gguf": {"config", "models", "run"},
    "keys": {"config"},
    "new_environment": {"config"},
    "page": {"config", "foreign_files", "viewing"},
    "play": {"config", "evaluation", "playing"},
    "replay": {"config", "run"},
    "serve": {"config", "deployment", "evaluation"},
    "serve_environment": {"access", "config", "environments"},
    "submit": {"config", "run"},
    "sync": {"config", "run"},
    "watch": {"config", "viewing"},
}


def part_of(path):
    """Return the part of a module, given by its path below the package without suffix."""
    return path.split("/")[0]


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "ragen_pl":
            yield from (f"ragen_pl.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def files_of(part):
    modules = {file: file.relative_to(PACKAGE).with_suffix("") for file in PACKAGE.rglob("*.py")}
    return [file for file, path in modules.items() if part_of(path.as_posix()) == part]


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_part_imports_only_parts_below(part):
    assert files_of(part)
    for file in files_of(part):
        for name in imported(file):
            top, _, rest = name.partition(".")
            if top == "ragen_pl" and rest:
                other = part_of(rest.replace(".", "/"))
                assert other == part or other in MAY_IMPORT[part], f"{file.name} imports {name}"


def test_parts_have_no_circle():
    assert list(TopologicalSorter(MAY_IMPORT).static_order())


def test_every_module_belongs_to_a_part():
    assigned = {file for part in MAY_IMPORT for file in files_of(part)}
    assert set(PACKAGE.rglob("*.py")) - assigned == {PACKAGE / "__init__.py"}


def test_no_file_has_more_than_600_lines():
    folders = (
        PACKAGE,
        *(ROOT / name for name in ("envs", "visual_envs", "tests", "benchmarks", "examples")),
    )
    lengths = {
        file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines())
        for folder in folders
        for file in folder.rglob("*.py")
    }
    assert {name: lines for name, lines in lengths.items() if lines > 600} == {}


def test_algorithms_import_nothing_but_torch():
    allowed = {
        "__future__",
        "annotated_types",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "math",
        "ragen_pl",
        "torch",
        "typing",
    }
    packages = {name.split(".")[0] for file in files_of("algorithms") for name in imported(file)}
    assert packages <= allowed


@pytest.mark.parametrize("environments", ["envs", "visual_envs"])
def test_environments_and_trainer_do_not_import_each_other(environments):
    assert not any(
        name.split(".")[0] == "ragen_pl"
        for file in (ROOT / environments).rglob("*.py")
        for name in imported(file)
    )
    assert not any(
        name.split(".")[0] == environments
        for file in PACKAGE.rglob("*.py")
        for name in imported(file)
    )
