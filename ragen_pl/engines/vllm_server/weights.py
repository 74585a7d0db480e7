"""Weights on their way to vLLM servers: the folder they are written to, their label, and the calls that load them."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.vllm_server.server import Failed, Refused, Server, Unavailable
from ragen_pl.files import OwnFolder
from ragen_pl.models.checkpoint_weights import write_weights

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

REPLACING = "replacing"
"""Label of a server while its weights are replaced, or while they have to be."""


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """Weights that servers can load.

    Attributes:
        folder: Their folder.
        label: `RUN/LOAD/VERSION`, the version of a server's weights when it has loaded them.
    """

    folder: str = ""
    label: str = ""

    def is_of_another_run(self, label: str) -> bool:
        """Return whether a label is one of a run, and not of this one."""
        return label.count("/") == 2 and label.partition("/")[0] != self.label.partition("/")[0]


class WeightFolder:
    """Folder through which the first rank hands weights to the servers.

    Args:
        bundle: Model, for the size of its weights.
        place: Folder that it is made in; None for shared memory with enough room, else that of temporary files.
    """

    def __init__(self, bundle: ModelBundle, place: str | None) -> None:
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
            write_weights(weights, folder)
        except OSError as error:
            raise RolloutError(
                f"rollout.engine.weights_folder: weights can't be written to {folder} ({error}); set another folder, "
                "which the servers see under the same path"
            ) from error
        return WrittenWeights(str(folder), f"{self._run}/{self._loads}/{version}")

    def remove(self) -> None:
        """Remove the folder."""
        self._folder.remove()


async def load(server: Server, weights: WrittenWeights, *, timeout_s: float) -> None:
    """Have a server load weights, which drops all that it has computed with older ones.

    Args:
        server: Server that is known to be able to serve the policy.
        weights: Weights.
        timeout_s: Longest wait for the load, in seconds.

    Raises:
        Refused: It can't load them.
        Trouble: It failed.
    """
    # requests that nobody waits for any more
    await server.call("POST", "/pause?mode=abort")
    await server.call("POST", "/update_weight_version", {"new_version": REPLACING})
    body = {"method": "reload_weights", "kwargs": {"weights_path": weights.folder}}
    try:
        await server.call("POST", "/collective_rpc", body, timeout_s=timeout_s)
    except Failed as error:
        if server.has_had_weights:
            raise
        raise Refused(
            f"rollout.engine.urls: {server.url} can't load the weights in {weights.folder} ({error}); start it "
            "again with the trainer's model; it has to see rollout.engine.weights_folder under the same path"
        ) from error
    reset = await server.call("POST", "/reset_prefix_cache")
    if reset != {"success": True}:
        raise Unavailable("it has kept the keys and values of other weights")
    await server.call("POST", "/reset_encoder_cache")
    await server.call("POST", "/update_weight_version", {"new_version": weights.label})
    await server.call("POST", "/resume")


async def label_of(server: Server, *, timeout_s: float | None = None) -> str:
    """Return the label of the weights that a server has.

    Args:
        server: Server.
        timeout_s: Longest wait, in seconds; None for that of other calls.

    Raises:
        Unavailable: It is no vLLM server.
        Trouble: It failed.
    """
    answer = await server.call("GET", "/weight_info", timeout_s=timeout_s)
    label = answer.get("weight_version") if isinstance(answer, dict) else None
    if not isinstance(label, str):
        raise Unavailable("it is no vLLM server")
    return label


async def distrust(server: Server) -> None:
    """Label a server's weights as ones to be replaced, which the first rank sees.

    Raises:
        Trouble: It failed.
    """
    await server.call("POST", "/update_weight_version", {"new_version": REPLACING})


def _room_for(bundle: ModelBundle) -> str:
    """Return shared memory if a model's weights fit there, else the folder of temporary files."""
    size = sum(weight.numel() * weight.element_size() for weight in bundle.model.parameters())
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1.5 * size:
        return str(memory)
    return tempfile.gettempdir()
