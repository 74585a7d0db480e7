"""The rollout engine on vLLM servers, on this machine or on others.

A server gets token ids and images, and returns sampled ids with their log-probs. It labels each token with the version
of the weights that sampled it. New weights are written to a folder, from which each server reloads them in place. A
server that fails gets no requests until it answers again with the present weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
import numpy as np
import torch
from torch import Tensor

from ragen_pl.constraints import (
    Contains,
    Count,
    CountOrZero,
    ExistingPath,
    Open,
    Positive,
    checked,
)
from ragen_pl.distributed import all_ranks_do, gather_over_ranks, rank
from ragen_pl.files import OwnFolder
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.checkpoint_weights import write_weights
from ragen_pl.rollout.endpoint import data_url
from ragen_pl.rollout.engine import EnginePolicy, Generation, GenerationRequest
from ragen_pl.rollout.errors import RolloutError
from ragen_pl.rollout.vllm_engine import (
    CPU_BATCH_TOKENS,
    check_prompt,
    check_request,
    check_weights,
    sampling_arguments,
)
from ragen_pl.rollout.vllm_process import ServerProcess

log = logging.getLogger(__name__)

# version of a server's weights while they are replaced
_REPLACING = "replacing"
# seconds: first and longest pause between attempts, and the wait for an answer that needs no computing
_FIRST_PAUSE, _LONGEST_PAUSE, _ANSWERS_IN = 0.1, 8.0, 30.0
_PROBE = "Wo ist das Ziel? <b>3</b> x² ≠ 12,5 目标在哪里\n\n\tdef f(x): return 'é' "
_CHAT = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "Right."},
    {"role": "user", "content": "And now?"},
]
Json = dict[str, Any]


class VLLMServerEngine:
    """Rollout engine that sends its requests to vLLM servers.

    Requests of a session go to the same server while it answers. A request that fails is sent again, to another server
    where there is one. Only its prompt, its sampling parameters and its seed decide the response.

    Where torch.distributed is initialized, all ranks have to build the engine and load weights together: the first rank
    writes the weights and hands them to the servers. Requests of all ranks go to all servers. Adapters are merged into
    the weights.

    Args:
        policy: Policy whose weights are handed over by `load_weights`.
        forward_context: Not used: a server computes in its own type.
        urls: Addresses of servers, such as `http://127.0.0.1:8000`; an empty list starts one on this machine.
        max_tokens: Longest prompt plus response.
        dtype: Type that the servers compute in; `auto` is that of the policy's weights.
        retries: Attempts after the first for each request, with growing pauses.
        timeout_s: Longest wait for a response, and for a server to answer again when none does, in seconds.
        concurrency: Requests of this process under way at once.
        weights_folder: Folder in which weights are handed over, which the servers see under the same path; None for
            shared memory with enough room, else the folder of temporary files.
        settings: Other arguments of a server that the engine starts, such as `{"max_num_seqs": 512}`.

    Raises:
        ModuleNotFoundError: vLLM is not installed and there are no `urls`.
        ValueError: A server can't serve the policy, or does not answer.
    """

    exact = False
    in_place = False
    asynchronous = True
    continuous = True

    @checked
    def __init__(
        self,
        policy: EnginePolicy,
        *,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        urls: Sequence[Annotated[str, Contains("://")]] = (),
        max_tokens: Count,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        retries: CountOrZero = 8,
        timeout_s: Positive = 300.0,
        concurrency: Count = 256,
        weights_folder: Annotated[str, ExistingPath()] | None = None,
        settings: Annotated[dict[str, Any], Open()] | None = None,
    ) -> None:
        self.bundle, self._policy = policy.bundle, policy
        check_weights(self.bundle, engine="vllm_server")
        self.max_tokens, self.retries, self.timeout_s = max_tokens, retries, timeout_s
        self.dtype = self.bundle.model.dtype if dtype == "auto" else getattr(torch, dtype)
        self.version = -1
        self.sampled_tokens = 0
        self.resent = 0
        self._folder: OwnFolder | None = None
        self._run, self._weights, self._label, self._loads = "", "", "", 0
        self._process: ServerProcess | None = None
        self._only: str | None = None
        self._conflict: RolloutError | None = None
        self._under_way: dict[int, Future[None]] = {}
        self._requests = 0
        self._finished: queue.SimpleQueue[tuple[int, GenerationRequest, Json | Exception]] = (
            queue.SimpleQueue()
        )
        self._banned = dict.fromkeys(self.bundle.banned_token_ids, float("-inf"))
        self._ends = sorted(self.bundle.eos_token_ids)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._open(concurrency))
        try:
            weights = iter(()) if urls else policy.weights()
            self.urls = self._first_rank_does(
                lambda: self._start(urls, weights, weights_folder, settings), weights
            )
            self._servers = [_Server(url, self._session, self.timeout_s) for url in self.urls]
            all_ranks_do(lambda: self._call(self._check_all()))
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        urls: Sequence[str],
        weights: Iterator[tuple[str, Tensor]],
        weights_folder: str | None,
        settings: Json | None,
    ) -> list[str]:
        """Make the folder of weights on the first rank, and a server where there is none; return the addresses."""
        place = Path(weights_folder or _room_for(self.bundle)).expanduser().absolute()
        # not world-readable: the servers are run by the same user
        self._folder = OwnFolder("ragen_weights_", place=place)
        self._run = uuid.uuid4().hex[:12]
        if not urls:
            self._process = ServerProcess(
                self.bundle,
                weights,
                max_tokens=self.max_tokens,
                dtype=self.dtype,
                timeout_s=self.timeout_s,
                settings=settings or {},
            )
            return [self._process.url]
        return [re.sub(r"(/v1)?/*$", "", url) for url in urls]

    async def _open(self, concurrency: int) -> None:
        key = os.environ.get("VLLM_API_KEY")
        self._session = aiohttp.ClientSession(
            # a kept connection may end just before a request
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        self._free = asyncio.Semaphore(concurrency)
        self._changed = asyncio.Condition()
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._last_ready = time.monotonic()

    # ---- ranks

    def _first_rank_does(
        self, work: Callable[[], Any], weights: Iterator[tuple[str, Tensor]]
    ) -> Any:
        """Return the first rank's result on all ranks; an error there is raised on all.

        Args:
            work: What it does.
            weights: Weights that it uses, and that other ranks may have to gather with it.
        """

        def own() -> Any:
            try:
                return work() if rank() == 0 else None
            finally:
                for _ in weights:
                    pass

        return gather_over_ranks(all_ranks_do(own))[0]

    # ---- weights

    def load_weights(self, version: int) -> None:
        """Hand the policy's present weights to every server that answers. All ranks have to call it.

        Raises:
            RolloutError: No server could load them.
        """
        self.release()
        self._call(self._stop_checks())
        # no rank samples any more
        gather_over_ranks(None)
        weights = self._policy.weights()
        self._weights, self._label, ready = self._first_rank_does(
            lambda: self._hand_over(version, weights), weights
        )
        for server in self._servers:
            server.ready = server.url in ready
            server.has_had_weights |= server.ready
        self.version = version
        self._call(self._watch_lost())

    def _hand_over(
        self, version: int, weights: Iterator[tuple[str, Tensor]]
    ) -> tuple[str, str, list[str]]:
        """Write the weights and have all servers load them; return the folder, the label and the servers that did."""
        assert self._folder is not None
        folder = self._folder.path / str(self._loads)
        shutil.rmtree(self._folder.path / str(self._loads - 1), ignore_errors=True)
        self._loads += 1
        try:
            write_weights(weights, folder)
        except OSError as error:
            raise RolloutError(
                f"rollout.engine.weights_folder: weights can't be written to {folder} ({error}); set another folder, "
                "which the servers see under the same path"
            ) from error
        label = f"{self._run}/{self._loads}/{version}"
        ready = self._call(self._push_all(str(folder), label))
        return str(folder), label, ready

    async def _push_all(self, folder: str, label: str) -> list[str]:
        """Have all servers load weights; return those that did.

        Raises:
            RolloutError: None did within `timeout_s`.
        """
        last = time.monotonic() + self.timeout_s
        pause = _FIRST_PAUSE
        while True:
            results = await asyncio.gather(
                *(self._push(server, folder, label) for server in self._servers),
                return_exceptions=True,
            )
            ready = []
            for server, result in zip(self._servers, results, strict=True):
                if isinstance(result, _Refused):
                    raise RolloutError(str(result))
                if isinstance(result, _Trouble):
                    server.trouble = str(result)
                elif isinstance(result, BaseException):
                    raise result
                else:
                    ready.append(server.url)
            if ready:
                return ready
            if time.monotonic() > last:
                raise self._none_answers()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _push(self, server: _Server, folder: str, label: str) -> None:
        """Have a server load weights, which drops all that it has computed with older ones."""
        if not server.is_checked:
            await self._check(server)
        # requests that nobody waits for any more
        await server.call("POST", "/pause?mode=abort")
        await server.call("POST", "/update_weight_version", {"new_version": _REPLACING})
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        try:
            await server.call("POST", "/collective_rpc", body, timeout_s=self.timeout_s)
        except _Failed as error:
            if server.has_had_weights:
                raise
            raise _Refused(
                f"rollout.engine.urls: {server.url} can't load the weights in {folder} ({error}); start it "
                "again with the trainer's model; it has to see rollout.engine.weights_folder under the same path"
            ) from error
        reset = await server.call("POST", "/reset_prefix_cache")
        if reset != {"success": True}:
            raise _Unavailable("it has kept the keys and values of other weights")
        await server.call("POST", "/reset_encoder_cache")
        await server.call("POST", "/update_weight_version", {"new_version": label})
        await server.call("POST", "/resume")

    # ---- servers that fail

    async def _check_all(self) -> None:
        """Check all servers, which may still be starting.

        Raises:
            ValueError: A server can't serve the policy, or does not answer.
        """
        results = await asyncio.gather(
            *(self._check_patiently(server) for server in self._servers), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _check_patiently(self, server: _Server) -> None:
        for attempt in range(self.retries + 1):
            try:
                return await self._check(server)
            except (_Unavailable, _Busy) as error:
                server.trouble = str(error)
            if attempt == 0:
                log.info("rollout.engine.urls: waits for %s (%s)", server.url, server.trouble)
            if attempt < self.retries:
                await asyncio.sleep(min(0.5 * 2**attempt, _LONGEST_PAUSE))
        raise ValueError(
            f"rollout.engine.urls: {server.url} does not answer ({server.trouble}); start a server there "
            "(docs/engines.md), or set urls=[] and the run starts one"
        )

    def _lose(self, server: _Server, trouble: str) -> None:
        """Send a server no requests until it is known to have the present weights."""
        server.trouble = trouble
        if server.ready:
            self._last_ready = time.monotonic()
        server.ready = False
        if server.url not in self._checks or self._checks[server.url].done():
            self._checks[server.url] = self._loop.create_task(self._take_back(server))

    async def _take_back(self, server: _Server) -> None:
        """Wait until a server answers, have it load the weights if it has others, and use it again."""
        pause = _FIRST_PAUSE
        reported = False
        while True:
            try:
                held = (await server.call("GET", "/weight_info"))["weight_version"]
                if held != self._label:
                    server.is_checked = False
                    self._refuse_others(server, held)
                    await self._push(server, self._weights, self._label)
                break
            except (_Trouble, _Refused) as error:
                server.trouble = str(error)
            except RolloutError as error:
                self._conflict = error
                async with self._changed:
                    self._changed.notify_all()
                return
            except (KeyError, TypeError):
                server.trouble = "it is no vLLM server"
            if not reported:
                log.warning(
                    "rollout.engine.urls: %s is lost (%s); it is asked again until it answers",
                    server.url,
                    server.trouble,
                )
                reported = True
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if reported:
            log.warning("rollout.engine.urls: %s is back", server.url)
        server.ready = server.has_had_weights = True
        async with self._changed:
            self._changed.notify_all()

    def _refuse_others(self, server: _Server, held: str) -> None:
        """Raise an error if another run has given the server its weights since this one did."""
        owner = held.partition("/")[0]
        if (
            server.has_had_weights
            and held.count("/") == 2
            and owner != self._label.partition("/")[0]
        ):
            raise RolloutError(
                f"rollout.engine.urls: {server.url} has got weights of another run; give each run servers of its own"
            )

    async def _watch_lost(self) -> None:
        self._last_ready = time.monotonic()
        for server in self._servers:
            if not server.ready:
                self._lose(server, server.trouble)

    async def _stop_checks(self) -> None:
        for task in self._checks.values():
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)
        self._checks.clear()

    async def _ready_server(self, session: int) -> _Server:
        """Return the server of a session, or the least busy one of those that are ready; wait for one.

        Raises:
            RolloutError: None has been ready for `timeout_s`, or another run uses one.
        """
        wanted = [server for server in self._servers if self._only in (None, server.url)]
        while True:
            if self._conflict is not None:
                raise self._conflict
            ready = [server for server in wanted if server.ready]
            if ready:
                self._last_ready = time.monotonic()
                own = wanted[session % len(wanted)]
                return own if own.ready else min(ready, key=lambda server: server.under_way)
            left = self._last_ready + self.timeout_s - time.monotonic()
            if left <= 0:
                raise self._none_answers()
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), timeout=min(left, 1.0))
                except TimeoutError:
                    continue

    def _none_answers(self) -> RolloutError:
        troubles = "; ".join(f"{server.url}: {server.trouble}" for server in self._servers)
        return RolloutError(
            f"rollout.engine.urls: no server has answered for {self.timeout_s:g} s ({troubles}); start one again, or "
            "raise rollout.engine.timeout_s"
        )

    # ---- what a server has to be

    async def _check(self, server: _Server) -> None:
        """Check that a server can serve the policy.

        Raises:
            _Refused: It can't.
            _Unavailable: It does not answer.
        """
        try:
            info = await server.call("GET", "/server_info?config_format=json")
            config = info["vllm_config"]
            for found, flag in self._differences(config):
                raise _Refused(
                    f"rollout.engine.urls: {server.url} has {found}; start it with {flag}"
                )
            if not config["model_config"]["skip_tokenizer_init"]:
                await self._check_tokenizer(server)
            await self._check_generate(server)
        except _Failed as error:
            raise _Refused(
                f"rollout.engine.urls: {server.url} is no vLLM server that takes weights and token ids ({error}); "
                "start it as docs/engines.md says, with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
            ) from error
        except (KeyError, TypeError) as error:
            raise _Refused(
                f"rollout.engine.urls: {server.url} answers unlike vLLM 0.32 (no {error}); install that version there"
            ) from error
        server.is_checked = True

    def _differences(self, config: Json) -> Iterator[tuple[str, str]]:
        """Yield what a server's settings are and what has to be added to its command."""
        model, images = config["model_config"], config["model_config"]["multimodal_config"]
        dtype, chunked = str(self.dtype).removeprefix("torch."), config["scheduler_config"]
        if model["logprobs_mode"] != "processed_logprobs":
            yield f"--logprobs-mode {model['logprobs_mode']}", "--logprobs-mode processed_logprobs"
        if model["dtype"] != str(self.dtype):
            found = model["dtype"].removeprefix("torch.")
            yield f"--dtype {found}", f"--dtype {dtype}, or set rollout.engine.dtype={found}"
        if model["max_model_len"] < self.max_tokens:
            yield f"--max-model-len {model['max_model_len']}", f"--max-model-len {self.max_tokens}"
        if model["quantization"] is not None:
            yield "quantized weights, which can't be replaced", "unquantized ones"
        if config["load_config"]["load_format"] == "dummy":
            yield "--load-format dummy, which reloads no weights", "--load-format auto"
        if config["device_config"]["device"] == "cpu" and chunked["enable_chunked_prefill"]:
            # a seeded request can't continue a prompt that was computed in part there (0.32)
            tokens = max(self.max_tokens, CPU_BATCH_TOKENS)
            flags = f"--no-enable-chunked-prefill --max-num-batched-tokens {tokens}"
            yield "--enable-chunked-prefill, which CPUs have no seeds for", flags
        if self.bundle.processor is None:
            return
        if images is None:
            yield "a model without images", f"a {self.bundle.facts.family} model"
        elif images["mm_device_do_normalize"]:
            # its constants would be overwritten by new weights (0.32)
            yield "--mm-device-do-normalize", "--no-mm-device-do-normalize"
        elif (images["mm_processor_kwargs"] or {}) != dict(self.bundle.image_settings):
            wanted = json.dumps(dict(self.bundle.image_settings))
            yield (
                f"--mm-processor-kwargs {images['mm_processor_kwargs']}",
                f"--mm-processor-kwargs '{wanted}'",
            )

    async def _check_tokenizer(self, server: _Server) -> None:
        """Compare the vocabulary, how a text is split, and the chat template."""
        tokenizer, renderer = self.bundle.tokenizer, self.bundle.renderer
        vocabulary = list(range(len(tokenizer)))
        body: Json = {"prompt": _PROBE, "add_special_tokens": False}
        ids = (await server.call("POST", "/tokenize", body))["tokens"]
        text = (await server.call("POST", "/detokenize", {"tokens": vocabulary}))["prompt"]
        if text != tokenizer.decode(vocabulary) or ids != _ids(tokenizer, _PROBE):
            raise _Refused(
                f"rollout.engine.urls: {server.url} has another tokenizer than the trainer; start it with the "
                "trainer's model, or with --tokenizer FOLDER"
            )
        if not renderer.chat_template:
            return
        chat = renderer.apply_chat_template(_CHAT, add_generation_prompt=True, tokenize=False)
        body = {"messages": _CHAT, "add_generation_prompt": True}
        if (await server.call("POST", "/tokenize", body))["tokens"] != _ids(tokenizer, chat):
            raise _Refused(
                f"rollout.engine.urls: {server.url} has another chat template than the trainer; start it with the "
                "trainer's model, or with --chat-template FILE"
            )

    async def _check_generate(self, server: _Server) -> None:
        """Check that it takes token ids, without sampling: weights that it has loaded in part would end it."""
        try:
            await server.call("POST", "/inference/v1/generate", {})
        except _Failed as error:
            if error.status not in (400, 422):
                raise

    @contextmanager
    def only(self, url: str) -> Iterator[None]:
        """Send requests to one of the servers alone."""
        self._only = url
        try:
            yield
        finally:
            self._only = None

    # ---- responses

    def submit(self, requests: Sequence[GenerationRequest], *, keep: bool) -> None:
        """Send requests; see `RolloutEngine`.

        Raises:
            ValueError: A request has more tokens than `max_tokens`, or leaves out parts of its images.
        """
        for request in requests:
            check_request(request, max_tokens=self.max_tokens)
        for request in requests:
            number = self._requests
            self._requests += 1
            self._under_way[number] = asyncio.run_coroutine_threadsafe(
                self._ask(number, request), self._loop
            )

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        """Return the responses since the last call.

        Args:
            wait: Wait for at least one where any is under way.

        Raises:
            RolloutError: A request was refused or failed too often, or no server answers.
        """
        if not self._under_way:
            return []
        finished = [self._finished.get()] if wait else []
        while not self._finished.empty():
            finished.append(self._finished.get())
        generations = []
        for number, request, answer in finished:
            self._under_way.pop(number, None)
            if isinstance(answer, Exception):
                self.release()
                raise answer
            generations.append((request.session, self._generation(request, answer)))
        return generations

    def release(self) -> None:
        """Cancel the requests under way, which their servers abort."""
        if self._under_way:
            self._call(self._cancel(list(self._under_way.values())))
        self._under_way.clear()
        while not self._finished.empty():
            self._finished.get()

    def sleep(self) -> None:
        """Cancel what is under way; the servers keep their memory."""
        self.release()

    def close(self) -> None:
        """End a server that the engine has started, and remove the weights that it has written."""
        if not self._thread.is_alive():
            return
        self.release()
        self._call(self._stop_checks())
        self._call(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._process is not None:
            self._process.close()
        if self._folder is not None:
            self._folder.remove()

    async def _cancel(self, futures: list[Future[None]]) -> None:
        for future in futures:
            future.cancel()
        # the connections close in the next steps of the loop
        await asyncio.sleep(0)

    async def _ask(self, number: int, request: GenerationRequest) -> None:
        try:
            async with self._free:
                answer: Json | Exception = await self._answer(request)
        except Exception as error:  # `collect` raises it
            answer = error
        self._finished.put((number, request, answer))

    async def _answer(self, request: GenerationRequest) -> Json:
        """Return a server's choice for a request.

        Raises:
            RolloutError: It was refused, or failed too often.
        """
        body = self._body(request)
        failures = 0
        while True:
            server = await self._ready_server(request.session)
            server.under_way += 1
            try:
                answer = await server.call(
                    "POST", "/inference/v1/generate", body, timeout_s=self.timeout_s
                )
                return self._checked(answer)
            except _Busy as error:
                trouble = str(error)
                await asyncio.sleep(min(_FIRST_PAUSE * 2**failures, _LONGEST_PAUSE))
            except _Unavailable as error:
                trouble = str(error)
                self._lose(server, trouble)
            except _Failed as error:
                if error.status < 500:
                    raise RolloutError(
                        f"rollout.engine.urls: {server.url} refuses a request ({error})"
                    ) from error
                trouble = str(error)
                self._lose(server, trouble)
            finally:
                server.under_way -= 1
            failures += 1
            self.resent += 1
            if failures > self.retries:
                raise RolloutError(
                    f"rollout.engine.retries={self.retries}: a request failed {failures} times, the last time at "
                    f"{server.url} ({trouble}); see that server's log"
                )

    def _body(self, request: GenerationRequest) -> Json:
        prompt = request.prompt
        ids = prompt.unexpanded_ids if prompt.images else prompt.ids
        body: Json = {
            "token_ids": ids.tolist(),
            "return_token_ids": True,
            "sampling_params": sampling_arguments(request, ends=self._ends, banned=self._banned),
        }
        if prompt.images:
            body["content_parts"] = [
                {"type": "image_url", "url": data_url(image)} for image in prompt.images
            ]
        return body

    def _checked(self, answer: Json) -> Json:
        """Return the parts of an answer that a response needs.

        Raises:
            _Unavailable: It was sampled with other weights, was interrupted, or is unlike vLLM's answers.
        """
        try:
            (choice,) = answer["choices"]
            parts = {
                "shown": answer["prompt_token_ids"],
                "ids": choice["token_ids"],
                "logprobs": [token["logprob"] for token in choice["logprobs"]["content"]],
                "reason": choice["finish_reason"],
            }
            versions = {span["version"] for span in choice["weight_versions"]}
        except (KeyError, TypeError, ValueError) as error:
            raise _Unavailable(f"an answer unlike vLLM's ({error})") from error
        if parts["reason"] not in ("stop", "length"):
            raise _Unavailable(f"a response ended with {parts['reason']}")
        if versions != {self._label}:
            raise _Unavailable("it has lost the weights")
        if not 0 < len(parts["ids"]) == len(parts["logprobs"]):
            raise _Unavailable("an answer without its log-probs")
        return parts

    def _generation(self, request: GenerationRequest, parts: Json) -> Generation:
        """Return a response.

        Raises:
            ValueError: The server has put other ids in the place of the images than the model's own processor.
        """
        family = self.bundle.facts.family
        check_prompt(parts["shown"], request, family=family, engine="vllm_server")
        self.sampled_tokens += len(parts["ids"])
        return Generation(
            ids=np.asarray(parts["ids"], dtype=np.int64),
            logprobs=np.asarray(parts["logprobs"], dtype=np.float32),
            entropy=None,
            hit_length_limit=parts["reason"] == "length",
            version=self.version,
        )

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine that runs in the engine's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Trouble(Exception):
    """A call of a server did not succeed."""


class _Unavailable(_Trouble):
    """A server gave no answer that can be used. It or another may later."""


class _Busy(_Trouble):
    """A server has too many requests."""


class _Failed(_Trouble):
    """A server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Refused(ValueError):
    """A server can't serve the policy."""


class _Server:
    """A server and what is known about it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self.url, self._session = url, session
        self._answers_in = min(timeout_s, _ANSWERS_IN)
        self.ready = False
        """Whether it is known to have the present weights."""
        self.is_checked = False
        """Whether it is known to be able to serve the policy."""
        self.has_had_weights = False
        """Whether it has ever had weights of this run."""
        self.under_way = 0
        self.trouble = "it has not been asked yet"

    async def call(
        self, method: str, path: str, body: Json | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """Return the JSON of an answer, None for an empty one.

        Raises:
            _Unavailable: There is none, or it is no JSON.
            _Busy: Too many requests.
            _Failed: An error of the server.
        """
        limits = aiohttp.ClientTimeout(total=timeout_s or self._answers_in, sock_connect=10)
        data = None if body is None else json.dumps(body)
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers={"Content-Type": "application/json"},
                timeout=limits,
            ) as response:
                text = await response.text()
        except TimeoutError as error:
            raise _Unavailable(f"no answer within {limits.total:g} s") from error
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise _Unavailable(_line(error)) from error
        if response.status == 429:
            raise _Busy("it has too many requests")
        if response.status in (502, 503, 504):
            raise _Unavailable(f"status {response.status}")
        if response.status >= 400:
            raise _Failed(f"status {response.status}: {_message(text)}", response.status)
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError as error:
            raise _Unavailable("an answer that is no JSON") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _message(text: str) -> str:
    """Return the reason in the body of an error."""
    try:
        body = json.loads(text)
        text = body["error"]["message"] if "error" in body else str(body["detail"])
    except (json.JSONDecodeError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:300]


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _room_for(bundle: ModelBundle) -> str:
    """Return shared memory if a model's weights fit there, else the folder of temporary files."""
    size = sum(weight.numel() * weight.element_size() for weight in bundle.model.parameters())
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1.5 * size:
        return str(memory)
    return tempfile.gettempdir()
