"""Weights that were written for vLLM servers: their label, and the calls by which a server takes them over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragen_pl.engines.vllm_server.plugin import ADAPTERS, folder_name
from ragen_pl.engines.vllm_server.server import (
    RefusedError,
    RequestFailedError,
    Server,
    UnavailableError,
)

REPLACING = "replacing"
"""Label of a server while its weights are replaced, or while they have to be."""


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """Weights in a folder that servers see under the same path.

    Attributes:
        folder: Their folder.
        label: `RUN/LOAD/VERSION`, the version of a server's weights when it has loaded them.
    """

    folder: str = ""
    label: str = ""

    @property
    def adapter(self) -> str | None:
        """Name of the adapters that requests ask for; None for the model's own weights."""
        return None

    def is_of_another_run(self, label: str) -> bool:
        """Return whether a label is one of a run, and not of this one."""
        return label.count("/") == 2 and label.partition("/")[0] != self.label.partition("/")[0]

    async def fetch(self, server: Server, *, timeout_s: float) -> None:
        """Have a server get what it needs, while it still has the weights before.

        Raises:
            ServerError: It failed.
        """

    async def replace(self, server: Server, *, timeout_s: float) -> None:
        """Have a paused server replace its weights by these.

        Raises:
            ServerError: It failed.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": self.folder}}
        await server.call("POST", "/collective_rpc", body, timeout_s=timeout_s)

    @property
    def remedy(self) -> str:
        """Remedy for a server that can't load the weights."""
        return "it has to see rollout.engine.weights_folder under the same path"


@dataclass(frozen=True, slots=True)
class ServedWeights(WrittenWeights):
    """Weights that servers download; see `plugin`.

    Attributes:
        url: Address of their manifest.
    """

    url: str = ""

    async def fetch(self, server: Server, *, timeout_s: float) -> None:
        """Have a server download the files."""
        await self._update(server, load=False, timeout_s=timeout_s)

    async def replace(self, server: Server, *, timeout_s: float) -> None:
        """Have a server load what it has downloaded."""
        await self._update(server, load=True, timeout_s=timeout_s)

    async def _update(self, server: Server, *, load: bool, timeout_s: float) -> None:
        body: dict[str, Any] = {"update_info": {"manifest": self.url, "load": load}}
        try:
            await server.call("POST", "/start_weight_update")
        except RequestFailedError:
            # one that was not finished, of a run that was killed
            await _call_ignoring_errors(server, "/finish_weight_update", {})
            await server.call("POST", "/start_weight_update")
        await server.call("POST", "/update_weights", body, timeout_s=timeout_s)
        await server.call("POST", "/finish_weight_update", {})

    @property
    def remedy(self) -> str:
        """Remedy for a server that can't load the weights."""
        return "its log has the reason"


@dataclass(frozen=True, slots=True)
class WrittenAdapters(WrittenWeights):
    """Adapters in a folder that servers see under the same path.

    Each version has a name of its own: keys and values are kept by that name.
    """

    @property
    def adapter(self) -> str:
        """Name of the adapters that requests ask for."""
        return _adapter_name(self.label)

    async def replace(self, server: Server, *, timeout_s: float) -> None:
        """Have a server load the adapters, and drop those before."""
        await _drop_adapters(server, self.adapter)
        body = {"lora_name": self.adapter, "lora_path": self.folder}
        await server.call("POST", "/v1/load_lora_adapter", body, timeout_s=timeout_s, is_json=False)


@dataclass(frozen=True, slots=True)
class ServedAdapters(ServedWeights):
    """Adapters that servers download; as `WrittenAdapters`."""

    @property
    def adapter(self) -> str:
        """Name of the adapters that requests ask for."""
        return _adapter_name(self.label)

    async def replace(self, server: Server, *, timeout_s: float) -> None:
        """Have a server load the adapters that it has downloaded, and drop those before."""
        await _drop_adapters(server, self.adapter)
        # a request with a new name loads its adapters
        body = {"model": self.adapter, "prompt": "", "add_special_tokens": False}
        await server.call("POST", "/tokenize", body, timeout_s=timeout_s)


def _adapter_name(label: str) -> str:
    return f"{ADAPTERS}{folder_name(label)}"


async def _drop_adapters(server: Server, name: str) -> None:
    """Have a server drop the adapters that it was given last, and stale ones of the next name."""
    for dropped in {server.adapter, name} - {None}:
        await _call_ignoring_errors(server, "/v1/unload_lora_adapter", {"lora_name": dropped})
    server.adapter = name


async def _call_ignoring_errors(server: Server, path: str, body: dict[str, Any]) -> None:
    """Make a call that a server refuses where there is nothing to do."""
    try:
        await server.call("POST", path, body, is_json=False)
    except RequestFailedError:
        return


async def load(server: Server, weights: WrittenWeights, *, timeout_s: float) -> None:
    """Have a server load weights, which drops all that it has computed with older ones.

    Args:
        server: Server that is known to be able to serve the policy.
        weights: Weights.
        timeout_s: Longest wait for each of fetching and loading them, in seconds.

    Raises:
        RefusedError: It can't load them.
        ServerError: It failed.
    """
    await weights.fetch(server, timeout_s=timeout_s)
    # requests that nobody waits for any more
    await server.call("POST", "/pause?mode=abort")
    await server.call("POST", "/update_weight_version", {"new_version": REPLACING})
    try:
        await weights.replace(server, timeout_s=timeout_s)
    except RequestFailedError as error:
        if server.has_had_weights:
            raise
        raise RefusedError(
            f"rollout.engine.urls: {server.url} can't load the weights in {weights.folder} ({error}); start it "
            f"again with the trainer's model; {weights.remedy}"
        ) from error
    reset = await server.call("POST", "/reset_prefix_cache")
    if reset != {"success": True}:
        raise UnavailableError("it has kept the keys and values of other weights")
    await server.call("POST", "/reset_encoder_cache")
    await server.call("POST", "/update_weight_version", {"new_version": weights.label})
    await server.call("POST", "/resume")


async def label_of(server: Server, *, timeout_s: float | None = None) -> str:
    """Return the label of the weights that a server has.

    Args:
        server: Server.
        timeout_s: Longest wait, in seconds; None for that of other calls.

    Raises:
        UnavailableError: It is no vLLM server.
        ServerError: It failed.
    """
    answer = await server.call("GET", "/weight_info", timeout_s=timeout_s)
    match answer:
        case {"weight_version": str(label)}:
            return label
    raise UnavailableError("it is no vLLM server")


async def mark_for_reload(server: Server) -> None:
    """Label a server's weights as ones to be replaced, which the first rank sees.

    Raises:
        ServerError: It failed.
    """
    await server.call("POST", "/update_weight_version", {"new_version": REPLACING})
