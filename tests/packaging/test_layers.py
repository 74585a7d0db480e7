"""Imports go downward only: each part of the package may use these others and no more."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = {"trajectory", "seeding", "distributed"}
MAY_IMPORT = {
    "trajectory": set(),
    "seeding": set(),
    "distributed": set(),
    "algorithms": {"trajectory"},
    "models": set(),
    "rollout": BASE | {"models"},
    "metrics": BASE,
    "data": BASE | {"algorithms", "rollout", "metrics", "models"},
    "modules": BASE | {"algorithms", "rollout", "metrics", "models", "data"},
    "loops": BASE,
    "callbacks": BASE | {"data", "metrics", "modules", "evaluation", "pages"},
    "evaluation/records": BASE,
    "evaluation/traces": set(),
    "pages": BASE | {"evaluation"},
    "playing": BASE | {"assemble", "config", "evaluation", "pages", "preflight", "rollout"},
    "evaluation/credit": BASE | {"data", "evaluation"},
    "config": set(),
    "runs": set(),
    "tracking": {"config"},
    "loggers": {"config", "tracking"},
    "probe": {"config", "rollout", "trajectory"},
    "doctor": {"config", "tracking"},
    "preflight": {"config", "runs", "tracking", "probe"},
}


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def files_of(part):
    folder = ROOT / "ragen_pl" / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_a_part_imports_only_what_lies_below_it(part):
    for file in files_of(part):
        for name in imported(file):
            top, _, rest = name.partition(".")
            if top != "ragen_pl" or not rest:
                continue
            other = rest.split(".")[0]
            assert other == part or other in MAY_IMPORT[part], f"{file.name} imports {name}"


def test_algorithms_import_nothing_but_torch():
    allowed = {
        "__future__",
        "collections",
        "dataclasses",
        "enum",
        "typing",
        "torch",
        "ragen_pl",
        "math",
    }
    found = {name.split(".")[0] for file in files_of("algorithms") for name in imported(file)}
    assert found <= allowed


@pytest.mark.parametrize("environments", ["envs", "visual_envs"])
def test_environments_know_nothing_of_the_trainer_nor_it_of_them(environments):
    assert not any(
        name.split(".")[0] == "ragen_pl"
        for file in (ROOT / environments).rglob("*.py")
        for name in imported(file)
    )
    assert not any(
        name.split(".")[0] == environments
        for file in (ROOT / "ragen_pl").rglob("*.py")
        for name in imported(file)
    )
