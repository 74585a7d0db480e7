"""A vLLM server that a run starts on a free port of this machine and ends."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragen_pl.base.files import OwnFolder
from ragen_pl.engines.vllm.model import CPU_CACHE_BYTES, model_arguments, save_without_weights
from ragen_pl.engines.vllm.rules import is_installed
from ragen_pl.engines.vllm_server import access
from ragen_pl.engines.vllm_server.rules import NO_SERVER
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.checkpoint_weights import write_weights

_GPU_SHARE = 0.4
_ENDS_IN_S = 20.0
# Runs the command in its arguments, and ends it and all its processes when the pipe from the run closes, however the
# run ended.
_GUARD = """
import os, signal, subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGCHLD, lambda *_: server.poll() is None or os.killpg(0, signal.SIGKILL))
sys.stdin.read()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
server.terminate()
try:
    server.wait(15)
finally:
    os.killpg(0, signal.SIGKILL)
"""


class ServerProcess:
    """A vLLM server of a model on a free port of the loopback interface.

    Its log and its model's files are in a temporary folder. It answers requests with its key alone, which only the run
    knows: other users of the machine can't use it.

    Args:
        bundle: Model that it serves; its weights are not read.
        weights: Names and weights of its checkpoint.
        max_tokens: Longest prompt plus response.
        dtype: Type that it computes in.
        timeout_s: Longest wait until it answers, in seconds.
        settings: Other arguments of the server.
        python: Python of an environment with vLLM that runs it; None for this one.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ValueError: The server ended, or did not answer in time.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        weights: Iterable[tuple[str, Tensor]],
        *,
        max_tokens: int,
        dtype: torch.dtype,
        timeout_s: float,
        settings: Mapping[str, Any],
        python: str | None = None,
    ) -> None:
        if python is None and not is_installed():
            raise ModuleNotFoundError(NO_SERVER)
        self._folder = OwnFolder("ragen_vllm_server_")
        folder = self._folder.path
        save_without_weights(bundle, folder / "model")
        write_weights(weights, folder / "model")
        on_gpu = torch.cuda.is_available()
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.key = secrets.token_urlsafe(32)
        (folder / "access").mkdir()
        shutil.copy(access.__file__, folder / "access")
        arguments = {
            "model": str(folder / "model"),
            "host": "127.0.0.1",
            "port": port,
            "enable_scale_out": True,
            "enforce_eager": not on_gpu,
            "uvicorn_log_level": "warning",
            "middleware": "access.KeyRequired",
        }
        if on_gpu:
            arguments["gpu_memory_utilization"] = _GPU_SHARE
        else:
            arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
        arguments |= model_arguments(bundle, dtype=dtype, max_tokens=max_tokens, on_gpu=on_gpu)
        # a link to a virtual environment's Python is not resolved: it would be another one
        executable = (
            sys.executable if python is None else os.path.abspath(Path(python).expanduser())
        )
        command = [executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += _flags(arguments | dict(settings))
        self._log = folder / "server.log"
        environment = _environment(on_gpu=on_gpu, split=settings.get("tensor_parallel_size", 1) > 1)
        # not on the command line, which every user sees
        environment[access.KEY_VARIABLE] = self.key
        # another environment has other packages
        paths = [str(folder / "access"), "" if python else environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                guarded(command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait(timeout_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, timeout_s: float) -> None:
        last = time.monotonic() + timeout_s
        while time.monotonic() < last:
            if self._process.poll() is not None:
                raise ValueError(
                    f"rollout.engine.urls=[]: the vLLM server ended ({self._reason()}); set other rollout.engine."
                    "settings, or start servers yourself (docs/engines.md)"
                )
            if is_healthy(self.url, key=self.key):
                return
            time.sleep(0.2)
        raise ValueError(
            f"rollout.engine.timeout_s={timeout_s:g}: the vLLM server has not started by then; raise it"
        )

    def _reason(self) -> str:
        """Return the line of the log that says why the server ended."""
        lines = [
            line.strip() for line in self._log.read_text(errors="replace").splitlines() if line
        ]
        errors = [line for line in lines if "Error: " in line or "error: " in line]
        return (errors or lines or ["no output"])[-1][-300:]

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDS_IN_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.remove()


def guarded(command: Sequence[str]) -> list[str]:
    """Return the command that runs a server and ends it when its standard input closes.

    It has to be started with a pipe as its input, and as the first of a session.
    """
    return [sys.executable, "-c", _GUARD, *command]


def is_healthy(url: str, *, key: str | None = None) -> bool:
    """Return whether a server answers that it is ready.

    Args:
        url: Address.
        key: Key that it asks for; None for none.
    """
    # not by a proxy of the environment
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/health", headers=headers)
    with suppress(OSError), opener.open(request, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments as options of the command line."""
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        elif value is not None:
            yield f"--{option}"
            yield json.dumps(value) if isinstance(value, dict | list) else str(value)


def _environment(*, on_gpu: bool, split: bool) -> dict[str, str]:
    """Return the environment of a server: that of the run but for its place among ranks."""
    ranks = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "TORCHELASTIC_", "NODE_RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ranks)}
    added = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not on_gpu:
        added["TORCH_COMPILE_DISABLE"] = "1"
    if split and not on_gpu:
        # else each process of the server needs a NUMA node of its own (0.32)
        kept = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | kept
    return kept | added


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
