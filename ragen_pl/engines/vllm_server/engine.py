"""The engine: requests of a rollout to vLLM servers, and their responses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any, Literal

import aiohttp
import torch
from torch import Tensor

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import (
    Count,
    CountOrZero,
    ExistingPath,
    Open,
    Positive,
    containing,
    matching,
)
from ragen_pl.base.distributed import all_ranks_do, gather_over_ranks, rank, values_of, world_size
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import EnginePolicy, Generation, GenerationRequest
from ragen_pl.engines.request_thread import RequestThread
from ragen_pl.engines.vllm.model import check_weights
from ragen_pl.engines.vllm.requests import check_request
from ragen_pl.engines.vllm_server.answers import Budget, Exchange
from ragen_pl.engines.vllm_server.pool import ServerPool
from ragen_pl.engines.vllm_server.process import ServerProcess
from ragen_pl.engines.vllm_server.requirements import Requirements
from ragen_pl.engines.vllm_server.rules import VLLMServerRules
from ragen_pl.engines.vllm_server.server import (
    Json,
    Router,
    Server,
    ServerError,
    UnavailableError,
    address,
    pause,
)
from ragen_pl.engines.vllm_server.serving import serve
from ragen_pl.engines.vllm_server.transfer import TransferName, WeightFolder
from ragen_pl.engines.vllm_server.weights import WrittenWeights
from ragen_pl.models.adapters import unservable_adapters


class VLLMServerEngine(VLLMServerRules):
    """Rollout engine that sends its requests to vLLM servers.

    Requests of a session go to the same server while it answers. A request that fails is sent again, to another server
    where there is one. Only its prompt, its sampling parameters and its seed decide the response.

    Where torch.distributed is initialized, all ranks have to build the engine and load weights together: the first rank
    writes the weights and hands them to the servers. Requests of all ranks go to all servers. Adapters are merged into
    the weights unless they travel alone.

    Args:
        policy: Policy whose weights are handed over by `load_weights`.
        forward_context: Not used: a server computes in its own type.
        urls: Addresses of servers, such as `http://127.0.0.1:8000`; an empty list starts one on this machine.
        max_tokens: Longest prompt plus response.
        dtype: Type that the servers compute in; `auto` is that of the policy's weights.
        retries: Attempts after the first for each request that fails while others are answered, with growing pauses.
            While none is answered, requests are sent again for `timeout_s`.
        timeout_s: Longest wait for a response, and for a server to answer again when none does, in seconds.
        probe_s: Seconds between two probes of a server's health, and the longest wait for the answer to one.
        probe_failures: Probes without an answer, one after the other, after which a server is lost and its requests
            are sent elsewhere.
        concurrency: Requests of this process under way at once.
        transfer: How servers get the weights: `folder`, from a folder that they see under the same path; `pull`, by
            HTTP from the first rank; `adapters`, the adapters alone, in one of these ways.
        weights_folder: Folder in which weights are written, which the servers see under the same path unless they pull;
            None for shared memory with enough room, else the folder of temporary files.
        serve_address: `HOST:PORT` of the first rank's machine from which servers download. With `pull`, None is the
            address by which it reaches the first server, with a free port. With `adapters`, None is the folder.
        router_url: Address of a router that gets the requests for responses; `urls` are still asked for all else. None
            sends them to the servers.
        settings: Other arguments of a server that the engine starts, such as `{"max_num_seqs": 512}`.
        python: Python of an environment with vLLM that runs this server; None for the one of this process.

    Raises:
        ModuleNotFoundError: vLLM is not installed and there are no `urls`.
        ValueError: A server can't serve the policy, or does not answer.
    """

    needs_trust = ("*",)

    @checked
    def __init__(
        self,
        policy: EnginePolicy,
        *,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        urls: Sequence[Annotated[str, containing("://")]] = (),
        max_tokens: Count,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        retries: CountOrZero = 8,
        timeout_s: Positive = 300.0,
        probe_s: Positive = 5.0,
        probe_failures: Count = 3,
        concurrency: Count = 256,
        transfer: TransferName = "folder",
        weights_folder: ExistingPath | None = None,
        serve_address: Annotated[str, matching(r".+:\d{1,5}", "10.0.0.1:9400")] | None = None,
        router_url: Annotated[str, containing("://")] | None = None,
        settings: Annotated[dict[str, Any], Open()] | None = None,
        python: ExistingPath | None = None,
    ) -> None:
        self.bundle, self._policy = policy.bundle, policy
        check_weights(self.bundle, engine="vllm_server")
        self._adapters = transfer == "adapters"
        problem = unservable_adapters(self.bundle.model) if self._adapters else None
        if problem is not None:
            raise ValueError(
                f"rollout.engine.transfer=adapters: {problem}; set transfer=folder or pull, which merge adapters"
            )
        self.max_tokens, self.retries, self.timeout_s = max_tokens, retries, timeout_s
        self.dtype = self.bundle.model.dtype if dtype == "auto" else getattr(torch, dtype)
        self.version = -1
        self.sampled_tokens = self.resent = 0
        self.exchange = Exchange(self.bundle, finite=router_url is not None)
        self._folder: WeightFolder | None = None
        self.weights_url: str | None = None
        """Address of the first rank from which servers download weights; None on other ranks, and for a folder."""
        self._thread: RequestThread[int, Generation] = RequestThread(concurrency)
        self._resources = ExitStack()
        self._resources.callback(self._thread.close)
        try:
            weights = iter(()) if urls else policy.weights()
            self.urls, self.key = self._first_rank_does(
                lambda: self._start(urls, weights, settings, python), weights
            )
            self._thread.call(self._open())
            self._first_rank_does(
                lambda: self._make_folder(transfer, weights_folder, serve_address), iter(())
            )
            router = router_url and Router(address(router_url), self._session, timeout_s)
            self._pool = ServerPool(
                [Server(url, self._session, timeout_s) for url in self.urls],
                Requirements(
                    self.bundle,
                    self.dtype,
                    max_tokens,
                    pulls=transfer == "pull" or serve_address is not None,
                    adapters=self._adapters,
                ),
                timeout_s=timeout_s,
                retries=retries,
                probe_s=probe_s,
                probe_failures=probe_failures,
                router=router or None,
                rank=rank(),
                ranks=world_size(),
            )
            self._resources.callback(lambda: self._thread.call(self._pool.end()))
            self._resources.callback(self.release)
            all_ranks_do(lambda: self._thread.call(self._pool.check()))
            self._pool.note_checked()
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        urls: Sequence[str],
        weights: Iterator[tuple[str, Tensor]],
        settings: Json | None,
        python: str | None,
    ) -> tuple[list[str], str | None]:
        """Start a server on the first rank where there is none; return addresses and key."""
        if urls:
            return [address(url) for url in urls], os.environ.get("VLLM_API_KEY")
        process = ServerProcess(
            self.bundle,
            weights,
            max_tokens=self.max_tokens,
            dtype=self.dtype,
            timeout_s=self.timeout_s,
            settings=settings or {},
            python=python,
        )
        self._resources.callback(process.close)
        return [process.url], process.key

    def _make_folder(
        self, transfer: TransferName, place: str | None, serve_address: str | None
    ) -> None:
        """Make the folder of weights on the first rank, and serve it where servers pull."""
        server = None
        if transfer == "pull" or serve_address is not None:
            server = self._thread.call(serve(serve_address, self.urls[0]))
            self._resources.callback(lambda: self._thread.call(server.close()))
            self.weights_url = server.url
        self._folder = WeightFolder(self.bundle, place, adapters=self._adapters, server=server)
        self._resources.callback(self._folder.remove)

    async def _open(self) -> None:
        headers = {"Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        self._session = aiohttp.ClientSession(
            # a kept connection may end just before a request
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers=headers,
            auto_decompress=False,
        )
        self._resources.callback(lambda: self._thread.call(self._session.close()))

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

        return values_of([0], all_ranks_do(own))[0]

    # ---- weights

    def load_weights(self, version: int) -> None:
        """Hand the policy's present weights to every server that answers. All ranks have to call it.

        Raises:
            RolloutError: No server could load them.
        """
        weights = self._policy.weights(adapters=self._adapters)
        self.release()
        self._thread.call(self._pool.end())
        # no rank samples any more
        gather_over_ranks(None)
        written, ready = self._first_rank_does(
            lambda: self._publish_weights(version, weights), weights
        )
        self.version = version
        self._thread.call(self._pool.begin(written, ready))

    def _publish_weights(
        self, version: int, weights: Iterator[tuple[str, Tensor]]
    ) -> tuple[WrittenWeights, list[str]]:
        """Write the weights and have all servers load them; return them and the servers that did."""
        assert self._folder is not None
        written = self._folder.write(weights, version=version)
        return written, self._thread.call(self._pool.load(written))

    @property
    def replicas(self) -> list[str]:
        """Addresses of the servers, each of which has a model of its own."""
        return self.urls

    @contextmanager
    def only(self, replica: str) -> Iterator[None]:
        """Send requests to one of the servers alone; see `HasReplicas`."""
        self._pool.only = replica
        try:
            yield
        finally:
            self._pool.only = None

    # ---- responses

    def submit(self, requests: Sequence[GenerationRequest], *, keep: bool) -> None:
        """Send requests; see `RolloutEngine`.

        Raises:
            ValueError: A request has more tokens than `max_tokens`, or leaves out parts of its images.
        """
        for request in requests:
            check_request(request, max_tokens=self.max_tokens)
        self._thread.call(self._place(requests))
        for request in requests:
            self._thread.submit(request.session, partial(self._response, request))

    def collect(self, *, wait: bool = True) -> list[tuple[int, Generation]]:
        """Return the responses since the last call.

        Args:
            wait: Wait for at least one where any is under way.

        Raises:
            RolloutError: A request was refused or failed too often, or no server answers.
        """
        generations = []
        for session, response in self._thread.collect(wait=wait):
            if isinstance(response, Exception):
                self.release()
                raise response
            self.sampled_tokens += len(response.ids)
            generations.append((session, response))
        return generations

    def release(self) -> None:
        """Cancel the requests under way, which their servers abort, and forget all sessions."""
        self._thread.cancel()
        self._thread.call(self._forget())

    def sleep(self) -> None:
        """Cancel the requests under way; the servers keep their memory."""
        self.release()

    def close(self) -> None:
        """End a server that the engine has started, and remove the weights that it has written."""
        self._resources.close()

    async def _place(self, requests: Sequence[GenerationRequest]) -> None:
        self._pool.routing.place(requests)

    async def _forget(self) -> None:
        self._pool.routing.forget()

    async def _response(self, request: GenerationRequest) -> Generation:
        """Return the response to a request.

        Raises:
            RolloutError: It was refused, or failed too often.
        """
        body = self.exchange.body(request, adapter=self._pool.weights.adapter)
        max_bytes, session = self.exchange.max_bytes(request), f"{rank()}-{request.session}"
        budget = Budget(self.retries, self.timeout_s)
        refusals: dict[str, str] = {}
        failed: set[str] = set()
        while True:
            server = await self._pool.server_for(request.session, refusals=refusals, failed=failed)
            loss_count = server.loss_count
            try:
                answer = await server.respond(
                    body, timeout_s=self.timeout_s, max_bytes=max_bytes, session=session
                )
                generation = self.exchange.generation(
                    answer, request, label=self._pool.weights.label, version=self.version
                )
            except ServerError as error:
                failure: ServerError = error
            else:
                self._pool.note_response(server)
                return generation
            if failure.status == 404 and "model" in body:
                failure = UnavailableError("it has lost the adapters")
            self._pool.note_failure(server, failure, loss_count=loss_count)
            self.resent += 1
            if failure.refuses:
                refusals[server.url] = str(failure)
                continue
            if not failure.is_busy:
                failed.add(server.url)
            if budget.spend(failure, answered_at=self._pool.answered_at):
                raise RolloutError(
                    f"rollout.engine.retries={self.retries}: a request failed {budget.attempts} times, the last time "
                    f"at {server.url} ({failure}); see that server's log"
                )
            await pause(budget.attempts - 1, request.seed, timeout_s=self.timeout_s)
