"""`locate`: a run's folder and the checkpoint that it continues from."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

from ragen_pl.checkpoints.checkpoint_check import problem_of
from ragen_pl.checkpoints.folder import Run, locate, make_time_stamped, sharing_with_children
from ragen_pl.tracking.mlflow_run import tracking_uri


@pytest.fixture(autouse=True)
def _no_shared_folder(monkeypatch):
    monkeypatch.delenv("RAGEN_PL_RUN_DIR", raising=False)


@pytest.fixture
def find(tmp_path):
    """`locate` for one environment under a temporary root."""

    def locate_run(*, run_dir: Path | None = None, ckpt_path: str | None = None) -> Run:
        given = None if run_dir is None else str(run_dir)
        return locate(root=str(tmp_path), name="frozenlake", run_dir=given, ckpt_path=ckpt_path)

    return locate_run


def make_run(folder: Path, *, checkpoint: bool = True) -> Path:
    """Make the files of a run that was interrupted."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").touch()
    if checkpoint:
        save(last(folder))
    return folder


def save(file: Path) -> None:
    """Write a file as checkpoints are written."""
    torch.save({"weight": torch.zeros(100)}, file)


def last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def test_a_new_run_has_a_folder_named_after_the_time(find, tmp_path):
    run = find()
    assert run.folder.parent == tmp_path / "frozenlake"
    assert run.checkpoint is None and not run.resumed
    assert run.checkpoints == run.folder / "checkpoints"
    assert run.warm_start == run.folder / "warm_start.pt"


def test_places_may_begin_with_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    new = locate(root="~/runs", name="frozenlake", run_dir=None, ckpt_path=None)
    assert new.folder.parent == tmp_path / "runs" / "frozenlake"
    run = make_run(tmp_path / "mine")
    given = locate(root="~/runs", name="frozenlake", run_dir="~/mine", ckpt_path="auto")
    assert (given.folder, given.checkpoint) == (run, last(run))
    path = "~/mine/checkpoints/last.ckpt"
    for run_dir, folder in ((None, run), ("~/other", tmp_path / "other")):
        found = locate(root="~/runs", name="frozenlake", run_dir=run_dir, ckpt_path=path)
        assert (found.folder, found.checkpoint) == (folder, last(run))
    assert tracking_uri("~/runs", uri=None).endswith(f"{tmp_path}/runs/mlflow.db")


def test_runs_started_in_the_same_second_have_different_folders(find):
    folders = set()
    for _ in range(5):
        run = find()
        run.folder.mkdir(parents=True)
        folders.add(run.folder)
    assert len(folders) == 5


def test_folders_made_in_the_same_second_are_different(tmp_path):
    made = [make_time_stamped(tmp_path / "evaluations") for _ in range(3)]
    assert len({*made}) == 3 and all(folder.is_dir() for folder in made)


def test_a_run_that_starts_has_made_its_folder(tmp_path):
    """Another one that starts before anything is written gets a folder of its own."""
    settings = {"root": str(tmp_path), "name": "lake", "run_dir": None, "ckpt_path": None}
    first, second = (locate(**settings, make=True) for _ in range(2))
    assert first.folder != second.folder and not first.has_started
    assert first.folder.is_dir() and second.folder.is_dir()


def test_run_dir_is_used_as_given(find, tmp_path):
    assert find(run_dir=tmp_path / "given") == Run(tmp_path / "given")


def test_a_relative_root_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = locate(root="runs", name="frozenlake", run_dir=None, ckpt_path=None)
    assert run.folder.parent == tmp_path / "runs" / "frozenlake"


def test_last_is_the_newest_run_of_this_name(find, tmp_path):
    make_run(tmp_path / "frozenlake" / "2026-01-01_10-00-00")
    newest = make_run(tmp_path / "frozenlake" / "2026-01-02_10-00-00")
    make_run(tmp_path / "other" / "2026-01-03_10-00-00")
    # stopped before its config was written
    (tmp_path / "frozenlake" / "2026-01-04_10-00-00").mkdir()
    assert find(ckpt_path="last") == Run(newest, last(newest), resumed=True)


def test_last_with_run_dir_is_that_run(find, tmp_path):
    make_run(tmp_path / "frozenlake" / "2026-01-02_10-00-00")
    given = make_run(tmp_path / "given")
    assert find(run_dir=given, ckpt_path="last").checkpoint == last(given)


def test_last_without_a_checkpoint_continues_from_the_warm_start(find, tmp_path):
    given = make_run(tmp_path / "given", checkpoint=False)
    assert find(run_dir=given, ckpt_path="last") == Run(given, None, resumed=True)


def test_auto_starts_a_run_in_an_unused_folder(find, tmp_path):
    given = tmp_path / "given"
    assert find(run_dir=given, ckpt_path="auto") == Run(given)
    # a refused run leaves its config
    make_run(given, checkpoint=False)
    assert find(run_dir=given, ckpt_path="auto") == Run(given)


@pytest.mark.parametrize("file", ["warm_start.pt", "warm_start.ckpt", "mlflow_run.json"])
def test_auto_continues_a_run_without_a_checkpoint(find, tmp_path, file):
    given = make_run(tmp_path / "given", checkpoint=False)
    (given / file).touch()
    assert find(run_dir=given, ckpt_path="auto") == Run(given, None, resumed=True)


def test_auto_continues_from_the_last_checkpoint(find, tmp_path):
    given = make_run(tmp_path / "given")
    assert find(run_dir=given, ckpt_path="auto") == Run(given, last(given), resumed=True)


def test_a_checkpoint_is_continued_in_its_run(find, tmp_path):
    given = make_run(tmp_path / "given")
    file = given / "checkpoints" / "iteration_0010.ckpt"
    save(file)
    assert find(ckpt_path=str(file)) == Run(given, file, resumed=True)
    branch = tmp_path / "branch"
    assert find(run_dir=branch, ckpt_path=str(file)) == Run(branch, file, resumed=True)


def test_a_checkpoint_beside_a_config_is_continued_in_that_folder(find, tmp_path):
    run = tmp_path / "frozenlake" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "good.ckpt").touch()
    assert find(ckpt_path=str(run / "good.ckpt")).folder == run


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"ckpt_path": "last"}, "there is no run in .*frozenlake; start one without ckpt_path"),
        ({"ckpt_path": "gone.ckpt"}, r"ckpt_path=gone\.ckpt: there is no such file"),
        (
            {"run_dir": Path("empty"), "ckpt_path": "last"},
            r"holds no run; set paths\.run_dir to a run's folder, or ckpt_path=auto",
        ),
        ({"ckpt_path": "auto"}, r"ckpt_path=auto: expected paths\.run_dir, the folder to"),
    ],
)
def test_a_missing_run_is_reported(find, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=message):
        find(**arguments)


def test_ranks_started_by_a_run_use_its_folder(find, tmp_path):
    folder = make_run(tmp_path / "frozenlake" / "2026-01-01_10-00-00", checkpoint=False)
    with sharing_with_children(folder):
        assert os.environ["RAGEN_PL_RUN_DIR"] == str(folder)
        assert find() == find(ckpt_path="auto") == Run(folder)
        save(last(folder))
        # another run that was started meanwhile
        make_run(tmp_path / "frozenlake" / "2026-01-02_10-00-00")
        assert find(ckpt_path="last") == Run(folder, last(folder), resumed=True)
    assert find().folder != folder


@pytest.mark.parametrize("damage", [b"", b"half", None], ids=["empty", "text", "cut"])
def test_a_damaged_last_checkpoint_is_passed_over(find, tmp_path, damage):
    given = make_run(tmp_path / "given")
    older, newer = (given / "checkpoints" / f"iteration_00{n}.ckpt" for n in (10, 20))
    for time, file in enumerate((older, newer, given / "checkpoints" / "best.ckpt")):
        save(file)
        os.utime(file, (time, time))
    (given / "checkpoints" / "best.ckpt").write_bytes(b"damaged too")
    file = last(given)
    file.write_bytes(file.read_bytes()[:-100] if damage is None else damage)
    run = find(run_dir=given, ckpt_path="auto")
    assert (run.checkpoint, run.resumed) == (newer, True)
    assert run.passed_over == f"{file} is damaged or no checkpoint"
    newer.unlink()
    assert find(run_dir=given, ckpt_path="last").checkpoint == older
    older.unlink()
    # nothing is whole: the check of a run refuses it
    assert find(run_dir=given, ckpt_path="auto").checkpoint == file


def test_a_checkpoint_with_values_written_over_is_not_whole(tmp_path):
    file = tmp_path / "a.ckpt"
    save(file)
    assert problem_of(file) is None
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        last_entry = archive.infolist()[-1]
    start = last_entry.header_offset
    file.write_bytes(content[:start] + bytes(64) + content[start + 64 :])
    assert problem_of(file) == f"{file} is damaged or no checkpoint"


def test_a_checkpoint_without_its_folder_is_not_whole(tmp_path):
    file = tmp_path / "a.ckpt"
    folder = tmp_path / "a.ckpt.0123abcd.shards"
    torch.save({"loops": {"folder": folder.name}}, file)
    assert problem_of(file) == f"the checkpoint's folder {folder} is not there"
    folder.mkdir()
    part = folder / "samples_1.pt"
    part.write_bytes(b"12345")
    (folder / "files.json").write_text('{"samples_1.pt": 9}')
    assert problem_of(file) == f"{part} has 5 of 9 bytes"
    (folder / "files.json").write_text('{"samples_1.pt": 5}')
    assert problem_of(file) is None
