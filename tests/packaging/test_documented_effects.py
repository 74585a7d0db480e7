"""What every command of the README and of docs/ says, the composed configuration has: tasks that are read, a warm start
that is enabled, settings that arrive where they are used. `test_documented_commands` runs those that need nothing else.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf
from support.runs import parsed_once  # noqa: F401
from support.runs.documents import PAGES, ROOT, blocks, commands, has_value, write_files

from ragen_pl.agent_programs.tasks import load_tasks
from ragen_pl.config import config_dir
from ragen_pl.config.composition import compose_accepted, group_names
from ragen_pl.config.main import combinations, options_first
from ragen_pl.config.overrides import key_of
from ragen_pl.config.references import Place, references_of_environment
from ragen_pl.config.relations import unread_overrides
from ragen_pl.evaluation.settings import resolve_settings

OF_A_RUN = ("evaluate", "play", "serve", "export")
COMPOSED = ("fit", *OF_A_RUN)
GROUPS = group_names(config_dir())
# nodes of a training run
ROOTS = (
    "env", "rollout", "context", "validation", "warm_start", "trainer", "optimizer", "algorithm", "learning_rate",
    "model",
)  # fmt: skip
_PLACES = ("env", "ckpt", "to")


@dataclass(frozen=True)
class Command:
    """A documented command that composes a configuration.

    Attributes:
        name: its module, without the package.
        words: its arguments.
    """

    name: str
    words: tuple[str, ...]

    @property
    def directory(self) -> str | None:
        """Folder of the user's own configuration."""
        places = [place for place, word in enumerate(self.words) if word == "--config-dir"]
        return self.words[places[0] + 1] if places else None

    @property
    def overrides(self) -> list[str]:
        """The overrides."""
        return [word for word in self.words if "=" in word and not word.startswith("-")]

    @property
    def may_lose_settings(self) -> bool:
        """Whether something may come after what it sets: a run's settings, or those of its environment."""
        keys = [key_of(line) for line in self.overrides]
        is_program = "env=program" in self.overrides
        of_run = self.name in OF_A_RUN and any(key not in _PLACES for key in keys)
        return of_run or is_program or "warm_start.weights" in keys


def of_page(page: Path) -> list[Command]:
    """Return the commands of a page that compose a configuration, without those that ask the shell for a path."""
    found = []
    for block in blocks(page):
        for line in commands(block.body) if block.language == "bash" else []:
            match = re.search(r"-m ragen_pl\.(\w+)\s(.*)", line)
            if match and match[1] in COMPOSED and "$(" not in match[2]:
                text = match[2].replace("CHECKOUT", str(ROOT))
                found.append(Command(match[1], tuple(shlex.split(text, comments=True))))
    return [command for command in dict.fromkeys(found) if command.may_lose_settings]


@functools.cache
def composed(name: str, overrides: tuple[str, ...], directory: str | None) -> DictConfig:
    return compose_accepted(name, list(overrides), directory=directory)[0]


@functools.cache
def references(target: str) -> Mapping[Place, str]:
    """Return the references in the shipped files of an environment's class."""
    return references_of_environment(target, [])


@functools.cache
def choices(overrides: tuple[str, ...]) -> dict[str, str]:
    """Return the options of the groups that a training command has."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("fit", overrides=list(overrides), return_hydra_config=True)
    return dict(cfg.hydra.runtime.choices)


def check_effects(command: Command) -> None:
    """Check that all that a command sets arrives."""
    for overrides in combinations(command.overrides):
        given = list(overrides)
        if command.name in OF_A_RUN:
            words = options_first([*(word for word in command.words if word not in given), *given])
            given = resolve_settings(get_args_parser().parse_args(words))
        cfg = composed(command.name, tuple(given), command.directory)
        for line in overrides:
            assert line.startswith("ckpt=") or has_value(cfg, line), line
        assert list(unread_overrides(cfg, overrides)) == []
        check_references(cfg, overrides)
        check_program(cfg, overrides)
        if command.name == "fit" and command.directory is None:
            check_groups(overrides)


def check_references(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Check that what refers to a setting of the environment has the value that the command gives."""
    keys = {key_of(line) for line in overrides}
    for place, text in references(cfg.env.target).items():
        key, named = ".".join(map(str, place)), text.strip("${}")
        if named in keys and key not in keys:
            assert OmegaConf.select(cfg, key) == OmegaConf.select(cfg, named), (key, named)


def check_program(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Check that the tasks of a program are read, and that its files are those that the page has."""
    kwargs = cfg.env.get("kwargs") or {}
    keys = {key_of(line) for line in overrides}
    if "env.tasks" in keys:
        tasks = load_tasks(kwargs.tasks)
        assert len(tasks) > 0
        if Path(kwargs.tasks).exists():
            assert tasks == [
                json.loads(line) for line in Path(kwargs.tasks).read_text().splitlines()
            ]
    if "env.command" in keys:
        assert all(Path(word).is_file() for word in kwargs.command if word.endswith(".py"))
    if "env.function" in keys:
        module, _, name = kwargs.function.rpartition(".")
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text())
        assert name in [getattr(node, "name", None) for node in tree.body]


def check_groups(overrides: Sequence[str]) -> None:
    """Check that the option of a group changes the configuration, unless it is the one without it."""
    for line in overrides:
        group = line.partition("=")[0]
        if group not in GROUPS or group == "env":
            continue
        others = tuple(other for other in overrides if not other.startswith(f"{group}="))
        # keys of the option are none without it
        plain = tuple(other for other in others if key_of(other).replace(".", "/") in GROUPS)
        if composed("fit", (*plain, line), None) == composed("fit", plain, None):
            is_chosen = choices(plain).get(group) == line.partition("=")[2]
            assert is_chosen, f"{line}: changes nothing"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with runs of the environments that commands name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "agents"))
    return tmp_path


def write_runs(found: Sequence[Command], folder: Path) -> None:
    """Write the files of the runs, without weights, that commands with `ckpt=last` or `best` use."""
    for command in found:
        names = [line.partition("=")[2] for line in command.overrides if line.startswith("env=")]
        name = names[0] if names else "frozenlake"
        run = folder / "runs" / name / "run"
        if command.name in OF_A_RUN and not run.exists():
            (run / "checkpoints").mkdir(parents=True)
            text = OmegaConf.to_yaml(composed("fit", (f"env={name}",), None), resolve=True)
            (run / "config.yaml").write_text(text)
            for kind in ("last", "best"):
                (run / "checkpoints" / f"{kind}.ckpt").touch()


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem) for page in PAGES if of_page(page)]
)
def test_documented_commands_have_their_effect(page: Path, folder: Path) -> None:
    for block in blocks(page):
        write_files(block, folder)
    found = of_page(page)
    write_runs(found, folder)
    for command in found:
        check_effects(command)
    importlib.invalidate_caches()


INLINE = re.compile(r"`'?((?:[+~]?[a-z_][\w./]*=[^`\s]+(?: |$)?)+[^`']*)'?`")


def test_settings_in_the_text_of_a_page_have_their_effect() -> None:
    """Those of agent programs, which are not in a block that is run. Many are composed at once."""
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / "agents.md").read_text(), flags=re.S)
    lines = [match[1].replace("\n", " ").replace("…", "x") for match in INLINE.finditer(text)]
    assert any(line.startswith("env.kwargs.variables={") for line in lines)
    assert any("warm_start.weights=" in line for line in lines)
    together: list[dict[str, str]] = []
    for line in dict.fromkeys(lines):
        words = [line] if "{" in line else [word for word in shlex.split(line) if "=" in word]
        # others are parameters of requests
        given = {key_of(word): word for word in words if key_of(word).split(".")[0] in ROOTS}
        place = next((one for one in together if not one.keys() & given.keys()), None)
        if place is None:
            together.append(place := {"env": "env=program", "env.command": "env.command=[a]"})
        place |= {key: word for key, word in given.items() if key not in ("env", "env.command")}
    assert len(together) < 8
    for found in together:
        cfg = composed("fit", tuple(found.values()), None)
        assert [word for word in found.values() if not has_value(cfg, word)] == []
        assert list(unread_overrides(cfg, list(found.values()))) == []
        check_groups([*found.values()])
