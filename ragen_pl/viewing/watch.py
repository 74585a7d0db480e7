"""The live view: a server on the loopback interface that shows runs while they train.

It only reads the runs' folders. A run does not know of it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from ragen_pl.base.access import refusal
from ragen_pl.metrics.shown import CHARTS, FAMILIES, REWARD_PART
from ragen_pl.viewing.page import filled, json_for_script, script_of, text_of
from ragen_pl.viewing.run_files import (
    differences,
    drops,
    episodes_page,
    find_runs,
    outcome_counts,
    overview,
    read_marks,
    read_references,
    read_rows,
    recorded,
)

HOST = "127.0.0.1"
# ports that are tried after one that is taken
_TRIED = 20
_MAX_COMPARED = 50
_Read = TypeVar("_Read")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# The view loads its own script and its own data; a page of episodes runs its own script in an origin of its own.
_VIEW = "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; frame-src 'self'"
_EPISODES = "sandbox allow-scripts allow-popups"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class RunWatch:
    """Handlers of the live view.

    Args:
        places: Run folders, and folders that have runs below them.
        episodes: Approximate number of episodes of a page.
    """

    def __init__(self, places: list[Path], *, episodes: int = 64) -> None:
        self.places, self.episodes = places, episodes

    def application(self) -> web.Application:
        """Return the server's application."""
        application = web.Application(middlewares=[local_only])
        application.router.add_get("/", self.view)
        application.router.add_get("/watch.js", self.script)
        application.router.add_get("/runs", self.runs)
        application.router.add_get("/run", self.run)
        application.router.add_get("/differences", self.differences)
        application.router.add_get("/episodes", self.page)
        application.router.add_get("/outcomes", self.outcomes)
        return application

    def find(self) -> dict[str, Path]:
        """Return the folders of all runs by name. A request names a run of these, and never a path."""
        found: dict[str, Path] = {}
        for place in self.places:
            for name, folder in find_runs(place).items():
                free = name if found.get(name, folder) == folder else str(folder)
                found[free] = folder
        return found

    async def view(self, request: web.Request) -> web.Response:
        """Return the view's page."""
        page = filled("watch.html", {"style": text_of("elements.css")})
        return _text(page, "text/html", policy=_VIEW)

    async def script(self, request: web.Request) -> web.Response:
        """Return the view's script, with the table of what it shows."""
        shown = {"CHARTS": CHARTS, "FAMILIES": FAMILIES, "PART": REWARD_PART}
        table = "".join(f"const {name} = {json_for_script(it)};\n" for name, it in shown.items())
        return _text(table + script_of("watch.js"), "text/javascript", policy=_VIEW)

    async def runs(self, request: web.Request) -> web.Response:
        """Return a line of the table for each run, the newest first."""

        def read() -> list[dict[str, Any]]:
            return [
                {"name": name, "chosen": folder in self.places} | overview(folder)
                for name, folder in self.find().items()
            ]

        return _json(await asyncio.to_thread(read))

    async def run(self, request: web.Request) -> web.Response:
        """Return a run's marks, recorded episodes, and its rows from the last one that is known on.

        The last row is sent again, since it may have been completed. Of a run that was continued from an earlier
        checkpoint all rows are sent: it has fewer, or others again.
        """
        folder = await self._folder(request)
        known, seen = _number(request, "known"), _number(request, "drops")

        def read() -> dict[str, Any]:
            before, rows = drops(folder), read_rows(folder)
            goes_on = seen == before == drops(folder) and 0 < known <= len(rows)
            start = known - 1 if goes_on else 0
            marks = read_marks(folder, rows)
            return {
                "start": start,
                "drops": before,
                "rows": rows[start:],
                "marks": marks,
                "references": read_references(folder),
                "recorded": recorded(folder),
            }

        return _json(await asyncio.to_thread(read))

    async def differences(self, request: web.Request) -> web.Response:
        """Return the settings that differ between the named runs."""
        names = request.query.getall("run", [])[:_MAX_COMPARED]
        found = await asyncio.to_thread(self.find)
        folders = [found[name] for name in names if name in found]
        return _json(await asyncio.to_thread(differences, folders))

    async def page(self, request: web.Request) -> web.Response:
        """Return the trajectory page of recorded episodes."""
        folder, name = await self._records(request)
        title = f"{request.query['run']}/{name}"
        page = await _read(episodes_page, folder, name, title=title, episodes=self.episodes)
        return _text(page, "text/html", policy=_EPISODES)

    async def outcomes(self, request: web.Request) -> web.Response:
        """Return the number of recorded episodes of each kind of outcome."""
        return _json(await _read(outcome_counts, *await self._records(request)))

    async def _records(self, request: web.Request) -> tuple[Path, str]:
        folder = await self._folder(request)
        name = request.query.get("records", "")
        if name not in await asyncio.to_thread(recorded, folder):
            raise web.HTTPNotFound(text="there are no such records")
        return folder, name

    async def _folder(self, request: web.Request) -> Path:
        found = await asyncio.to_thread(self.find)
        if request.query.get("run") not in found:
            raise web.HTTPNotFound(text="there is no such run")
        return found[request.query["run"]]


@web.middleware
async def local_only(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer only requests of a page of this server, or of a person.

    Pages of other origins may link to the view but not read from it.
    """
    is_link = request.headers.get("Sec-Fetch-Dest") == "document" and request.path == "/"
    reason = refusal(request.headers, same_origin=True, is_link=is_link)
    if reason is not None:
        raise web.HTTPForbidden(text=reason, headers=_HEADERS)
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(_HEADERS)
        raise
    response.headers.update(_HEADERS)
    return response


async def _read(read: Callable[..., _Read], *arguments: object, **named: object) -> _Read:
    """Read records in a thread; records that are damaged or somebody else's are refused."""
    try:
        return await asyncio.to_thread(read, *arguments, **named)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise web.HTTPUnprocessableEntity(text=f"{type(error).__name__}: {error}"[:500]) from error


def _text(text: str, kind: str, *, policy: str) -> web.Response:
    headers = {"Content-Security-Policy": policy}
    return web.Response(text=text, content_type=kind, charset="utf-8", headers=headers)


def _json(value: object) -> web.Response:
    return web.Response(text=json_for_script(value), content_type="application/json")


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def listen(port: int) -> socket.socket:
    """Return a socket on the loopback interface, at a port or the next free one.

    Args:
        port: 0 for any free one.

    Raises:
        OSError: None of the ports is free.
    """
    last = min(port + _TRIED, 65535) if port else 0
    for candidate in range(port, last + 1):
        try:
            return socket.create_server((HOST, candidate))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or candidate == last:
                raise
    raise AssertionError("unreachable")


def serve(watch: RunWatch, server: socket.socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM."""
    web.run_app(
        watch.application(),
        sock=server,
        print=lambda *_: None,
        access_log=None,
        shutdown_timeout=1.0,
    )
