"""Record the requests of the SDKs' programs for the tests that run without them: python tests/agents/record.py [NAME…].

It needs the environment of `make test-agents`, with tests/ on PYTHONPATH. What a program sends depends on the versions
of its packages only, since the policy is scripted.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
import threading
from typing import Any

import aiohttp
from aiohttp import web
from support.episodes.agent_cases import CASES, REQUESTS

from ragen_pl.agent_programs.environment import shared_server
from ragen_pl.agent_programs.serving.server import LOOPBACK

# no key, no machine
KEPT = ("accept", "content-type", "user-agent", "x-stainless-retry-count")
PACKAGES = {
    "openai": "openai",
    "langgraph": "langchain-openai",
    "openai_agents": "openai-agents",
    "pydantic_ai": "pydantic-ai-slim",
    "smolagents": "smolagents",
}


class Recorder:
    """Passes requests on to the endpoint and keeps them.

    Attributes:
        url: base URL for programs.
        requests: path, headers and body of each.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        ready = threading.Event()
        threading.Thread(target=self._run, args=(ready,), daemon=True).start()
        ready.wait()

    def _run(self, ready: threading.Event) -> None:
        asyncio.run(self._serve(ready))

    async def _serve(self, ready: threading.Event) -> None:
        app = web.Application(client_max_size=1 << 25)
        app.router.add_post("/{path:.*}", self._pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await asyncio.Event().wait()

    async def _pass_on(self, request: web.Request) -> web.Response:
        data = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append(
            {
                "path": request.path.removeprefix("/v1"),
                "headers": {name: headers[name] for name in KEPT if name in headers},
                "body": json.loads(data),
            }
        )
        url = shared_server(LOOPBACK).url.removesuffix("/v1") + request.path
        passed = {"Authorization": headers["authorization"], "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, data=data, headers=passed) as answer,
        ):
            body = await answer.read()
            return web.Response(body=body, status=answer.status, content_type=answer.content_type)


def main(names: list[str]) -> None:
    """Record the cases of these names."""
    REQUESTS.mkdir(exist_ok=True)
    recorder = Recorder()
    for name in names:
        recorder.requests.clear()
        trajectory, _ = CASES[name].play(variables={"OPENAI_BASE_URL": recorder.url})
        assert trajectory.error is None, trajectory.error
        package = PACKAGES[name.rpartition("_")[0].removesuffix("_responses")]
        record = {
            "package": f"{package} {importlib.metadata.version(package)}",
            "requests": recorder.requests,
        }
        (REQUESTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(name, len(recorder.requests), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
