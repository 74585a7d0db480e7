"""Processes of a soak run: a double of a vLLM server, a server of environments, and the run's own processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from zlib import crc32

import numpy as np
import psutil
import torch
from support.models.tiny_models import TEXT
from support.runs.module_process import start_module
from support.runs.small_runs import TESTS, free_port
from support.servers.fake_vllm import Handler, Server

from ragen_pl.models.build import build_small_lm

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
PATHS = (TESTS, ROOT)
MOVES = ("Left", "Down", "Right", "Up")
SETTINGS = (
    "env=openenv",
    "env.kwargs.members=true",
    "env.kwargs.timeout_s=20",
    "env.process=true",
    "env.workers=4",
    "env.invalid_ends=false",
    "env.max_turns=2",
    "context.max_tokens=256",
    *(f"++model.build.text.{name}={value}" for name, value in TEXT.items()),
    "rollout.groups=2",
    "rollout.group_size=2",
    "rollout.num_envs=4",
    "rollout.max_response_tokens=24",
    "rollout/engine=vllm_server",
    "rollout.engine.probe_s=1",
    "rollout.engine.timeout_s=120",
    "update.epochs=1",
    "update.minibatches=2",
    "warm_start.enabled=false",
    "validation.episodes=4",
    "validation.baselines=null",
    "trainer.accelerator=cpu",
    "trainer.max_starts=null",
    "callbacks.progress=null",
    "ckpt_path=auto",
)
"""Overrides of a tiny run on both servers, whose environments are in processes of their own."""


class _Player(Handler):
    """Answers with a move, which the seed and the weights decide. A fiftieth of the answers has no form."""

    def inference_v1_generate(self, body: dict) -> tuple[int, object]:
        status, answer = super().inference_v1_generate(body)
        if status == 200:
            server: Player = self.server  # type: ignore[assignment]
            ids, logprobs = server.play(body["token_ids"], body["sampling_params"])
            choice = answer["choices"][0]
            choice["token_ids"], choice["finish_reason"] = ids, "stop"
            choice["logprobs"] = {"content": [{"logprob": one} for one in logprobs]}
            choice["weight_versions"][0]["end"] = len(ids)
        return status, answer


class Player(Server):
    """Double of a vLLM server with the run's model, which plays by chance, and otherwise with other weights."""

    def __init__(self, port: int = 0) -> None:
        bundle = build_small_lm(seed=0, text=TEXT)
        bundle.model.eval()
        self._loaded, self._digest = -1, 0
        self._model_lock = threading.Lock()
        super().__init__(bundle, port)
        self.RequestHandlerClass = _Player

    def play(self, prompt: list[int], parameters: dict) -> tuple[list[int], list[float]]:
        """Return the ids of an answer, and their log-probs by the weights that are loaded."""
        with self._model_lock, torch.inference_mode():
            if self._loaded != self.pushes:
                self._load()
            rng = np.random.default_rng([parameters["seed"], self._digest])
            text = f"<think>{rng.integers(10)}</think><answer>{MOVES[rng.integers(4)]}</answer>"
            if rng.random() < 0.02:
                text = "no idea"
            ids = self.bundle.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = [*ids[: parameters["max_tokens"] - 1], parameters["stop_token_ids"][0]]
            logits = self.bundle.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logits[:, [int(one) for one in parameters["logit_bias"]]] = -torch.inf
            # greedy where it is 0
            chosen = (logits / (parameters["temperature"] or 1.0)).log_softmax(-1)
            return ids, chosen[range(len(ids)), ids].tolist()

    def _load(self) -> None:
        _, unknown = self.bundle.model.load_state_dict(self.weights, strict=False)
        assert not unknown, unknown
        self._digest = 0
        for _, weight in sorted(self.weights.items()):
            self._digest = crc32(weight.numpy().tobytes(), self._digest)
        self._loaded = self.pushes


class PlayerService:
    """A vLLM double that is killed, frozen and started again at one address."""

    def __init__(self) -> None:
        self.server = Player()
        self.url, self._port = self.server.url, self.server.server_port

    def kill(self) -> None:
        """End it with all connections; its weights are lost."""
        self.server.die()

    def start(self) -> None:
        """Start it again, without weights."""
        self.server = Player(self._port)

    def freeze(self) -> None:
        """Let it answer nothing."""
        self.server.runs.clear()

    def thaw(self) -> None:
        """Let it answer."""
        self.server.runs.set()


class EnvironmentService:
    """`python -m ragen_pl.serve_environment` that is killed, frozen and started again at one address.

    Args:
        folder: Of its output.
    """

    def __init__(self, folder: Path) -> None:
        self._port, self._folder = free_port(), folder
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [
            sys.executable, "-m", "ragen_pl.serve_environment", "env=frozenlake", "env.kwargs.min_distance=1",
            f"server.port={self._port}",
        ]  # fmt: skip
        with (self._folder / "environments.txt").open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=self._folder, env=variables(), stdout=output, stderr=output
            )
        last = time.monotonic() + LIMIT_S
        while time.monotonic() < last:
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.1)
        raise TimeoutError(f"the environments do not answer; see {self._folder}/environments.txt")

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop it."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)


def variables() -> dict[str, str]:
    """Return the environment variables of a process."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


class Ranks:
    """Ranks of `python -m ragen_pl.fit`, started from outside as torchrun does it.

    Args:
        overrides: Of all ranks.
        folder: Working folder, with the output of each rank.
        count: Number of ranks.
        name: First part of the names of the outputs.
        forked: Whether they are forks of a process that has imported the heavy packages. A start then takes seconds,
            and the memory of a rank is not its own.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        *,
        folder: Path,
        count: int = 1,
        name: str = "start",
        forked: bool = False,
    ) -> None:
        port = str(free_port())
        self.outputs = [folder / f"{name}_rank_{rank}.txt" for rank in range(count)]
        self.processes: list[psutil.Process] = []
        self._code_of: list[Callable[[], int | None]] = []
        for rank, output in enumerate(self.outputs):
            place = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            }  # fmt: skip
            environment = variables() | (place if count > 1 else {})
            start = self._fork if forked else self._start
            start(overrides, folder, output, environment)

    def _fork(
        self, overrides: Sequence[str], folder: Path, output: Path, environment: dict[str, str]
    ) -> None:
        process = start_module(
            "ragen_pl.fit",
            overrides,
            folder=folder,
            output=output,
            paths=PATHS,
            environment=environment,
        )
        self.processes.append(psutil.Process(process.pid))
        self._code_of.append(lambda: process.exitcode)

    def _start(
        self, overrides: Sequence[str], folder: Path, output: Path, environment: dict[str, str]
    ) -> None:
        with output.open("ab") as file:
            process = psutil.Popen(
                [sys.executable, "-m", "ragen_pl.fit", *overrides],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.processes.append(process)
        self._code_of.append(process.poll)

    @property
    def codes(self) -> list[int | None]:
        """Exit codes; None for a rank that runs."""
        return [code() for code in self._code_of]

    def join(self, *, limit_s: float) -> list[int]:
        """Wait until all have ended, and return their exit codes. After the limit they are killed."""
        last = time.monotonic() + limit_s
        while None in self.codes:
            if time.monotonic() > last:
                self.kill()
                raise TimeoutError(f"ranks have not ended in {limit_s:g} s:\n{self.tail()}")
            time.sleep(0.1)
        return [int(code) for code in self.codes if code is not None]

    def kill(self) -> None:
        """Kill all that still run, and wait for their end."""
        for process, code in zip(self.processes, self._code_of, strict=True):
            if code() is None:
                process.kill()
            while code() is None:
                time.sleep(0.05)

    def tail(self) -> str:
        """Return the last lines of each rank."""
        return "\n".join(file.read_text(errors="replace")[-3000:] for file in self.outputs)

    def last_line(self) -> str:
        """Return the end of the last line of the first rank."""
        lines = self.outputs[0].read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")[:300]


@contextmanager
def services(folder: Path) -> Iterator[tuple[PlayerService, EnvironmentService]]:
    """Start both servers, and end them with the block."""
    player = PlayerService()
    environments = EnvironmentService(folder)
    try:
        yield player, environments
    finally:
        player.thaw()
        environments.kill()
        if not player.server.is_dead:
            player.kill()


def lines_of(file: Path) -> Iterator[dict]:
    """Yield the whole lines of a JSONL file, which is being written."""
    if file.exists():
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def points_of(store: Path) -> dict[tuple[str, int], float | None]:
    """Return the points in MLflow's sqlite file by name and step.

    Raises:
        ValueError: It has one twice.
    """
    with closing(sqlite3.connect(store)) as connection:
        rows = connection.execute("SELECT key, step, value, is_nan FROM metrics").fetchall()
    points = {(key, step): None if is_nan else value for key, step, value, is_nan in rows}
    if len(points) != len(rows):
        raise ValueError(f"{store}: {len(rows) - len(points)} points are there twice")
    return points


def unsent(folder: Path) -> list[str]:
    """Return a phrase on points that a run has logged and MLflow lacks, and print the number of its points.

    Args:
        folder: Of the run and of MLflow's sqlite file.
    """
    points = lines_of(folder / "run" / "metrics.jsonl")
    tracked = [point for point in points if point.get("tracked", "metrics" in point)]
    logged = {(name, point["step"]) for point in tracked for name in point["metrics"]}
    kept = points_of(folder / "mlflow.db")
    print(f"points: {len(logged)} logged, {len(kept)} in MLflow")
    return (
        [] if logged == kept.keys() else [f"{len(logged - kept.keys())} points are not in MLflow"]
    )


def end(problems: Sequence[str], folder: Path, *, keep: bool) -> None:
    """Print the problems of a soak and exit, or remove its folder where there are none."""
    for problem in problems:
        print(f"FAILED: {problem}")
    if problems:
        sys.exit(f"runs, measurements and output are in {folder}")
    if not keep:
        shutil.rmtree(folder)
