"""Serves the present weights by HTTP to servers on other machines, which download them by `plugin`."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from ragen_pl.engines.vllm_server.plugin import digest

MANIFEST = "manifest.json"
_HASHED_AT_ONCE = 4


def write_manifest(folder: Path, *, run: str, label: str) -> None:
    """Write the names, sizes and SHA-256 digests of a folder's files beside them.

    Args:
        folder: Folder of weights.
        run: Name of the run.
        label: Label of the weights.

    Raises:
        OSError: The file can't be written.
    """
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        digests = list(pool.map(digest, paths))
    files = [
        {"name": path.name, "size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    ]
    manifest = {"run": run, "label": label, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


class WeightServer:
    """Serves the files of one folder, to who knows the token of this run. It is used in one event loop.

    A file is sent from any byte on, by the kernel.
    """

    def __init__(self) -> None:
        self._token = secrets.token_urlsafe(24)
        self._folder: Path | None = None
        application = web.Application()
        application.router.add_get("/{token}/{folder}/{name}", self._answer)
        self._runner = web.AppRunner(application, access_log=None)
        self.url: str | None = None
        """Its address, once it listens."""

    async def open(self, host: str, port: int) -> None:
        """Listen.

        Args:
            host: Address of this machine that the servers reach.
            port: Port; 0 for a free one.

        Raises:
            OSError: The address is not this machine's, or the port is taken.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        port = self._runner.addresses[0][1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def close(self) -> None:
        """Stop to listen."""
        await self._runner.cleanup()

    def publish(self, folder: Path) -> str:
        """Serve a folder in place of the one before; return the address of its manifest."""
        self._folder = folder
        return f"{self.url}/{self._token}/{folder.name}/{MANIFEST}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        parts, folder = request.match_info, self._folder
        if (
            folder is None
            or not hmac.compare_digest(parts["token"].encode(), self._token.encode())
            or parts["folder"] != folder.name
            or parts["name"] not in {path.name for path in folder.glob("*")}
        ):
            raise web.HTTPNotFound
        return web.FileResponse(folder / parts["name"])


async def serve(address: str | None, server: str) -> WeightServer:
    """Return an open server of weights.

    Args:
        address: `HOST:PORT` of this machine; None for the one by which it reaches a server, with a free port.
        server: Address of that server.

    Raises:
        ValueError: It can't be served there.
    """
    weights = WeightServer()
    try:
        host, port = (own_address(server), 0) if address is None else host_and_port(address)
        await weights.open(host, port)
    except OSError as error:
        await weights.close()
        raise ValueError(
            f"rollout.engine.serve_address={address or 'null'}: weights can't be served there ({error}); set HOST:PORT "
            "of the first rank's machine, with an address that the servers reach and a free port"
        ) from error
    return weights


def own_address(url: str) -> str:
    """Return the address of this machine by which it reaches a server.

    Raises:
        OSError: The server's name is unknown.
    """
    there = urlsplit(url)
    # an address is chosen, and nothing is sent
    family, kind, _, _, target = socket.getaddrinfo(
        there.hostname, there.port or 80, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        address: Any = probe.getsockname()
    return str(address[0])


def host_and_port(address: str) -> tuple[str, int]:
    """Split `HOST:PORT`.

    >>> host_and_port("10.0.0.1:9400")
    ('10.0.0.1', 9400)
    >>> host_and_port("[fd00::1]:9400")
    ('fd00::1', 9400)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
