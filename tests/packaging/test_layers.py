"""Imports go downward only: each part may import the listed parts and no others. Files are short, and runs load few."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra.utils import get_class

from ragen_pl.base.former_names import MOVED
from ragen_pl.config.signatures import read_signature
from ragen_pl.modules.muon import MuonAdamW

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ragen_pl"
BASE = {"base", "trajectory"}
# of a rollout, from below
ROLLOUT = {"chat_formats", "models", "engines", "prompts", "environments", "rollout"}
LEARNING = ROLLOUT | {"algorithms", "checkpoints", "data", "loops", "metrics", "modules", "rewards"}
# A part is a folder of the package or a module beside the folders.
MAY_IMPORT = {
    "trajectory": set(),
    "base": {"trajectory"},
    # of no use to reinforcement learning alone
    "agent_programs": BASE,
    "chat_formats": BASE,
    "algorithms": BASE,
    "config": BASE,
    "models": BASE | {"chat_formats"},
    "engines": BASE | {"models"},
    "prompts": BASE | {"chat_formats", "engines", "models"},
    "environments": BASE | {"config", "prompts"},
    "rollout": BASE | ROLLOUT - {"rollout"},
    "rewards": BASE | ROLLOUT,
    "metrics": BASE | {"algorithms"},
    "checkpoints": BASE | {"config", "engines"},
    "data": BASE | ROLLOUT | {"algorithms", "checkpoints", "metrics", "rewards"},
    "modules": BASE | ROLLOUT | {"algorithms", "checkpoints", "data", "metrics"},
    "loops": BASE | {"checkpoints"},
    "viewing": BASE | {"checkpoints", "data", "metrics"},
    "callbacks": BASE | {"algorithms", "data", "loops", "metrics", "models", "modules", "viewing"},
    "ranks": BASE | {"checkpoints", "config", "engines", "loops"},
    "tracking": BASE | {"checkpoints", "config", "metrics", "viewing"},
    "assembly": BASE | LEARNING | {"config", "tracking"},
    "run": BASE | LEARNING | {"assembly", "callbacks", "config", "ranks", "tracking"},
    "memory": BASE | LEARNING | {"assembly", "callbacks", "config", "run"},
    "evaluation": BASE | LEARNING | {"assembly", "config", "run", "tracking", "viewing"},
    "replaying": BASE | LEARNING | {"assembly", "config", "run", "tracking"},
    "playing": BASE | LEARNING | {"assembly", "config", "evaluation", "run", "viewing"},
    "deployment": BASE | LEARNING | {"agent_programs", "assembly", "config", "evaluation", "run"},
    "slurm": BASE | {"checkpoints", "config"},
    "installation": BASE | {"config", "memory", "run", "tracking"},
    "api": {"base", "checkpoints", "config", "memory", "ranks", "run"},
    "audit": {"base", "config", "evaluation"},
    "compare": {"config", "evaluation"},
    "doctor": {"installation"},
    "evaluate": {"base", "config", "evaluation"},
    "export": {"base", "config", "evaluation"},
    "fit": {"api", "base", "config", "ranks"},
    "import_gguf": {"config", "models", "run"},
    "keys": {"config"},
    "new_environment": {"environments"},
    "page": {"base", "config", "viewing"},
    "play": {"base", "config", "evaluation", "playing"},
    "replay": {"base", "config", "replaying"},
    "serve": {"base", "config", "deployment", "evaluation"},
    "serve_environment": {"config", "environments"},
    "submit": {"slurm"},
    "sync": {"config", "tracking"},
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


def test_modules_beside_the_folders_are_short_commands():
    """But for the data that flows, and the function that trains."""
    others = {"__init__.py", "api.py", "trajectory.py"}
    commands = {file for file in PACKAGE.glob("*.py") if file.name not in others}
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values())
    assert named == {f"ragen_pl.{file.stem}:main" for file in commands}
    assert {file.name for file in commands if len(file.read_text().splitlines()) > 50} == set()


@pytest.mark.parametrize("former", MOVED)
def test_a_module_that_was_moved_has_its_former_name_too(former):
    now = import_module(f"ragen_pl.{MOVED[former]}")
    assert import_module(f"ragen_pl.{former}") is now
    assert now.__spec__.name == now.__name__ == f"ragen_pl.{MOVED[former]}"


def test_a_class_path_with_a_former_name_is_checked_and_built():
    former = "ragen_pl.muon.MuonAdamW"
    assert "lr" in read_signature(former).parameters
    assert get_class(former) is MuonAdamW


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
        "bisect",
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


def test_every_folder_has_tests_where_the_documents_say():
    table = (ROOT / "docs" / "contributing.md").read_text().partition("| `ragen_pl/` | tests |")[2]
    rows = [row.split("|")[1:3] for row in table.partition("\n\n")[0].splitlines()[2:]]
    elsewhere = {
        folder: re.findall(r"`tests/(\w+)`", tests)
        for folders, tests in rows
        for folder in re.findall(r"`(\w+)`", folders)
    }
    for folder in (path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()):
        for tests in elsewhere.get(folder, [folder]):
            assert list((ROOT / "tests" / tests).glob("test_*.py")), folder


# the main job, which then tells the files of its modules by name
LOADED = """
import json, pathlib, runpy, sys
file = sys.argv.pop(1)
runpy.run_module("ragen_pl.fit", run_name="__main__", alter_sys=True)
loaded = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
pathlib.Path(file).write_text(json.dumps(loaded))
"""
NOT_LOADED = (
    "aiohttp",
    "mlflow",
    "ragen_pl.agent_programs",
    "ragen_pl.algorithms.advantages.gigpo",
    "ragen_pl.algorithms.advantages.teacher_ratio",
    "ragen_pl.algorithms.echo",
    "ragen_pl.algorithms.order_statistics",
    "ragen_pl.chat_formats.tool_calls.parsing",
    "ragen_pl.checkpoints.known_pickle",
    "ragen_pl.checkpoints.pickle_outline",
    "ragen_pl.config.hydra_errors",
    "ragen_pl.config.trust",
    "ragen_pl.data.mixture",
    "ragen_pl.data.opponents",
    "ragen_pl.data.recorded_step",
    "ragen_pl.data.records",
    "ragen_pl.deployment",
    "ragen_pl.engines.in_process.static_step",
    "ragen_pl.engines.occlusion",
    "ragen_pl.engines.vllm",
    "ragen_pl.engines.vllm_server",
    "ragen_pl.base.restoring",
    "ragen_pl.environments.causes",
    "ragen_pl.environments.hosted",
    "ragen_pl.environments.hosting",
    "ragen_pl.environments.mixture",
    "ragen_pl.environments.process",
    "ragen_pl.envs.blackjack",
    "ragen_pl.envs.tools",
    "ragen_pl.evaluation.evaluator",
    "ragen_pl.memory.plan",
    "ragen_pl.metrics.importance",
    "ragen_pl.models.adapters",
    "ragen_pl.models.checkpoint_weights",
    "ragen_pl.models.positions",
    "ragen_pl.models.pretrained",
    "ragen_pl.modules.recording",
    "ragen_pl.playing",
    "ragen_pl.prompts.compaction",
    "ragen_pl.prompts.message_format",
    "ragen_pl.ranks.rank_hub",
    "ragen_pl.ranks.rank_limits",
    "ragen_pl.ranks.rank_watch",
    "ragen_pl.ranks.same_run",
    "ragen_pl.replaying",
    "ragen_pl.rollout.agreement",
    "ragen_pl.rollout.background",
    "ragen_pl.rollout.endpoint",
    "ragen_pl.run.strategy",
    "ragen_pl.slurm",
    "ragen_pl.tracking.mlflow_outbox",
    "vllm",
)


def test_the_main_job_loads_nothing_of_what_it_does_not_use(tmp_path):
    small = (
        "trainer.max_epochs=1", "warm_start.steps=1", "warm_start.episodes=8", "rollout.groups=2",
        "validation.episodes=2", f"paths.root={tmp_path}",
    )  # fmt: skip
    command = [sys.executable, "-c", LOADED, str(tmp_path / "loaded"), "env=frozenlake_visual"]
    done = subprocess.run([*command, *small], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads((tmp_path / "loaded").read_text())
    unused = [
        name for name in loaded if any(f"{name}.".startswith(f"{one}.") for one in NOT_LOADED)
    ]
    assert unused == []
    assert all(find_spec(name) for name in NOT_LOADED if name.startswith("ragen_pl."))
    own = {file for name, file in loaded.items() if name.partition(".")[0] == "ragen_pl" and file}
    # 44,744 lines now
    assert sum(len(Path(file).read_text().splitlines()) for file in own) < 44_800


def test_the_readme_names_every_folder():
    text = (ROOT / "README.md").read_text("utf-8")
    tree = text[text.index("\nragen_pl/ ") :]
    folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert {name for name in folders if f" {name}/" not in tree} == set()
