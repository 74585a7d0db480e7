"""Checkpoints are whole whenever they exist, and what each rank has its own of is verified when it is read."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ragen_pl.base.distributed import packed_on_host
from ragen_pl.base.files import PARTIAL
from ragen_pl.checkpoints import rank_states
from ragen_pl.checkpoints.checkpoint_check import problem_of
from ragen_pl.checkpoints.rank_states import (
    RankStatesError,
    load_rank_states,
    rank_states_in,
    save_rank_states,
)
from ragen_pl.checkpoints.sharded_checkpoint import CheckpointFiles, folder_for, remove_leftovers

STATE = {"weights": torch.arange(1000.0), "step": 3}


class Witness:
    """Plain value that looks at a file while a checkpoint that holds it is written."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seen: list[object] = []

    def __reduce__(self):
        self.seen.append(torch.load(self.file)["step"] if self.file.exists() else None)
        return OrderedDict, ()


def test_the_earlier_checkpoint_is_there_until_the_new_one_is_whole(tmp_path):
    file = tmp_path / "checkpoints" / "last.ckpt"
    witness = Witness(file)
    CheckpointFiles().save_checkpoint(STATE | {"value": witness}, str(file))
    CheckpointFiles().save_checkpoint(STATE | {"step": 4, "value": witness}, str(file))
    assert witness.seen == [None, 3]
    saved = CheckpointFiles().load_checkpoint(str(file), weights_only=True)
    assert (saved["step"], saved["value"]) == (4, {}) and saved["weights"].equal(STATE["weights"])
    assert [path.name for path in file.parent.iterdir()] == ["last.ckpt"]


def test_the_disk_has_a_checkpoint_before_it_has_its_name(tmp_path, monkeypatch):
    file, events = tmp_path / "last.ckpt", []
    synchronize = os.fsync

    def note(descriptor: int) -> None:
        events.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, file.exists()))
        synchronize(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    CheckpointFiles().save_checkpoint(STATE, file)
    assert events == [(f"last.ckpt{PARTIAL}", False), (tmp_path.name, True)]


@pytest.fixture
def small_files():
    """Let files of this process have 64 kB at most, which is like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_earlier_checkpoint_and_names_the_folder(tmp_path, small_files):
    file = tmp_path / "last.ckpt"
    files = CheckpointFiles()
    files.save_checkpoint(STATE, file)
    with pytest.raises(OSError, match="MB are left on the disk of this folder") as raised:
        files.save_checkpoint({"weights": torch.zeros(2**16)}, file)
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(file)
    assert problem_of(file) is None and torch.load(file)["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.fixture
def as_rank(monkeypatch):
    """Return a function that lets this process pass for a rank of two; what it gathers is kept for the other one."""
    kept: dict[int, object] = {}

    def become(number: int) -> None:
        def gather(value: object) -> list[object]:
            kept[number] = value
            return [kept.get(rank) for rank in range(2)]

        monkeypatch.setattr(rank_states, "is_distributed", lambda: True)
        monkeypatch.setattr(rank_states, "rank", lambda: number)
        monkeypatch.setattr(rank_states, "gather_over_ranks", gather)

    return become


@pytest.fixture
def checkpoint(tmp_path, as_rank) -> Path:
    """A checkpoint of two ranks, each with a state of its own."""
    file = tmp_path / "last.ckpt"
    folder = folder_for(file, unique="0123abcd")
    with rank_states_in(folder):
        for number in (1, 0):
            as_rank(number)
            states = save_rank_states({"own": torch.full((5,), float(number))}, name="samples")
        CheckpointFiles().save_checkpoint({"loop": {"states": [states]}}, file)
    assert sorted(path.name for path in folder.iterdir()) == [
        "files.json", "samples_0.pt", "samples_1.pt",
    ]  # fmt: skip
    return file


def test_each_ranks_state_is_in_a_file_of_its_own(checkpoint):
    assert problem_of(checkpoint) is None
    # the file itself has their names alone
    assert not any(isinstance(value, torch.Tensor) for value in torch.load(checkpoint).values())
    (states,) = CheckpointFiles().load_checkpoint(checkpoint, weights_only=True)["loop"]["states"]
    assert len(states) == 2
    assert [float(states[number]["own"][0]) for number in (0, 1)] == [0.0, 1.0]


def test_a_changed_or_missing_state_is_found(checkpoint):
    part = folder_for(checkpoint, unique="0123abcd") / "samples_1.pt"
    content = part.read_bytes()
    part.write_bytes(content[:-64])
    assert problem_of(checkpoint) == f"{part} has {len(content) - 64} of {len(content)} bytes"
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    part.write_bytes(changed)
    saved = CheckpointFiles().load_checkpoint(checkpoint, weights_only=True)
    (states,) = saved["loop"]["states"]
    assert states[0] is not None
    with pytest.raises(RankStatesError, match=r"samples_1\.pt: is damaged or .* digest differs"):
        _ = states[1]
    part.unlink()
    with pytest.raises(RankStatesError, match="expected a file of"):
        _ = states[1]


def test_exchanged_states_are_found(checkpoint):
    first, second = sorted(folder_for(checkpoint, unique="0123abcd").glob("samples_*.pt"))
    content = first.read_bytes()
    assert len(content) == second.stat().st_size
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    (states,) = CheckpointFiles().load_checkpoint(checkpoint, weights_only=True)["loop"]["states"]
    for number in range(2):
        with pytest.raises(
            RankStatesError, match=rf"samples_{number}\.pt: is damaged or of another"
        ):
            _ = states[number]


def test_states_elsewhere_are_refused(checkpoint):
    saved = torch.load(checkpoint)
    (states,) = saved["loop"]["states"]
    for name in ("../other", "/etc", 3):
        torch.save({"loop": states | {"folder": name}}, checkpoint)
        with pytest.raises(RankStatesError, match="expected a name without a path"):
            CheckpointFiles().load_checkpoint(checkpoint, weights_only=True)


def test_a_checkpoint_is_removed_with_its_folder(checkpoint):
    CheckpointFiles().remove_checkpoint(checkpoint)
    assert list(checkpoint.parent.iterdir()) == []


def test_what_killed_runs_have_left_is_removed_and_no_more(checkpoint):
    folder = checkpoint.parent
    (folder / f"last.ckpt{PARTIAL}").write_bytes(b"cut")
    # the run was killed before it replaced the file
    folder_for(checkpoint, unique="ffffffff").mkdir()
    folder_for(folder / "gone.ckpt", unique="eeeeeeee").mkdir()
    (folder / "notes.txt").touch()
    remove_leftovers(folder)
    left = {path.name for path in folder.iterdir()}
    assert left == {"last.ckpt", "last.ckpt.0123abcd.shards", "notes.txt"}
    assert problem_of(checkpoint) is None


def test_without_a_folder_states_are_gathered():
    assert save_rank_states({"own": 1}, name="samples") == [{"own": 1}]
    assert load_rank_states({"states": [{"own": 1}]}, folder=Path()) == {"states": [{"own": 1}]}


@dataclass
class Nested:
    values: dict[str, torch.Tensor]


def test_gathered_tensors_are_moved_to_the_host():
    on_host = Nested({"a": torch.ones(2)})
    assert packed_on_host(on_host)
    # a tensor without values cannot be moved, and says so
    elsewhere = Nested({"a": torch.ones(2, device="meta")})
    with pytest.raises(NotImplementedError, match="meta"):
        packed_on_host(elsewhere)
