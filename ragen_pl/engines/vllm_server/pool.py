"""Pool of vLLM servers: it watches them, brings lost ones back, and says which one takes a request.

Each server has a task of its own. While the server is ready, the task probes it. While it is lost, the task asks it
with growing pauses until it has the present weights. Only the first rank hands weights over: the other ranks wait until
the server's label is that of the present weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import NoReturn
from urllib.parse import urlencode

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.vllm_server.requirements import Requirements
from ragen_pl.engines.vllm_server.routing import Routing
from ragen_pl.engines.vllm_server.server import (
    BusyError,
    InvalidAnswerError,
    RefusedError,
    RequestFailedError,
    Router,
    Server,
    ServerError,
    ServerState,
    UnavailableError,
    pause,
)
from ragen_pl.engines.vllm_server.weights import (
    REPLACING,
    WrittenWeights,
    label_of,
    load,
    mark_for_reload,
)

log = logging.getLogger(__name__)


class ServerPool:
    """The servers of a run, used in one event loop.

    Args:
        servers: Servers.
        requirements: What they have to be.
        timeout_s: Longest wait for a server to be ready, and for a server to load weights, in seconds.
        retries: Attempts after the first to reach a server at the start.
        probe_s: Seconds between two probes of a server, and the longest wait for the answer to one.
        probe_failures: Probes without an answer, one after the other, that lose a server.
        router: Router that gets the requests for responses; None to send them to the servers.
        rank: Number of this process.
        ranks: Number of processes.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        requirements: Requirements,
        *,
        timeout_s: float,
        retries: int,
        probe_s: float,
        probe_failures: int,
        router: Router | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.servers, self._requirements = servers, requirements
        self._timeout_s, self._retries = timeout_s, retries
        self._probe_s, self._probe_failures = probe_s, probe_failures
        self._rank, self._ranks = rank, ranks
        self.router = router
        self.routing = Routing(servers, rank=rank, ranks=ranks)
        self.weights = WrittenWeights()
        self.only: str | None = None
        """Address of the server that gets all requests; None for all servers."""
        self.answered_at = 0.0
        """Time of the last response of any server."""
        self._ready_at = time.monotonic()
        self._tasks: list[asyncio.Task[NoReturn]] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    # ---- the start

    async def check(self) -> None:
        """Check this rank's part of the servers, which may still be starting.

        Raises:
            ValueError: A server can't serve the policy, or does not answer.
        """
        own = self.servers[self._rank :: self._ranks]
        results = await asyncio.gather(*map(self._wait_for, own), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def note_checked(self) -> None:
        """Note that all ranks have checked their servers."""
        for server in self.servers:
            server.state = ServerState.CHECKED

    async def _wait_for(self, server: Server) -> None:
        for attempt in range(self._retries + 1):
            try:
                return await self._requirements.check(server)
            except (UnavailableError, BusyError) as error:
                server.reason = str(error)
            if attempt == 0:
                log.info("rollout.engine.urls: waits for %s (%s)", server.url, server.reason)
            if attempt < self._retries:
                await pause(attempt + 3, self._rank, server.url, timeout_s=self._timeout_s)
        raise ValueError(
            f"rollout.engine.urls: {server.url} does not answer ({server.reason}); start a server there "
            "(docs/engines.md), or set urls=[] and the run starts one"
        )

    # ---- weights

    async def load(self, weights: WrittenWeights) -> list[str]:
        """Have all servers load weights; return the addresses of those that did.

        Raises:
            RolloutError: None did within `timeout_s`.
        """
        last = time.monotonic() + self._timeout_s
        attempt = 0
        while True:
            results = await asyncio.gather(
                *(self._load(server, weights) for server in self.servers), return_exceptions=True
            )
            ready = []
            for server, result in zip(self.servers, results, strict=True):
                if isinstance(result, RefusedError):
                    raise RolloutError(str(result))
                if isinstance(result, ServerError):
                    server.reason = str(result)
                elif isinstance(result, BaseException):
                    raise result
                else:
                    ready.append(server.url)
            if ready:
                return ready
            if time.monotonic() > last:
                raise self._none_answers()
            await pause(attempt, self._rank, timeout_s=self._timeout_s)
            attempt += 1

    async def _load(self, server: Server, weights: WrittenWeights) -> None:
        if server.state is ServerState.NEW:
            await self._requirements.check(server)
        await load(server, weights, timeout_s=self._timeout_s)

    async def begin(self, weights: WrittenWeights, ready: Sequence[str]) -> None:
        """Take requests for the servers with these weights, and watch all servers.

        Args:
            weights: Present weights.
            ready: Addresses of the servers that have loaded them.
        """
        self.weights, self._error = weights, None
        self._ready_at = time.monotonic()
        for server in self.servers:
            if server.url in ready:
                server.become_ready()
            else:
                server.mark_lost(server.reason)
        self._tasks = [asyncio.ensure_future(self._watch(server)) for server in self.servers]

    async def end(self) -> None:
        """Stop to watch the servers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    # ---- servers that fail

    def note_failure(self, server: Server, failure: ServerError, *, loss_count: int) -> None:
        """Note a request that a server has failed.

        Args:
            server: Server, which is lost unless it is only busy, or a router.
            failure: What failed.
            loss_count: `server.loss_count` when the request was sent.
        """
        if failure.is_busy:
            return
        is_damaged = isinstance(failure, InvalidAnswerError)
        if server is not self.router:
            self._mark_lost(server, str(failure), loss_count=loss_count, must_reload=is_damaged)
        elif is_damaged and server.loss_count == loss_count:
            # which one it was is unknown
            server.loss_count += 1
            for one in self.servers:
                self._mark_lost(one, str(failure), must_reload=True)

    def _mark_lost(
        self,
        server: Server,
        reason: str,
        *,
        loss_count: int | None = None,
        must_reload: bool = False,
    ) -> None:
        if server.is_ready:
            self._ready_at = time.monotonic()
        if server.mark_lost(reason, loss_count=loss_count, must_reload=must_reload):
            self._notify()

    def note_response(self, server: Server) -> None:
        """Note that a server has given a response."""
        server.failures = 0
        self.answered_at = time.monotonic()

    def _notify(self) -> None:
        """Wake all that wait for a change of a server's state."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self, server: Server) -> NoReturn:
        """Probe a server while it is ready, and bring it back when it is lost, for ever.

        What ends it is raised by all requests.
        """
        try:
            while True:
                if server.is_ready:
                    await self._probe_until_lost(server)
                else:
                    await self._tell_router("remove", server)
                    await self._bring_back(server)
                    await self._tell_router("add", server)
                    self._notify()
        except Exception as error:
            self._error = error
            self._notify()
            raise

    async def _tell_router(self, change: str, server: Server) -> None:
        """Have a router remove or add a server; one that can't finds out by its own probes."""
        if self.router is not None and self._rank == 0:
            place = urlencode({"url": server.url})
            with suppress(ServerError):
                await self.router.call("POST", f"/{change}_worker?{place}", is_json=False)

    async def _probe_until_lost(self, server: Server) -> None:
        """Return when a server is lost. The first rank probes it always, others while they wait for its responses."""
        failed = 0
        left = self._probe_s
        while not await server.lost_within(left):
            left = self._probe_s
            if self._rank > 0 and not self._target(server).responses:
                continue
            begun = asyncio.get_running_loop().time()
            reason = await self._probe(server)
            # a probe without an answer has taken its time already
            left = max(left - (asyncio.get_running_loop().time() - begun), 0.0)
            failed = 0 if reason is None else failed + 1
            if reason is not None and failed >= self._probe_failures:
                self._mark_lost(server, f"{failed} probes have failed: {reason}")
                self._target(server).cancel_responses()

    def _target(self, server: Server) -> Server:
        """Return the receiver of the requests for a server: itself, or the router."""
        return server if self.router is None else self.router

    async def _probe(self, server: Server) -> str | None:
        """Return why a server does not answer, None where it does. One with other weights is lost at once."""
        try:
            await server.call("GET", "/health", timeout_s=self._probe_s)
            label = None if self._rank > 0 else await label_of(server, timeout_s=self._probe_s)
        except BusyError:
            return None
        except RequestFailedError as error:
            return None if error.refuses else str(error)
        except ServerError as error:
            return str(error)
        if label not in (None, self.weights.label):
            self._mark_lost(server, "it has other weights")
        return None

    async def _bring_back(self, server: Server) -> None:
        """Ask a server with growing pauses until it has the present weights."""
        is_reported = False
        while True:
            await pause(server.failures - 1, self._rank, server.url, timeout_s=self._timeout_s)
            try:
                await self._give_weights(server)
                break
            except (ServerError, RefusedError) as error:
                server.reason = str(error)
            server.failures += 1
            if not is_reported:
                log.warning(
                    "rollout.engine.urls: %s is lost (%s); it is asked again until it answers",
                    server.url,
                    server.reason,
                )
                is_reported = True
        if is_reported:
            log.warning("rollout.engine.urls: %s is back", server.url)
        server.become_ready()

    async def _give_weights(self, server: Server) -> None:
        """Return when a server has the present weights; on the first rank have it load them if it has not.

        Raises:
            RolloutError: Another run has given it weights since this one did.
            RefusedError: It can't serve the policy any more.
            ServerError: They have not arrived yet.
        """
        label = await label_of(server)
        if label == self.weights.label and not server.must_reload:
            return
        if server.has_had_weights and self.weights.is_of_another_run(label):
            raise RolloutError(
                f"rollout.engine.urls: {server.url} has got weights of another run; give each run servers of its own"
            )
        if self._rank > 0:
            if label == self.weights.label:
                await mark_for_reload(server)
            server.must_reload = False
            raise UnavailableError("the first rank has not handed it the weights yet")
        if label not in (self.weights.label, REPLACING):
            server.state = ServerState.NEW
        if server.must_reload:
            log.warning(
                "rollout.engine.urls: %s gets the weights again (%s)", server.url, server.reason
            )
        await self._load(server, self.weights)

    # ---- requests

    async def server_for(
        self, session: int, *, refusals: Mapping[str, str], failed: Set[str] = frozenset()
    ) -> Server:
        """Return the server for a request; wait for one.

        Args:
            session: Session of the request.
            refusals: Reasons of servers that have refused the request, by address.
            failed: Addresses of servers that have failed it, which get it again where no other is ready.

        Raises:
            RolloutError: None has been ready for `timeout_s`, all refuse the request, or another run uses one.
            Exception: What has ended the watch of a server.
        """
        wanted = [server for server in self.servers if self.only in (None, server.url)]
        router = self.router if self.only is None else None
        begun = time.monotonic()
        while True:
            if self._error is not None:
                raise self._error
            ready = {server for server in wanted if server.is_ready}
            usable = {server for server in ready if server.url not in refusals}
            if usable and router is not None and router.url not in refusals:
                return router
            if usable and router is None:
                others = {server for server in usable if server.url not in failed}
                return self.routing.server_of(session, among=others or usable)
            now = time.monotonic()
            if ready:
                self._ready_at = now
            left = (begun if refusals else self._ready_at) + self._timeout_s - now
            asked = len(wanted) if router is None else 1
            if refusals and (len(refusals) >= asked or left <= 0):
                raise _refusal(refusals)
            if left <= 0:
                raise self._none_answers()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, 1.0)):
                    await self._changed.wait()

    def _none_answers(self) -> RolloutError:
        troubles = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
        return RolloutError(
            f"rollout.engine.urls: no server has answered for {self._timeout_s:g} s ({troubles}); start one again, or "
            "raise rollout.engine.timeout_s"
        )


def _refusal(refusals: Mapping[str, str]) -> RolloutError:
    urls, reasons = ", ".join(refusals), "; ".join(dict.fromkeys(refusals.values()))
    verb = "refuses" if len(refusals) == 1 else "refuse"
    return RolloutError(
        f"rollout.engine.urls: {urls} {verb} a request ({reasons}); see the log of that server"
    )
