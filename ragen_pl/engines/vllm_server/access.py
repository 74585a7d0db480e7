"""ASGI middleware that asks for a key. A server of vLLM loads a copy of this file, so it imports nothing of ours.

vLLM's own `--api-key` leaves out the endpoints that replace weights and call methods of the server.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY_VARIABLE = "RAGEN_PL_SERVER_KEY"
"""Environment variable with the key."""
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class KeyRequired:
    """Passes on requests with the header `Authorization: Bearer KEY`; others get status 401.

    Args:
        app: Application behind it.
    """

    def __init__(self, app: Callable[[dict[str, Any], Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"This server needs the run's key."})

    def _has_key(self, scope: dict[str, Any]) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._wanted)
