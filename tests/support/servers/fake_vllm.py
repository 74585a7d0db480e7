"""A server that answers as vLLM does, without vLLM. It can fail, freeze, refuse and give impossible answers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from ragen_pl.engines.vllm_server.plugin import BACKEND, Downloads, TransferError
from ragen_pl.models.bundle import ModelBundle

Fault = int | str | Callable[[dict], object]
"""Status, name of a fault, or a change of the answer's choice."""


def wait(condition: Callable[[], bool]) -> None:
    """Wait for a condition, on slow machines too."""
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.01)


class Server(ThreadingHTTPServer):
    """Answers as vLLM does. A seed decides the response; `faults` are those of the first requests for one."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, bundle: ModelBundle, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.bundle = bundle
        self.model = {
            "logprobs_mode": "processed_logprobs",
            "dtype": str(bundle.model.dtype),
            "max_model_len": 256,
            "quantization": None,
            "skip_tokenizer_init": False,
            "multimodal_config": None,
        }
        self.load_format = "auto"
        self.transfer: dict | None = {"backend": BACKEND}
        self.lora: dict | None = {"max_lora_rank": 16}
        self.chunked = False
        # of `--max-logprobs`, and ids to which a teacher gives no probability
        self.max_logprobs, self.impossible = 20, list[int]()
        self.version = "default"
        self.paused = False
        self.weights: dict = {}
        # the folder that they were read from
        self.read = ""
        # whether it samples with other weights than its label says
        self.is_stale = False
        self.adapters: dict[str, Path] = {}
        self.pushes = 0
        # transfers that have begun; where it downloads to, and by which proxy
        self.is_updating = False
        self.downloads: Downloads | None = None
        self.proxy: str | None = None
        # whether it is killed by a call with a path and a body
        self.dies_at: Callable[[str, dict | None], bool] = lambda path, body: False
        self.shift = 0
        self.disabled: str | None = None
        self.loading = 0
        self.faults: list[Fault] = []
        self.always: dict[int, Fault] = {}  # by seed
        self.asked: list[dict] = []
        self.asked_at: list[float] = []
        self.calls: Counter[str] = Counter()
        self.sent = 0
        self.delay = 0.0
        self.is_dead = False
        # cleared: requests for a response wait, or all requests
        self.samples, self.runs = threading.Event(), threading.Event()
        self.samples.set()
        self.runs.set()
        self.under_way = self.most_under_way = 0
        # responses wait until so many requests have been under way at once
        self.together = 0
        self.lock = threading.Lock()
        # a test that fails in a process of its own may leave it running
        self.thread = threading.Thread(target=self.serve_forever, args=(0.005,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def die(self) -> None:
        """Close the port and all connections."""
        self.is_dead = True
        self.samples.set()
        self.runs.set()
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        path = self.path.partition("?")[0]
        self.server.runs.wait()
        self.server.calls[path] += 1
        with suppress(OSError):  # the engine has gone
            if not self.server.is_dead and self.server.dies_at(path, body):
                self.server.die()
            if self.server.is_dead:
                self.connection.shutdown(socket.SHUT_RDWR)
            elif path == self.server.disabled:
                self.answer(403, {"error": {"message": f"{path} is disabled"}})
            elif path == "/server_info" and self.server.loading:
                self.server.loading -= 1
                self.answer(503, None)
            elif path == "/inference/v1/generate" and not body:
                self.answer(400, {"error": {"message": "token_ids: field required"}})
            elif path == "/inference/v1/generate":
                self.sample(body)
            else:
                self.answer(*getattr(self, path.strip("/").replace("/", "_"))(body))

    def answer(self, status: int, body: object) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        if body == "text":
            data = b"Success: no JSON"
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def health(self, _: None) -> tuple[int, object]:
        return 200, None

    def server_info(self, _: None) -> tuple[int, object]:
        config = {
            "model_config": self.server.model,
            "load_config": {"load_format": self.server.load_format},
            "device_config": {"device": "cpu"},
            "scheduler_config": {"enable_chunked_prefill": self.server.chunked},
            "weight_transfer_config": self.server.transfer,
            "lora_config": self.server.lora,
        }
        return 200, {"vllm_config": config}

    def tokenize(self, body: dict) -> tuple[int, object]:
        tokenizer = self.server.bundle.tokenizer
        name = body.get("model")
        if name is not None and name not in self.server.adapters:
            # by the plug-in's resolver
            found = self.server.downloads and self.server.downloads.adapters(name)
            if found is None:
                return 404, {"error": {"message": f"The model `{name}` does not exist."}}
            return self.v1_load_lora_adapter({"lora_name": name, "lora_path": found})[0], {}
        text = body.get("prompt")
        if text is None:
            text = self.server.bundle.renderer.apply_chat_template(
                body["messages"], add_generation_prompt=True, tokenize=False
            )
        return 200, {"tokens": tokenizer(text, add_special_tokens=False)["input_ids"]}

    def detokenize(self, body: dict) -> tuple[int, object]:
        return 200, {"prompt": self.server.bundle.tokenizer.decode(body["tokens"])}

    def v1_models(self, _: None) -> tuple[int, object]:
        return 200, {"data": [{"id": "teacher"}]}

    def v1_completions(self, body: dict) -> tuple[int, object]:
        """Score a prompt of ids: at each position its own one, and then the most likely ones."""
        assert body["model"] == "teacher"
        number, limit = body["prompt_logprobs"], self.server.max_logprobs
        if number > limit:
            message = (
                f"Requested prompt logprobs of {number}, which is greater than max allowed: {limit}"
            )
            return 400, {"error": {"message": message}}
        self.server.asked.append(body)
        if self.server.faults:
            fault = self.server.faults.pop(0)
            return (
                (fault, {"error": {"message": "a fault"}}) if isinstance(fault, int) else (200, {})
            )
        ids = torch.tensor([body["prompt"]])
        with self.server.lock, torch.no_grad():
            logits = self.server.bundle.model(ids).logits[0]
            logits[:, self.server.impossible] = -torch.inf
            # as vLLM writes those of impossible ids
            logprobs = logits.log_softmax(-1).clamp(min=-9999.0)
        scores = [
            {
                str(one): {"logprob": float(logprobs[place, one])}
                for one in (token, *logprobs[place].topk(number).indices.tolist())
            }
            for place, token in enumerate(body["prompt"][1:])
        ]
        return 200, {"choices": [{"prompt_logprobs": [None, *scores]}]}

    def pause(self, _: None) -> tuple[int, object]:
        self.server.paused = True
        return 200, {"status": "paused"}

    def resume(self, _: None) -> tuple[int, object]:
        self.server.paused = False
        return 200, {"status": "resumed"}

    def weight_info(self, _: None) -> tuple[int, object]:
        return 200, {"weight_version": self.server.version}

    def update_weight_version(self, body: dict) -> tuple[int, object]:
        self.server.version = body["new_version"]
        return 200, {"success": True}

    def collective_rpc(self, body: dict) -> tuple[int, object]:
        assert self.server.paused and self.server.version == "replacing"
        folder = Path(body["kwargs"]["weights_path"])
        files = sorted(folder.glob("*.safetensors"))
        if body["method"] != "reload_weights" or not files:
            return 500, {"error": {"message": f"no weights in {folder}"}}
        self.server.weights, self.server.read = {}, str(folder)
        for file in files:
            self.server.weights |= load_file(file)
        self.server.pushes += 1
        return 200, {"results": [None]}

    def start_weight_update(self, _: None) -> tuple[int, object]:
        if self.server.is_updating:
            return 500, {"error": {"message": "already active. Call finish_weight_update first."}}
        self.server.is_updating = True
        return 200, {"message": "started"}

    def finish_weight_update(self, _: None) -> tuple[int, object]:
        self.server.is_updating = False
        return 200, {"message": "finished"}

    def update_weights(self, body: dict) -> tuple[int, object]:
        server, info = self.server, body["update_info"]
        assert server.is_updating and server.downloads is not None
        place, _, path = info["manifest"].partition("//")[2].partition("/")
        try:
            folder = server.downloads.folder(f"http://{server.proxy or place}/{path}")
        except (TransferError, OSError) as error:
            server.is_updating = False
            return 500, {"error": {"message": str(error)}}
        if info["load"]:
            assert server.paused and server.version == "replacing"
            server.weights = {}
            for file in sorted(folder.glob("*.safetensors")):
                server.weights |= load_file(file)
            server.pushes += 1
        return 200, {"message": "updated"}

    def v1_load_lora_adapter(self, body: dict) -> tuple[int, object]:
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.server.adapters:
            return 400, {"error": {"message": f"{name} has already been loaded"}}
        self.server.weights = load_file(folder / "adapter_model.safetensors")
        self.server.adapters[name] = folder
        self.server.pushes += 1
        return 200, "text"

    def v1_unload_lora_adapter(self, body: dict) -> tuple[int, object]:
        if self.server.adapters.pop(body["lora_name"], None) is None:
            return 404, {"error": {"message": "cannot be found"}}
        return 200, "text"

    def reset_prefix_cache(self, _: None) -> tuple[int, object]:
        return 200, {"success": True}

    def reset_encoder_cache(self, _: None) -> tuple[int, object]:
        return 200, None

    def inference_v1_generate(self, body: dict) -> tuple[int, object]:
        server = self.server
        parameters = body["sampling_params"]
        if body.get("model") is not None and body["model"] not in server.adapters:
            return 404, {"error": {"message": f"{body['model']} does not exist"}}
        is_stale = server.is_stale or server.version == "default"
        rng = np.random.default_rng(parameters.get("seed") + 1000 * is_stale)
        ids = rng.integers(10, 50, parameters["max_tokens"]).tolist()
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": -1.0 - one / 64} for one in ids]},
            "finish_reason": "length",
            "weight_versions": [{"version": server.version, "start": 0, "end": len(ids)}],
        }
        shown = [one + server.shift for one in body["token_ids"]]
        return 200, {"choices": [choice], "prompt_token_ids": shown}

    def sample(self, body: dict) -> None:
        server = self.server
        with server.lock:
            fault = server.always.get(body["sampling_params"]["seed"])
            if fault is None and server.faults:
                fault = server.faults.pop(0)
            server.asked.append(body)
            server.asked_at.append(time.monotonic())
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        time.sleep(server.delay)
        while server.most_under_way < server.together:
            time.sleep(0.005)
        server.samples.wait()
        # before the response: its client sends the next request as soon as it has it
        with server.lock:
            server.under_way -= 1
        self.respond(body, "close" if server.is_dead else fault)

    def respond(self, body: dict, fault: Fault | None) -> None:
        status, answer = self.inference_v1_generate(body)
        if fault == "close":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "never":
            while not self.server.is_dead:
                time.sleep(0.05)
        elif fault == "endless":
            self.send_response(200)
            self.end_headers()
            while self.server.sent < 2**28:
                self.wfile.write(b" " * 2**16)
                self.server.sent += 2**16
        elif fault == "garbage":
            self.answer(200, {"text": "<html>"})
        elif isinstance(fault, int):
            self.answer(fault, {"error": {"message": "not\nnow"}})
        else:
            if fault is not None and status == 200:
                fault(answer["choices"][0])
            self.answer(status, answer)
