"""Where a run's folder is, and which checkpoint it goes on from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragen_pl.run.folder import Run, stop_sharing, locate, share_with_children


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.delenv("RAGEN_PL_RUN_DIR", raising=False)


@pytest.fixture
def find(tmp_path):
    """`locate` under a root of its own."""

    def found(*, run_dir: Path | None = None, ckpt_path: str | None = None) -> Run:
        given = None if run_dir is None else str(run_dir)
        return locate(root=str(tmp_path), name="lake", run_dir=given, ckpt_path=ckpt_path)

    return found


def started(folder: Path, *, checkpoint: bool = True) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").touch()
    if checkpoint:
        (folder / "checkpoints" / "last.ckpt").touch()
    return folder


def test_a_new_run_has_a_folder_named_after_the_time(find, tmp_path):
    run = find()
    assert run.folder.parent == tmp_path / "lake" and run.checkpoint is None
    assert run.checkpoints == run.folder / "checkpoints"
    assert run.warm_start == run.folder / "warm_start.pt"


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(find):
    folders = set()
    for _ in range(5):
        run = find()
        run.folder.mkdir(parents=True)
        folders.add(run.folder)
    assert len(folders) == 5


def test_a_folder_given_is_taken(find, tmp_path):
    run = find(run_dir=tmp_path / "mine")
    assert run == Run(tmp_path / "mine", None)


def test_a_relative_root_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = locate(root="runs", name="lake", run_dir=None, ckpt_path=None)
    assert run.folder.parent == tmp_path / "runs" / "lake"


def test_last_is_the_newest_run_of_this_name(find, tmp_path):
    started(tmp_path / "lake" / "2026-01-01_10-00-00")
    newest = started(tmp_path / "lake" / "2026-01-02_10-00-00")
    started(tmp_path / "other" / "2026-01-03_10-00-00")
    (tmp_path / "lake" / "2026-01-04_10-00-00").mkdir()  # never got as far as its config
    run = find(ckpt_path="last")
    assert run == Run(newest, newest / "checkpoints" / "last.ckpt")


def test_last_of_a_folder_given(find, tmp_path):
    started(tmp_path / "lake" / "2026-01-02_10-00-00")
    mine = started(tmp_path / "mine")
    assert find(run_dir=mine, ckpt_path="last").checkpoint == mine / "checkpoints" / "last.ckpt"


def test_last_of_a_run_without_a_checkpoint_begins_anew_in_its_folder(find, tmp_path):
    mine = started(tmp_path / "mine", checkpoint=False)
    assert find(run_dir=mine, ckpt_path="last") == Run(mine, None)


def test_a_checkpoint_given_goes_on_in_its_own_run(find, tmp_path):
    mine = started(tmp_path / "mine")
    file = mine / "checkpoints" / "iteration_0010.ckpt"
    file.touch()
    assert find(ckpt_path=str(file)) == Run(mine, file)
    assert find(run_dir=tmp_path / "branch", ckpt_path=str(file)) == Run(tmp_path / "branch", file)


def test_a_checkpoint_beside_its_runs_config_goes_on_in_that_run(find, tmp_path):
    run = tmp_path / "lake" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "good.ckpt").touch()
    assert find(ckpt_path=str(run / "good.ckpt")).folder == run


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"ckpt_path": "last"}, "there is no run in .*lake; start one without ckpt_path"),
        ({"ckpt_path": "gone.ckpt"}, r"ckpt_path=gone\.ckpt: there is no such file"),
        (
            {"run_dir": Path("empty"), "ckpt_path": "last"},
            r"holds no run; give paths\.run_dir of one",
        ),
    ],
)
def test_what_is_not_there_is_said(find, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=said):
        find(**arguments)


def test_ranks_started_by_a_run_use_its_folder(find, tmp_path):
    folder = started(tmp_path / "lake" / "2026-01-01_10-00-00", checkpoint=False)
    share_with_children(folder)
    try:
        assert os.environ["RAGEN_PL_RUN_DIR"] == str(folder)
        assert find() == Run(folder, None)
        (folder / "checkpoints" / "last.ckpt").touch()
        started(tmp_path / "lake" / "2026-01-02_10-00-00")  # another run that began meanwhile
        assert find(ckpt_path="last") == Run(folder, folder / "checkpoints" / "last.ckpt")
    finally:
        stop_sharing()
    assert find().folder != folder
