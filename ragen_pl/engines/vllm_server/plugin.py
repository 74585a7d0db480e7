"""vLLM plug-in that downloads weights from a run by HTTP. Servers use it, so it imports nothing of ours.

`python -m ragen_pl.engines.vllm_server.plugin FOLDER` writes it to a folder for machines without ragen_pl. A server
whose `PYTHONPATH` has that folder takes `--weight-transfer-config '{"backend": "ragen_pull"}'`.

A file is downloaded once on a machine, whatever number of processes asks for it, and used when its size and its SHA-256
are those of the manifest. A transfer that breaks goes on where it was.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKEND = "ragen_pull"
"""Name of the weight transfer backend."""
FOLDER_VARIABLE = "RAGEN_PULL_FOLDER"
"""Environment variable with the folder of downloaded files; shared memory by default."""
ADAPTERS = "ragen-"
"""First part of the names of adapters."""
ATTEMPTS = 5
"""Attempts of a transfer that brings nothing new."""
_WRONG_DIGESTS = 2
PAUSE_S = 0.1
"""First pause before another attempt in seconds, doubled with each one."""
_BLOCK = 2**22
_ANSWERS_IN = 30.0
_USERS, _PARTIAL = "users", ".partial"


class TransferError(RuntimeError):
    """Weights could not be downloaded."""


class Downloads:
    """Downloaded files of the run whose weights this process loads.

    Each process holds a shared lock on the run's folder. Folders that no process holds are removed.

    Args:
        root: Folder of all runs; None for `RAGEN_PULL_FOLDER`, else shared memory.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or _root()
        self._run: Path | None = None
        self._release: weakref.finalize[Any, Any] | None = None

    def folder(self, url: str) -> Path:
        """Return the folder with all files of a manifest, which are downloaded if they are not there.

        Args:
            url: Address of the manifest; the files are beside it.

        Raises:
            TransferError: A file could not be downloaded, or is another one than the manifest says.
            OSError: The disk is full.
        """
        manifest = _manifest(url)
        self._use(self.root / _plain(manifest["run"]))
        assert self._run is not None
        with _locked(self._run / "lock"):
            folder = self._run / _plain(folder_name(manifest["label"]))
            for other in self._run.iterdir():
                if other.is_dir() and other != folder:
                    shutil.rmtree(other, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            for entry in manifest["files"]:
                _download(url.rpartition("/")[0], folder, entry)
        return folder

    def adapters(self, name: str) -> Path | None:
        """Return the folder of adapters that a process of this machine has downloaded; None if there is none."""
        label = name.removeprefix(ADAPTERS)
        folder = self.root / label.partition("-")[0] / label
        return folder if name.startswith(ADAPTERS) and "/" not in name and folder.exists() else None

    def _use(self, run: Path) -> None:
        """Hold a run's folder, and no other."""
        if self._run == run and run.exists():
            return
        self.close()
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in self.root.iterdir():
            if other != run:
                _remove_unused(other)
        while self._release is None:
            run.mkdir(mode=0o700, exist_ok=True)
            users = os.open(run / _USERS, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(users, fcntl.LOCK_SH)
            # not a folder that its last user has just removed
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(users), os.stat(run / _USERS)):
                    self._run = run
                    self._release = weakref.finalize(self, _release, users, run)
            if self._release is None:
                os.close(users)

    def close(self) -> None:
        """Let the run's folder go; the last process removes it."""
        if self._release is not None:
            self._release()
        self._run = self._release = None


def _release(users: int, run: Path) -> None:
    os.close(users)
    _remove_unused(run)


def folder_name(label: str) -> str:
    """Return the name of the folder for weights with a label."""
    return label.replace("/", "-")


def _root() -> Path:
    name = f"ragen_pull_{os.getuid()}"
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return Path(os.environ.get(FOLDER_VARIABLE) or place / name)


def _remove_unused(run: Path) -> None:
    with suppress(OSError), (run / _USERS).open("r+") as users:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(run, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _plain(name: str) -> str:
    """Return a name that is one part of a path.

    Raises:
        TransferError: It is not.
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise TransferError(f"a manifest with the name {name!r}")
    return name


def _open(url: str, first: int = 0) -> Any:
    """Return the answer with a file from its byte `first` on."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={first}-"} if first else {})
    # not by a proxy of the environment
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(urllib.request.Request(url, headers=headers), timeout=_ANSWERS_IN)


def _manifest(url: str) -> dict[str, Any]:
    failures = 0
    while True:
        try:
            with _open(url) as answer:
                manifest: dict[str, Any] = json.loads(answer.read())
            return manifest
        except (OSError, ValueError, http.client.HTTPException) as error:
            failures += 1
            if failures >= ATTEMPTS or isinstance(error, urllib.error.HTTPError):
                raise TransferError(f"no manifest from {_place(url)} ({error})") from error
            time.sleep(PAUSE_S * 2**failures)


def _download(place: str, folder: Path, entry: dict[str, Any]) -> None:
    """Download a file; it has its name when its digest is right.

    Raises:
        TransferError: The transfer brings nothing new any more, or the file is another one.
        OSError: The disk is full.
    """
    name, size = _plain(entry["name"]), int(entry["size"])
    path = folder / name
    if path.exists():
        return
    partial = folder / f"{name}{_PARTIAL}"
    failures = wrong = 0
    while True:
        before = _size(partial)
        reason = _append(f"{place}/{name}", partial, size)
        found = _size(partial)
        if found == size:
            if digest(partial) == entry["sha256"]:
                partial.replace(path)
                return
            reason = "its SHA-256 is not that of the manifest"
            partial.unlink()
            wrong += 1
        failures = 0 if found > before else failures + 1
        if failures >= ATTEMPTS or wrong >= _WRONG_DIGESTS:
            partial.unlink(missing_ok=True)
            raise TransferError(f"{name} from {_place(place)}: {reason}")
        if failures:
            time.sleep(PAUSE_S * 2**failures)


def _append(url: str, partial: Path, size: int) -> str:
    """Resume a download; return the error that stopped it, if any.

    Raises:
        OSError: The disk is full.
    """
    first = _size(partial)
    if first == size and partial.exists():
        return "it is complete"
    try:
        answer = _open(url, first)
    except (OSError, http.client.HTTPException) as error:
        return str(error)
    with answer, partial.open("ab" if answer.status == 206 else "wb") as file:
        while True:
            try:
                block = answer.read(_BLOCK)
            except (OSError, http.client.HTTPException) as error:
                return str(error)
            if not block:
                return f"it ended after {file.tell()} of {size} bytes"
            if file.tell() + len(block) > size:
                return f"it has more than {size} bytes"
            try:
                file.write(block)
                file.flush()
            except OSError:
                file.close()
                partial.unlink()
                raise


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _place(url: str) -> str:
    """Return an address without the token in its path."""
    return "/".join(url.split("/")[:3])


# ---- vLLM


def register() -> None:
    """Register the backend, and what finds downloaded adapters; vLLM calls it in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.lora.resolver import LoRAResolverRegistry

    # it may be installed, and in a folder of PYTHONPATH too
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())
        LoRAResolverRegistry.register_resolver(BACKEND, _resolver())


def _engine_class() -> type:
    import torch
    from safetensors import safe_open
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class NoInit(WeightTransferInitInfo):
        """Nothing has to be known before."""

    @dataclass
    class Manifest(WeightTransferUpdateInfo):
        """Where the weights are."""

        manifest: str
        load: bool
        """Whether they are loaded; else they are only downloaded."""

    class PullEngine(WeightTransferEngine):
        """Downloads weights and loads them in place."""

        init_info_cls, update_info_cls = NoInit, Manifest

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._downloads = Downloads()

        def init_transfer_engine(self, init_info: NoInit) -> None:
            """Do nothing."""

        def start_weight_update(self) -> None:
            """Do nothing: a download leaves the present weights alone."""

        def finish_weight_update(self) -> None:
            """Do nothing."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Download weights, and load them if that is asked for."""
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: Manifest) -> None:
            """As `update_weights`."""
            folder = self._downloads.folder(update_info.manifest)
            if not update_info.load:
                return
            from vllm.model_executor.model_loader.reload import (
                finalize_layerwise_reload,
                initialize_layerwise_reload,
            )

            initialize_layerwise_reload(self.model)
            self.model.load_weights(tensors(folder))
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Let the downloaded files go."""
            self._downloads.close()

    def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    yield name, file.get_tensor(name)

    return PullEngine


def _resolver() -> Any:
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver

    class Resolver(LoRAResolver):
        """Finds adapters that a process of this machine has downloaded."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            """Return them by their name; None for others."""
            folder = Downloads().adapters(lora_name)
            # vLLM gives it a number of its own
            return folder and LoRARequest(lora_name, 1, str(folder))

    return Resolver()


def write_package(folder: Path) -> None:
    """Write this module and its entry point to a folder of `PYTHONPATH`."""
    information = folder / f"{BACKEND}-1.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, folder / f"{BACKEND}.py")
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {BACKEND}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{BACKEND} = {BACKEND}:register\n"
    (information / "entry_points.txt").write_text(entry)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python -m ragen_pl.engines.vllm_server.plugin FOLDER")
    write_package(Path(sys.argv[1]))
