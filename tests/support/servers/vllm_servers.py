"""Servers of vLLM that tests start, freeze and kill. They end with the test's process, however that ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ragen_pl.engines.vllm_server.process import guarded, is_healthy

ROOT = Path(__file__).parents[3]
CACHE_BYTES = 2**26


def environment() -> dict[str, str]:
    """Return the environment of a process that runs vLLM on CPUs."""
    added = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    added |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    # else all servers of a machine compute on its first core
    return os.environ | added | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class UserServer:
    """A server of a model's folder, on a port of its own, as a user starts it.

    Args:
        folder: Folder of the model.
        flags: Further arguments.
        variables: Further variables of its environment.
    """

    def __init__(
        self, folder: Path, *flags: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.flags, self.variables = folder, flags, variables or {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder.with_name(f"{folder.name}-{self.port}.log")
        self.start()

    def start(self) -> None:
        """Start it, again after `kill`."""
        command = (
            f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {self.folder} --host 127.0.0.1 "
            f"--port {self.port} --max-model-len 2048 --no-enable-chunked-prefill --max-num-batched-tokens 4096 "
            f"--dtype float32 --enforce-eager --kv-cache-memory-bytes {CACHE_BYTES}"
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                guarded([*command.split(), *self.flags]),
                env=environment() | self.variables,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, *, seconds: float = 600) -> None:
        """Wait until it answers; end it if it does not."""
        last = time.monotonic() + seconds
        while time.monotonic() < last and self.process.poll() is None:
            if is_healthy(self.url):
                return
            time.sleep(0.2)
        self.kill()
        raise AssertionError(
            f"{self.url} has not started: {self.log.read_text(errors='replace')[-5000:]}"
        )

    def freeze(self) -> None:
        """Stop it where it is: it takes connections and answers nothing."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it with all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        # also closes its input
        self.process.communicate()
