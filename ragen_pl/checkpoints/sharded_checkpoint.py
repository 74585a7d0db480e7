"""Checkpoint files: sharded tensors and the states of each rank.

    new folder -> list of its files -> new file, under another name -> renamed -> old folder removed

The file names the folder, so a run that is killed at any moment leaves a complete checkpoint. Sharded tensors are
written by torch.distributed.checkpoint, on all ranks at once, and read on any number of ranks.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future
from torch.optim import Optimizer

from ragen_pl.base.distributed import own_part
from ragen_pl.base.error_text import error_chain
from ragen_pl.base.files import PARTIAL, atomic_write
from ragen_pl.base.finite import first_non_finite
from ragen_pl.base.foreign_files import bare_pickle_problem
from ragen_pl.base.instances import instances
from ragen_pl.checkpoints.checkpoint_check import (
    DIGEST,
    FILES,
    LIST,
    item_is_whole,
    list_problem,
    names_folder,
)
from ragen_pl.checkpoints.rank_states import folder_of_states, load_rank_states, plain_name
from ragen_pl.config.errors import ConfigError

SHARDS = "shards"
"""Entry of a checkpoint: name of the folder with its tensors."""

_SUFFIX = ".shards"
_WEIGHTS, _OPTIMIZERS = "weights", "optimizers"
# bytes that calls in a list of tensors may copy, over its own
_COPIED = 16


def folder_for(file: Path, *, unique: str) -> Path:
    """Return a new folder of a checkpoint.

    Args:
        file: The checkpoint.
        unique: Eight hexadecimal digits, the same on all ranks and others at each save.
    """
    return file.with_name(f"{file.name}.{unique}{_SUFFIX}")


def save_shards(checkpoint: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint's tensors into its folder and put the name in their place. All ranks must call it.

    Args:
        checkpoint: Checkpoint of Lightning's layout, with sharded tensors; changed in place.
        folder: See `folder_for`.
    """
    checkpoint[SHARDS] = folder.name
    dcp.save(dict(_pop_tensors(checkpoint)), checkpoint_id=folder)


def remove_shards(file: Path, *, keep: str | None = None) -> None:
    """Remove the folders of a file's earlier checkpoints.

    Args:
        file: The checkpoint.
        keep: Name of the folder that is kept.
    """
    for folder in file.parent.glob(f"{glob.escape(file.name)}.*{_SUFFIX}"):
        if folder.name != keep:
            shutil.rmtree(folder)


def _pop_tensors(checkpoint: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Remove a checkpoint's tensors and yield them by name."""
    weights = checkpoint["state_dict"]
    checkpoint["state_dict"] = {}
    for name, value in weights.items():
        yield f"{_WEIGHTS}/{name}", value
    states = checkpoint.get("optimizer_states", [])
    for number, state in enumerate(states):
        rest = {}
        for weight, entry in state["state"].items():
            rest[weight] = {
                name: value for name, value in entry.items() if not isinstance(value, Tensor)
            }
            for name in entry.keys() - rest[weight].keys():
                yield f"{_OPTIMIZERS}/{number}/{weight}/{name}", entry[name]
        states[number] = {**state, "state": rest}


class _Reader(dcp.FileSystemReader):
    """Reader of a folder that somebody else may have written: its list of tensors is a pickle."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the list of tensors.

        Raises:
            OSError: A file is missing.
            pickle.UnpicklingError: It is anything else.
        """
        from ragen_pl.checkpoints.known_pickle import KnownUnpickler

        content = (Path(self.path) / LIST).read_bytes()
        if (problem := bare_pickle_problem(content, limit=_COPIED * len(content))) is not None:
            raise pickle.UnpicklingError(f"the list of tensors {problem}")
        listed = KnownUnpickler(io.BytesIO(content), _of_metadata()).load()
        if not isinstance(listed, Metadata) or not isinstance(listed.storage_data, dict):
            raise pickle.UnpicklingError(
                f"expected a list of tensors, found {type(listed).__name__}"
            )
        names = {plain_name(entry.relative_path) for entry in listed.storage_data.values()}
        chunks = sum(
            len(entry.chunks)
            for entry in instances(listed.state_dict_metadata.values(), TensorStorageMetadata)
        )
        needed = sum(entry.length for entry in listed.storage_data.values())
        found = sum((Path(self.path) / name).stat().st_size for name in names)
        if chunks > len(listed.storage_data) or needed > found:
            raise pickle.UnpicklingError("the list of tensors names parts more than once")
        if listed.storage_meta is None:
            listed.storage_meta = StorageMeta()
        listed.storage_meta.load_id = self.load_id
        return listed

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors, after a check that none has changed since it was written.

        Raises:
            ConfigError: One has.
        """
        for index in dict.fromkeys(item.storage_index for item in plan.items):
            place = self.storage_data[index]
            file = Path(self.path) / place.relative_path
            if not item_is_whole(file, offset=place.offset, length=place.length):
                raise ConfigError(
                    f"{file} is damaged: {index.fqn} has changed since it was written"
                )
        return super().read_data(plan, planner)


@functools.cache
def _of_metadata() -> dict[tuple[str, str], Any]:
    """Return the items of the list of tensors."""
    from ragen_pl.checkpoints.known_pickle import by_name

    types = {
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    }
    classes = (
        Metadata, TensorStorageMetadata, TensorProperties, ChunkStorageMetadata, BytesStorageMetadata, MetadataIndex,
        StorageMeta, _MEM_FORMAT_ENCODING, _StorageInfo, torch.Size, torch.serialization._get_layout,
    )  # fmt: skip
    paths = {(module, "PosixPath"): PosixPath for module in ("pathlib", "pathlib._local")}
    return by_name(classes) | types | paths


def read_shards(
    checkpoint: dict[str, Any],
    file: Path,
    *,
    layout: Mapping[str, Tensor] | None = None,
    optimizers: bool = True,
    data: bool = True,
) -> dict[str, Any]:
    """Put the tensors of a checkpoint's folder back in their places; any other checkpoint is returned as it is.

    Args:
        checkpoint: What the file holds.
        file: The file.
        layout: What tensors are sharded as, see `layout_of`; all ranks must call this together then. By default
            every process reads whole tensors for itself.
        optimizers: Whether to read the optimizers' states.
        data: Whether to read values; otherwise weights are on the meta device.

    Raises:
        FileNotFoundError: The folder is not there.
        ConfigError: Its tensors can't be read.
    """
    if SHARDS not in checkpoint:
        return checkpoint
    folder = file.parent / plain_name(checkpoint[SHARDS])
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{file} keeps its tensors in the folder {folder.name}, which is not next to it; copy both"
        )
    if (problem := list_problem(folder)) is not None:
        raise ConfigError(f"{file}: {problem}; give another checkpoint")
    reader = _Reader(folder)
    listed = reader.read_metadata().state_dict_metadata
    _check_sizes(listed, folder)
    tensors = {
        name: _container(name, entry, layout or {}, device="cpu" if data else "meta")
        for name, entry in listed.items()
        if isinstance(entry, TensorStorageMetadata)
        and (optimizers or name.startswith(f"{_WEIGHTS}/"))
    }
    if data:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load(tensors, storage_reader=reader, no_dist=layout is None)
            except CheckpointException as error:
                damage = f"its tensors in the folder {folder.name} are damaged or no tensors"
                for cause, _ in error.failures.values():
                    if isinstance(cause, ConfigError):
                        damage = str(cause)
                    elif isinstance(cause, OSError):
                        damage = f"{cause.filename} can't be read ({cause.strerror})"
                raise ConfigError(f"{file}: {damage}; give another checkpoint") from error
    states = [
        {**state, "state": {number: dict(entry) for number, entry in state["state"].items()}}
        for state in checkpoint.get("optimizer_states", [])
    ]
    weights = {}
    for name, tensor in tensors.items():
        kind, key = name.split("/", 1)
        if kind == _WEIGHTS:
            weights[key] = tensor
        else:
            number, weight, entry = key.split("/", 2)
            states[int(number)]["state"][int(weight)][entry] = tensor
    return {**checkpoint, "state_dict": weights} | ({"optimizer_states": states} if states else {})


def non_finite_entry(saved: Mapping[str, Any], parameters: Collection[str]) -> str | None:
    """Return the first entry of a checkpoint with NaN or an infinite value, None without one.

    Weights and states of optimizers are looked at, of sharded ones the part of this rank. Buffers may be infinite.

    Args:
        saved: The checkpoint, of Lightning's layout.
        parameters: Names of the module's weights that are no buffers.
    """
    weights = saved["state_dict"]
    tensors = {f"state_dict.{name}": weights[name] for name in weights if name in parameters}
    for number, optimizer in enumerate(saved.get("optimizer_states", [])):
        for weight, state in optimizer["state"].items():
            place = f"optimizer_states.{number}.state.{weight}"
            tensors |= {f"{place}.{name}": value for name, value in state.items()}
    return first_non_finite(
        {
            name: own_part(value)
            for name, value in tensors.items()
            if isinstance(value, Tensor) and not value.is_meta
        }
    )


def _check_sizes(listed: Mapping[str, Any], folder: Path) -> None:
    """Check that a folder has the bytes of the tensors that it lists: room is made for them before they are read.

    Raises:
        ValueError: It has fewer.
    """
    needed = sum(
        entry.size.numel() * entry.properties.dtype.itemsize
        for entry in instances(listed.values(), TensorStorageMetadata)
    )
    found = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if needed > found:
        raise ValueError(f"{folder} lists tensors of {needed} bytes and has {found}")


def layout_of(module: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return, for the entries of a folder, the present tensors that they are sharded as.

    Args:
        module: State of the module.
        optimizers: Optimizers, whose states are sharded as their weights.
    """
    layout = {f"{_WEIGHTS}/{name}": tensor for name, tensor in module.items()}
    for number, optimizer in enumerate(optimizers):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        layout |= {
            f"{_OPTIMIZERS}/{number}/{place}": weight for place, weight in enumerate(weights)
        }
    return layout


def _container(
    name: str, sizes: TensorStorageMetadata, layout: Mapping[str, Tensor], *, device: str
) -> Tensor:
    """Return an empty tensor for an entry of a folder."""
    like = layout.get(name if name.startswith(f"{_WEIGHTS}/") else name.rpartition("/")[0])
    dtype = sizes.properties.dtype
    if like is not None and like.shape == sizes.size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(sizes.size, dtype=dtype, device=device)


class CheckpointFiles(TorchCheckpointIO):
    """Reads and writes the files of checkpoints, with whole tensors; sharded ones are read too."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *_: Any, **__: Any) -> None:
        """Write a checkpoint beside its target and rename it once the disk has it.

        Raises:
            OSError: The disk is full, or may not be written to.
        """
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        folder = folder_of_states()
        if folder is not None and folder.is_dir():
            _list_files(folder)
        write_tensors(checkpoint, file)

    def load_checkpoint(self, path: Any, *arguments: Any, **settings: Any) -> dict[str, Any]:
        """Return a checkpoint with whole tensors."""
        file = Path(path)
        checkpoint = read_shards(super().load_checkpoint(path, *arguments, **settings), file)
        return dict(load_rank_states(checkpoint, folder=file.parent))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint with its folder."""
        super().remove_checkpoint(path)
        remove_shards(Path(path))


def write_tensors(state: Mapping[str, Any], file: Path) -> None:
    """Write a file of `torch.save` as a whole or not at all.

    Raises:
        OSError: The disk is full, or may not be written to.
    """
    try:
        with atomic_write(file, durable=True) as partial, partial.open("wb") as stream:
            torch.save(state, stream)
    except (RuntimeError, OSError) as error:
        # torch raises an error of its own on top of the disk's
        cause = next(iter(instances(error_chain(error), OSError)), None)
        if cause is None or cause.errno is None:
            raise
        free = shutil.disk_usage(file.parent).free >> 20
        text = f"{os.strerror(cause.errno)} ({free} MB are left on the disk of this folder)"
        raise OSError(cause.errno, text, str(file)) from error


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of killed runs among the checkpoints of a folder: unfinished files, folders without a file.

    A folder stays where its file can't be read: the next start may read it.
    """
    for partial in folder.glob(f"*{PARTIAL}"):
        partial.unlink(missing_ok=True)
    for apart in folder.glob(f"*{_SUFFIX}"):
        file = apart.with_name(apart.name.removesuffix(_SUFFIX).rpartition(".")[0])
        if names_folder(file, apart.name) is False:
            shutil.rmtree(apart, ignore_errors=True)


def _list_files(folder: Path) -> None:
    listed: dict[str, Any] = {
        file.name: file.stat().st_size for file in folder.iterdir() if file.name != FILES
    }
    if LIST in listed:
        listed[DIGEST] = hashlib.sha256((folder / LIST).read_bytes()).hexdigest()
    with atomic_write(folder / FILES, durable=True) as partial:
        partial.write_text(json.dumps(listed))
