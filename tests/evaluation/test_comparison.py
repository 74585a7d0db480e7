"""`ragen_pl.compare`: episodes paired by seed, what is refused and why, and folders of somebody else."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.runs.called_commands import Result, caller
from support.servers.browser import record

from ragen_pl.base.records import write_records
from ragen_pl.evaluation.comparison import compare
from ragen_pl.evaluation.played import Question
from ragen_pl.viewing.validations import Outcome, write_validation

ENV = {
    "name": "lake", "target": "ragen_pl.envs:ragen/FrozenLake-v0", "kwargs": {"size": 4}, "max_turns": 10, "workers": 1,
    "held_out_fraction": None,
}  # fmt: skip
FAILED = {"status": "failed", "success": False}


def episode(seed: int, success: bool, changes: dict[str, Any]) -> Outcome:
    outcome: Any = {
        "group": seed, "member": 0, "seed": seed, "state": f"state {seed}", "status": "terminated", "success": success,
        "return": float(success), "turns": 4 - success, "response_tokens": 30,
    }  # fmt: skip
    outcome.update(changes)
    return outcome


def made_run(
    folder: Path,
    solved: Sequence[int],
    *,
    seed: int = 0,
    count: int = 20,
    iteration: int = 8,
    changes: dict[int, dict[str, Any]] | None = None,
    **env: Any,
) -> Path:
    """Write what a run has of one validation: the seeds that it solved, of `count`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"seed": seed, "env": ENV | env, "validation": {"held_out": True}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    changed = changes or {}
    write_validation(
        {
            "schema": 1,
            "iteration": iteration,
            "validation_set": "held_out",
            "cost": {
                "episodes": 64,
                "response_tokens": 5000,
                "seconds": 9.5,
                "processor_seconds": 7.25,
            },
            "episodes": [episode(n, n in solved, changed.get(n, {})) for n in range(count)],
        },
        folder,
    )
    return folder


@pytest.fixture
def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Return `python -m ragen_pl.compare` as a function of its arguments."""
    return functools.partial(caller(monkeypatch, capsys), "compare")


def test_episodes_are_paired_by_seed_and_costs_are_shown(
    tmp_path: Path, called: Callable[..., Result]
) -> None:
    a = made_run(tmp_path / "a", range(12))
    b = made_run(tmp_path / "b", range(8, 16), iteration=12)
    # other runs may write the episodes in another order
    file = b / "validations/held_out/iteration_0012.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"episodes": content["episodes"][::-1]}))
    done = called(f"run={a}", f"with={b}", f"to={tmp_path / 'out'}")
    assert done.code == 0, done.stderr
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written["only"][:2] == [8, 4] and written["episodes"] == written["states"] == 20
    success = written["metrics"]["success"]
    assert success["difference"]["value"] == pytest.approx(0.2)
    assert -0.2 < success["difference"]["low"] < 0.2 < success["difference"]["high"] < 0.6
    assert written["metrics"]["turns"]["difference"]["value"] == pytest.approx(-0.2)
    assert written["iterations"] == [[8], [12]]
    for text in (
        "+0.200 [",
        "Only run solved 8 episodes, only with 4",
        "One run on each side",
        "5,000",
    ):
        assert text in done.stdout
    markdown = (tmp_path / "out" / "comparison.md").read_text()
    assert "| success | 0.600 | 0.400 | +0.200 [" in markdown


def test_several_runs_have_their_interquartile_mean(tmp_path: Path) -> None:
    left = [made_run(tmp_path / f"a{n}", range(10 + 2 * (n == 4)), seed=n) for n in range(5)]
    right = [made_run(tmp_path / f"b{n}", range(6), seed=n) for n in range(5)]
    found = compare([*map(str, reversed(left))], [*map(str, right)], Question())
    assert found.metrics["success"].left.value == pytest.approx(0.5)
    assert found.metrics["success"].difference.value == pytest.approx(0.2)
    assert found.same_seeds and found.only is None
    assert found.sides[0] == [str(folder) for folder in left]
    assert not compare([*map(str, left)], [*map(str, right[:2])], Question()).same_seeds


def test_equal_results_have_an_interval_too(tmp_path: Path) -> None:
    sides = [[str(made_run(tmp_path / name, range(20)))] for name in "ab"]
    success = compare(*sides, Question()).metrics["success"]
    # each more state is drawn three times more often than the other, of 22
    assert (success.difference.low, success.difference.high) == pytest.approx((-3 / 22, 3 / 22))
    assert success.difference.value == 0.0
    # beside the one that it has failed in
    assert 0.8 < success.left.low < success.left.high == 1.0 == success.left.value


def test_failed_episodes_are_left_out_of_all_runs(tmp_path: Path) -> None:
    a = made_run(tmp_path / "a", range(10), changes={0: FAILED})
    b = made_run(tmp_path / "b", range(10), changes={1: FAILED})
    found = compare([str(a)], [str(b)], Question())
    assert (found.episodes, found.failed) == (18, 2)
    assert found.metrics["success"].difference.value == 0


def test_the_validation_is_chosen_by_its_number_or_its_success(tmp_path: Path) -> None:
    for name in "ab":
        for iteration, solved in ((0, 3), (4, 9), (8, 9), (12, 5)):
            made_run(tmp_path / name, range(solved), iteration=iteration)
    sides = [[str(tmp_path / name)] for name in "ab"]
    for which, expected in (("last", 12), ("best", 4), (8, 8)):
        assert compare(*sides, Question(which=which)).iterations == ([expected], [expected])  # type: ignore[arg-type]


def test_runs_of_a_mixture_are_compared_by_environment(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, range(9)) for name in "ab"]
    for share, run in enumerate(runs, 1):
        (run / "validations/held_out").rename(run / "validations/lake")
        lake = {**ENV, "share": share, "validation": {"held_out": True}}
        other = {**ENV, "max_turns": 9 + share, "validation": {"held_out": False}}
        env = {"name": "mixture", "environments": {"lake": lake, "other": other}}
        file = run / "config.yaml"
        # as JSON, which has no aliases
        file.write_text(json.dumps(yaml.safe_load(file.read_text()) | {"env": env}))
    # the episodes of an environment depend on its own settings alone
    found = compare([str(runs[0])], [str(runs[1])], Question(set="lake"))
    assert found.episodes == 20 and len(found.notes) == 1


def in_another_place(folder: Path) -> None:
    shutil.rmtree(folder / "validations")


def elsewhere(folder: Path) -> None:
    """Move the validations to a place outside of the run, behind a link."""
    shutil.move(folder / "validations", folder.parent / "elsewhere")
    (folder / "validations").symlink_to(folder.parent / "elsewhere")


def damaged(folder: Path) -> None:
    (folder / "validations/held_out/iteration_0008.json").write_text(
        '{"schema": 1, "episodes": [{}]}'
    )


def large(folder: Path) -> None:
    os.truncate(folder / "validations/held_out/iteration_0008.json", 1 << 27)


def twice(folder: Path) -> None:
    made_run(folder, [], changes={3: {"seed": 4, "group": 4}})


def of_two_seats(folder: Path) -> None:
    made_run(folder, [], changes={5: {"seed": 4}})


def not_held_out(folder: Path) -> None:
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("held_out: true", "held_out: false"))


def with_alias(folder: Path) -> None:
    (folder / "config.yaml").write_text("env: &a {x: 1}\nvalidation: *a\n")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda run: made_run(run, [], max_turns=4), "env.max_turns=10 and {run} 4, so they have played other"),
        (lambda run: made_run(run, [], kwargs={"size": 5}), "may_differ=[env.kwargs.size]"),
        (lambda run: made_run(run, [], target="\x1b[2J" + "x" * 900), "and {run} ?[2J" + "x" * 196 + "…, so they"),
        (lambda run: made_run(run, [], count=10), "{other} has 20 episodes and {run} 10, 10 of them with a seed"),
        (lambda run: made_run(run, [], changes={2: {"state": "x"}}), "the episodes of seed 2 begin in other states"),
        (lambda run: made_run(run, [], changes=dict.fromkeys(range(20), FAILED)), "each of the 20 episodes"),
        (not_held_out, "training may have used initial states of set=held_out; train with validation.held_out=true"),
        (in_another_place, "kept no validation of held_out in validations/; evaluate it: python -m ragen_pl.evaluate"),
        (elsewhere, "kept no validation of held_out"),
        (lambda run: made_run(run, [], changes={1: {"turns": 10**400}}), "episodes[1].turns=1000"),
        (lambda run: made_run(run, [], changes={1: {"return": math.nan}}), "[1].return=None: expected a number"),
        (damaged, "with={run}: {run}/validations/held_out/iteration_0008.json: iteration=None: expected a value; give"),
        (large, "larger than 67108864 bytes"),
        (twice, "seed 4 and member 0 are there twice"),
        (of_two_seats, "has an episode for each seat of a game, and a comparison takes episodes of one seat"),
        (with_alias, "has an alias (*a)"),
    ],
)  # fmt: skip
def test_what_is_refused(
    change: Callable[[Path], object], expected: str, tmp_path: Path, called: Callable[..., Result]
) -> None:
    other, run = made_run(tmp_path / "a", range(9)), made_run(tmp_path / "b", range(7))
    assert called(f"run={other}", f"with={run}").code == 0
    change(run)
    line = called(f"run={other}", f"with={run}").refused()
    assert expected.format(run=run, other=other) in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run={a}", "with={a}"), "{a}: it is named twice ({a}/validations/held_out/iteration_0008.json)"),
        (("run={a}", "with={b}", "which=5"), "which=5: run={a} has validations after 8 iterations"),
        (("run={a}", "with={b}", "set=big"), "kept no validation of big in validations/; it has set=held_out"),
        (("run={a}", "with={b}", "set=../held_out"), "set=../held_out: expected the name of a validation set"),
        (("run={a}", "with={b}", "may_differ=[env.max_turn]"), "no such setting; did you mean env.max_turns?"),
        (("run={root}", "with={b}"), "run={root}: neither the folder of a run (config.yaml) nor of an evaluation"),
        (("run={a}", "with=[]"), "with=[]: expected a folder"),
        (("run=null", "with={a}"), "run=[]: expected a folder"),
        (("run={a}",), "with has no value; set with=…"),
    ],
)  # fmt: skip
def test_what_is_asked_for_wrongly(
    arguments: tuple[str, ...], expected: str, tmp_path: Path, called: Callable[..., Result]
) -> None:
    places = {
        "a": made_run(tmp_path / "a", range(9)),
        "b": made_run(tmp_path / "b", []),
        "root": tmp_path,
    }
    line = called(*(one.format(**places) for one in arguments)).refused()
    assert expected.format(**places) in line


def test_a_setting_that_may_differ_and_states_of_training_are_named_in_notes(
    tmp_path: Path,
) -> None:
    a, b = made_run(tmp_path / "a", range(9)), made_run(tmp_path / "b", range(9), max_turns=4)
    for run in (a, b):
        not_held_out(run)
    question = Question(may_differ=["env.max_turns"], overlap=True)
    notes = compare([str(a)], [str(b)], question).notes
    assert "env.max_turns: 10 and 4." in notes
    assert "Training may have used some of the initial states." in notes


@pytest.mark.parametrize("policy", ["policy", "gpt"])
def test_a_note_says_that_an_api_has_characters_for_tokens(tmp_path: Path, policy: str) -> None:
    run, folder = made_run(tmp_path / "a", range(9)), tmp_path / "b"
    about = {"checkpoint": "x", "greedy": True, "samples": 1, "temperature": None, "truncation": {}}
    held_out = {
        "env": ENV,
        "key": "held_out",
        "options": None,
        "set_aside": 20,
        "initial_states": 20,
    }
    records = [record(n) | {"seed": n, "member": 0, "policy": policy} for n in range(20)]
    write_records(records, folder / "held_out")
    content = {"about": about, "validation_sets": {"held_out": held_out}}
    (folder / "evaluation.json").write_text(json.dumps(content))
    notes = compare([str(run)], [str(folder)], Question()).notes
    note = f"Response tokens of {folder} are characters: its model is behind an API."
    assert (note in notes) == (policy == "gpt")


def test_the_command_loads_no_torch(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a", range(9)), made_run(tmp_path / "b", range(7))
    program = (
        "import sys; from ragen_pl.compare import main; main(); "
        "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"run={a}", f"with={b}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
