"""Transfer of weights to servers: the files that the first rank writes, and how servers on other machines get them."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from ragen_pl.base.files import OwnFolder
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.vllm_server.serving import WeightServer, write_manifest
from ragen_pl.engines.vllm_server.weights import (
    ServedAdapters,
    ServedWeights,
    WrittenAdapters,
    WrittenWeights,
)
from ragen_pl.models.adapters import write_adapters
from ragen_pl.models.checkpoint_weights import write_weights

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

TransferName = Literal["folder", "pull", "adapters"]
"""How weights get to servers: from a folder that they see, by HTTP, or the adapters alone in one of these ways."""


class WeightFolder:
    """Folder through which the first rank hands weights to servers.

    Args:
        bundle: Model, for the size of its weights.
        place: Folder that it is made in; None for shared memory with enough room, else that of temporary files.
        adapters: Whether adapters alone are written.
        server: Server of its files; None where the vLLM servers see them under the same path.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        place: str | None,
        *,
        adapters: bool = False,
        server: WeightServer | None = None,
    ) -> None:
        self._bundle, self._adapters, self._server = bundle, adapters, server
        chosen = Path(place or _room_for(bundle)).expanduser().absolute()
        # not world-readable: the servers are run by the same user
        self._folder = OwnFolder("ragen_weights_", place=chosen)
        self._run, self._loads = uuid.uuid4().hex[:12], 0

    @property
    def path(self) -> Path:
        """Path of the folder."""
        return self._folder.path

    def write(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> WrittenWeights:
        """Write weights and remove those before them.

        Raises:
            RolloutError: They can't be written.
        """
        folder = self.path / str(self._loads)
        shutil.rmtree(self.path / str(self._loads - 1), ignore_errors=True)
        self._loads += 1
        try:
            return self._write(weights, folder, f"{self._run}/{self._loads}/{version}")
        except OSError as error:
            raise RolloutError(
                f"rollout.engine.weights_folder: weights can't be written to {folder} ({error}); set another folder, "
                "which the servers see under the same path"
            ) from error

    def _write(
        self, weights: Iterable[tuple[str, Tensor]], folder: Path, label: str
    ) -> WrittenWeights:
        if self._adapters:
            write_adapters(self._bundle.model, weights, folder)
        else:
            write_weights(weights, folder)
        if self._server is None:
            written = WrittenAdapters if self._adapters else WrittenWeights
            return written(str(folder), label)
        write_manifest(folder, run=self._run, label=label)
        served = ServedAdapters if self._adapters else ServedWeights
        return served(str(folder), label, self._server.publish(folder))

    def remove(self) -> None:
        """Remove the folder."""
        self._folder.remove()


def _room_for(bundle: ModelBundle) -> str:
    """Return shared memory if a model's weights fit there, else the folder of temporary files."""
    size = sum(weight.numel() * weight.element_size() for weight in bundle.model.parameters())
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1.5 * size:
        return str(memory)
    return tempfile.gettempdir()
