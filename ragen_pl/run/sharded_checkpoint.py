"""Checkpoints whose tensors are in a folder next to the file, where all ranks write their parts at once.

The file holds everything else and the folder's name. A save writes a new folder, then replaces the file, then removes
the old folder, so a run that is killed leaves a complete checkpoint. torch.distributed.checkpoint writes the folder and
reads it on any number of ranks.
"""

from __future__ import annotations

import functools
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
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
from torch.optim import Optimizer

from ragen_pl.config.errors import ConfigError
from ragen_pl.known_pickle import KnownUnpickler, by_name

SHARDS = "shards"
"""Entry of a checkpoint: name of the folder with its tensors."""

_SUFFIX = ".shards"
_WEIGHTS, _OPTIMIZERS = "weights", "optimizers"


def save_apart(checkpoint: dict[str, Any], file: Path, *, unique: str) -> None:
    """Write a checkpoint's tensors into a new folder and put its name in their place. All ranks must call it.

    Args:
        checkpoint: Checkpoint of Lightning's layout, with sharded tensors; changed in place.
        file: Where the checkpoint will be written.
        unique: Part of the folder's name, the same on all ranks and another at each save.
    """
    checkpoint[SHARDS] = f"{file.name}.{unique}{_SUFFIX}"
    tensors = dict(_taken(checkpoint))
    folder = file.parent / checkpoint[SHARDS]
    dcp.save(tensors, checkpoint_id=folder)


def remove_apart(file: Path, *, but: str | None = None) -> None:
    """Remove the folders of a file's earlier checkpoints.

    Args:
        file: The checkpoint.
        but: Name of the folder that is kept.
    """
    for folder in file.parent.glob(f"{file.name}.*{_SUFFIX}"):
        if folder.name != but:
            shutil.rmtree(folder)


def _taken(checkpoint: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
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
            pickle.UnpicklingError: It is anything else.
        """
        with (Path(self.path) / ".metadata").open("rb") as file:
            listed = KnownUnpickler(file, _of_metadata()).load()
        if not isinstance(listed, Metadata) or not isinstance(listed.storage_data, dict):
            raise pickle.UnpicklingError(
                f"expected a list of tensors, found {type(listed).__name__}"
            )
        for entry in listed.storage_data.values():
            _plain_name(entry.relative_path)
        if listed.storage_meta is None:
            listed.storage_meta = StorageMeta()
        listed.storage_meta.load_id = self.load_id
        return listed


@functools.cache
def _of_metadata() -> dict[tuple[str, str], Any]:
    """Return what the list of tensors consists of."""
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


def _plain_name(name: object) -> str:
    """Return a name of a file or folder without a path.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"expected a name without a path, found {name!r}")
    return name


def read_apart(
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
    folder = file.parent / _plain_name(checkpoint[SHARDS])
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{file} keeps its tensors in the folder {folder.name}, which is not next to it; copy both"
        )
    reader = _Reader(folder)
    tensors = {
        name: _container(name, entry, layout or {}, device="cpu" if data else "meta")
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        and (optimizers or name.startswith(f"{_WEIGHTS}/"))
    }
    if data:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load(tensors, storage_reader=reader, no_dist=layout is None)
            except CheckpointException as error:
                raise ConfigError(
                    f"{file}: its tensors in the folder {folder.name} are damaged or no tensors; give another "
                    "checkpoint"
                ) from error
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
    """Reads and writes checkpoints for strategies that keep whole tensors; sharded ones are read too."""

    def load_checkpoint(self, path: Any, *arguments: Any, **settings: Any) -> dict[str, Any]:
        """Return a checkpoint with whole tensors."""
        return read_apart(super().load_checkpoint(path, *arguments, **settings), Path(path))
