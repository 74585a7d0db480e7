"""Routing: the server of each session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from math import ceil

from ragen_pl.engines.protocol import GenerationRequest
from ragen_pl.engines.vllm_server.server import Server


class Routing:
    """Home servers of sessions, which keep their keys and values.

    A session's first request goes to the server with the fewest sessions of this process. Members of a group share
    their first prompt and go to one server, as far as all servers have equally many sessions then. Later requests go
    to the same server. While it is not ready, another one stands in.

    Args:
        servers: All servers.
        rank: Number of this process, which decides among servers with equally many sessions: processes with few
            sessions use different servers.
        ranks: Number of processes.
    """

    def __init__(self, servers: Sequence[Server], *, rank: int = 0, ranks: int = 1) -> None:
        first = rank * len(servers) // ranks
        self._servers = [*servers[first:], *servers[:first]]
        self.forget()

    def forget(self) -> None:
        """Forget all sessions."""
        self._homes: dict[int, Server] = {}
        self._stand_ins: dict[int, Server] = {}
        self._latest: dict[int, Server] = {}
        self._sessions: Counter[Server] = Counter()

    def place(self, requests: Sequence[GenerationRequest]) -> None:
        """Choose the home of each new session, given the first requests of all that begin now."""
        new = [request for request in requests if request.session not in self._homes]
        usable = [server for server in self._servers if server.is_ready] or self._servers
        limit = ceil((len(self._homes) + len(new)) / len(usable))
        for request in new:
            home = self._latest.get(request.group) if request.group is not None else None
            if home is None or home not in usable or self._sessions[home] >= limit:
                home = min(usable, key=self._sessions.__getitem__)
            self._homes[request.session] = home
            self._sessions[home] += 1
            if request.group is not None:
                self._latest[request.group] = home

    def server_of(self, session: int, *, among: Set[Server]) -> Server:
        """Return the server for a request of a session.

        Args:
            session: Session.
            among: Servers that can take it, at least one.
        """
        for server in (self._homes.get(session), self._stand_ins.get(session)):
            if server is not None and server in among:
                return server
        usable = (server for server in self._servers if server in among)
        stand_in = min(usable, key=lambda server: len(server.responses))
        self._stand_ins[session] = stand_in
        return stand_in
