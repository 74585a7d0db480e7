"""A changed bit, a value that is not finite and a read error are found before a checkpoint is used, and named."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs.composing import evaluation_config
from torch import nn

from ragen_pl.assembly.weights import (
    check_resumable,
    load_bundle,
    load_initial_weights,
    read_checkpoint,
)
from ragen_pl.checkpoints.checkpoint_check import newest_whole, problem_of
from ragen_pl.checkpoints.folder import locate
from ragen_pl.checkpoints.rank_states import rank_states_in
from ragen_pl.checkpoints.sharded_checkpoint import (
    CheckpointFiles,
    folder_for,
    read_shards,
    remove_leftovers,
    remove_shards,
    save_shards,
    write_tensors,
)
from ragen_pl.config.errors import ConfigError
from ragen_pl.models.build import build_small_lm

# of torch, in a process that is the only one
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
# a value of each tensor, which no other one has
PLACES = {
    "state_dict.policy.first": 11.0,
    "state_dict.critic.second": 12.0,
    "optimizer_states.0.state.3.exp_avg": 13.0,
    "RolloutDataModule.buffers.0.ids": 14.0,
}


def tensor(place: str) -> torch.Tensor:
    return torch.full((5000,), PLACES[place])


def state() -> dict[str, object]:
    first, second, moment, ids = map(tensor, PLACES)
    return {
        "state_dict": {"policy.first": first, "critic.second": nn.Parameter(second)},
        "optimizer_states": [{"state": {3: {"exp_avg": moment, "step": 7}}}],
        "RolloutDataModule": {"buffers": [{"ids": ids}]},
        "loops": {},
    }


def flip(file: Path, place: str, *, bit: int) -> None:
    """Change one bit of a tensor in a file."""
    content, values = bytearray(file.read_bytes()), tensor(place).numpy().tobytes()
    start = content.index(values)
    content[start + len(values) // 2] ^= 1 << bit
    file.write_bytes(content)


@pytest.fixture
def last(tmp_path: Path) -> Path:
    """The last checkpoint of a run that has an earlier one too."""
    checkpoints = tmp_path / "frozenlake" / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints.parent / "config.yaml").touch()
    for name in ("earlier.ckpt", "last.ckpt"):
        write_tensors(state(), checkpoints / name)
    return checkpoints / "last.ckpt"


@pytest.mark.parametrize(("place", "bit"), [*zip(PLACES, (0, 3, 6, 7), strict=True)])
def test_a_changed_bit_of_any_tensor_is_found_and_the_earlier_checkpoint_taken(
    last: Path, tmp_path: Path, place: str, bit: int
) -> None:
    assert problem_of(last) is None
    flip(last, place, bit=bit)
    problem = f"{last} is damaged: {place} has changed since it was written"
    assert problem_of(last) == problem
    run = locate(
        root=str(tmp_path), name="frozenlake", run_dir=str(last.parents[1]), ckpt_path="last"
    )
    assert run.checkpoint == last.with_name("earlier.ckpt") and run.passed_over == problem
    with pytest.raises(ConfigError, match=f"^ckpt=x: .*{place} has changed .*; give another$"):
        read_checkpoint(last, source="ckpt=x", hint="give another")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint whose tensors are in its folder, with the state of a rank."""
    return write_sharded(tmp_path / "last.ckpt")


def write_sharded(file: Path) -> Path:
    checkpoint = state()
    folder = folder_for(file, unique="0123abcd")
    with rank_states_in(folder):
        save_shards(checkpoint, folder)
        torch.save(checkpoint.pop("RolloutDataModule"), folder / "samples_0.pt")
        CheckpointFiles().save_checkpoint(checkpoint, file)
    return file


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("state_dict.critic.second", "weights/critic.second"),
        ("optimizer_states.0.state.3.exp_avg", "optimizers/0/3/exp_avg"),
        ("RolloutDataModule.buffers.0.ids", "buffers.0.ids"),
    ],
)
def test_a_changed_bit_in_the_folder_of_a_sharded_checkpoint_is_found(
    sharded: Path, place: str, name: str
) -> None:
    assert problem_of(sharded) is None
    folder = folder_for(sharded, unique="0123abcd")
    (file,) = (
        one for one in folder.iterdir() if tensor(place).numpy().tobytes() in one.read_bytes()
    )
    flip(file, place, bit=4)
    damage = f"{file} is damaged: {name} has changed since it was written"
    assert problem_of(sharded) == damage
    # of several processes each checks what it reads
    assert problem_of(sharded, folders=False) is None
    if file.suffix == ".distcp":
        saved = torch.load(sharded, weights_only=True)
        with pytest.raises(ConfigError, match=f"{name} has changed since it was written"):
            read_shards(saved, sharded)


@pytest.mark.parametrize("name", ["best_my env", "best_größe", "success=0.50, a(1)", "@1[2]"])
def test_the_folder_of_a_checkpoint_of_any_name_is_found(tmp_path: Path, name: str) -> None:
    file = write_sharded(tmp_path / f"{name}.ckpt")
    assert problem_of(file) is None and newest_whole([file]) == file
    folder = folder_for(file, unique="0123abcd")
    remove_shards(file)
    assert problem_of(file) == f"the checkpoint's folder {folder} is not there"


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", ""])
def test_a_missing_part_of_a_folder_is_named(sharded: Path, name: str) -> None:
    """With a list of files or without, which an earlier version did not write."""
    folder = folder_for(sharded, unique="0123abcd")
    (folder / "files.json").unlink()
    if name:
        (folder / name).unlink()
    else:
        shutil.rmtree(folder)
    with pytest.raises(
        ConfigError, match=f"{name or folder.name}.*; (give another|copy both)$"
    ) as raised:
        read_checkpoint(sharded, source="ckpt=x", hint="give another")
    assert "\n" not in str(raised.value)


class Unreadable(io.FileIO):
    """A file that can be opened."""

    error: OSError

    def readinto(self, *_: object) -> int:
        raise self.error

    readall = read = readinto  # type: ignore[assignment]


@contextmanager
def unreadable(file: Path, number: int, *, times: float, late: bool = False) -> Iterator[None]:
    """Let a file not be read in the block: so many attempts end with an error, of opening it or later."""
    opened, left = Path.open, [times]

    def fails(path: Path, *arguments: Any, **settings: Any) -> Any:
        if path != file or left[0] <= 0:
            return opened(path, *arguments, **settings)
        left[0] -= 1
        error = OSError(number, os.strerror(number), *([str(path)] if not late else []))
        if not late:
            raise error
        stream = Unreadable(path)
        stream.error = error
        return io.BufferedReader(stream)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "open", fails)
        yield


ERRORS = [
    *((number, False) for number in (errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOENT)),
    (errno.EIO, True),
    (errno.ESTALE, True),
]
PARTS = ("last.ckpt", "__0_0.distcp", ".metadata", "files.json", "samples_0.pt")


@pytest.mark.parametrize("name", PARTS)
def test_a_file_that_cannot_be_read_is_named_and_condemns_no_other(
    sharded: Path, name: str
) -> None:
    folder = folder_for(sharded, unique="0123abcd")
    file = sharded if name == sharded.name else folder / name
    for number, late in ERRORS:
        # results are kept while a file stays as it is
        os.utime(file)
        with unreadable(file, number, times=math.inf, late=late):
            remove_leftovers(sharded.parent)
            assert problem_of(sharded) == f"{file} cannot be read ({os.strerror(number)})"
            # that of a rank's samples is read by the rank
            if name != "samples_0.pt":
                with pytest.raises(
                    ConfigError, match=f"{os.strerror(number)}.*; give another"
                ) as raised:
                    read_checkpoint(sharded, source="ckpt=x", hint="give another")
                assert str(file) in str(raised.value)
        # one error passes
        with unreadable(file, number, times=1, late=late):
            remove_leftovers(sharded.parent)
            assert problem_of(sharded) is None
        with unreadable(file, number, times=1, late=late):
            assert problem_of(sharded) is None
    assert folder.is_dir() and problem_of(sharded) is None


def test_a_last_checkpoint_that_is_not_found_at_once_is_no_reason_to_begin_anew(
    last: Path, tmp_path: Path
) -> None:
    settings = {"root": str(tmp_path), "name": "frozenlake", "run_dir": str(last.parents[1])}
    last.with_name("earlier.ckpt").unlink()
    for times in (1, math.inf):
        with unreadable(last, errno.ENOENT, times=times):
            assert locate(**settings, ckpt_path="last").checkpoint == last
    last.unlink()
    assert locate(**settings, ckpt_path="last").checkpoint is None


def test_a_folder_is_removed_by_a_file_alone_that_was_read_or_is_not_listed(sharded: Path) -> None:
    folder, content = folder_for(sharded, unique="0123abcd"), sharded.read_bytes()
    sharded.write_bytes(content[:100])
    remove_leftovers(sharded.parent)
    sharded.write_bytes(content)
    assert problem_of(sharded) is None
    write_tensors(state(), sharded)
    remove_leftovers(sharded.parent)
    assert not folder.exists()


def test_a_changed_bit_of_the_directory_is_found_or_changes_nothing(last: Path) -> None:
    """Of the directory of a zip archive zipfile and torch read different parts."""
    content, saved = last.read_bytes(), torch.load(last, weights_only=True)
    with zipfile.ZipFile(last) as archive:
        begin = archive.start_dir
    missed, found = [], 0
    # the first entry, and what follows the last one
    for place in (*range(begin, begin + 62), *range(len(content) - 98, len(content))):
        for bit in (0, 3, 5, 7):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            last.unlink()
            last.write_bytes(changed)
            problem = problem_of(last)
            if problem is not None:
                assert problem.startswith(f"{last} is damaged")
                found += 1
                continue
            read = read_checkpoint(last, source="ckpt=x", hint="give another")
            if not torch.equal(
                read["state_dict"]["policy.first"], saved["state_dict"]["policy.first"]
            ):
                missed.append((place, bit))
    assert not missed and found > 300


def test_a_changed_bit_of_the_list_of_tensors_is_found(sharded: Path) -> None:
    listed = folder_for(sharded, unique="0123abcd") / ".metadata"
    content = listed.read_bytes()
    for place in range(0, len(content), 40):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 7
        listed.write_bytes(changed)
        problem = f"{listed} is damaged: it has changed since it was written"
        assert problem_of(sharded) == problem_of(sharded, folders=False) == problem
        with pytest.raises(ConfigError, match=r"has changed since it was written; give another"):
            read_checkpoint(sharded, source="ckpt=x", hint="give another")
    # an earlier version wrote no digest of it
    listed.write_bytes(content)
    sizes = listed.with_name("files.json")
    known = json.loads(sizes.read_text())
    del known["sha256"]
    sizes.write_text(json.dumps(known))
    assert problem_of(sharded) is None and read_shards(torch.load(sharded), sharded)


class Trained(nn.Module):
    """Policy with a mask, which is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


class Models(nn.Module):
    """Policy and critic, as a run has them."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic = Trained(), Trained()

    optimizer_key = "optimizer"

    def record(self) -> dict[str, object]:
        """Return the settings of the optimizer, as a training module does."""
        names = [name for name, _ in self.named_parameters()]
        return {"class": "torch.optim.adam.Adam", "groups": [{"lr": 1.0}], "weights": [names]}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "entry",
    ["state_dict.policy.layer.weight", "state_dict.critic.layer.bias", "optimizer_states.0.state.1.exp_avg"],
)  # fmt: skip
def test_a_value_that_is_not_finite_is_blamed_on_the_file(
    tmp_path: Path, entry: str, value: float
) -> None:
    models, file = Models(), tmp_path / "some.ckpt"
    moments = {"exp_avg": torch.zeros(4), "step": torch.tensor(1.0)}
    saved = {
        "state_dict": models.state_dict(),
        "optimizer_states": [
            {"state": {1: moments}, "param_groups": [{"lr": 1.0, "params": [0, 1, 2, 3]}]}
        ],
        "loops": {},
    }
    write_tensors(saved, file)
    check_resumable(file, models)
    load_initial_weights(models, file, source="x")

    group, _, name = entry.partition(".")
    values = moments["exp_avg"] if group == "optimizer_states" else saved["state_dict"][name]
    values.view(-1)[-1] = value
    write_tensors(saved, file)
    text = f"its entry {entry} has NaN or infinite values; give another checkpoint"
    with pytest.raises(ConfigError) as raised:
        check_resumable(file, models)
    assert str(raised.value) == f"ckpt_path={file}: {text}"
    if group == "state_dict":
        with pytest.raises(ConfigError, match=f"^x: its entry {entry} has NaN"):
            load_initial_weights(models, file, source="x")


def test_a_folder_with_a_value_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    bundle = build_small_lm(text={"hidden_size": 32, "intermediate_size": 64})
    bundle.save(tmp_path)
    cfg = evaluation_config(f"ckpt={tmp_path}", "env=frozenlake", command="serve")
    load_bundle(cfg)
    name, weight = list(bundle.model.named_parameters())[3]
    weight.data.view(-1)[-1] = torch.nan
    bundle.save(tmp_path)
    with pytest.raises(ConfigError, match=f"its entry state_dict.{name} has NaN .*; give another"):
        load_bundle(cfg)
