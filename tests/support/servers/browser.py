"""Pages in a browser without a window, and a record of an episode to show in them."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

# for one that hangs
LIMIT_S = 1200
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def record(
    group: int, *, member: int = 0, success: bool = True, turns: int = 2, **changes: Any
) -> dict[str, Any]:
    pieces = ["<think>", "a", "</think>", ""]
    turn = {
        "observation": "ice", "images": ["images/a.png"], "prompt_text": "You: <image>go", "prompt_ids": [1, 2, 3],
        "prompt_images": ["images/a.png"], "response": "".join(pieces), "response_ids": [1, 2, 3, 4],
        "response_pieces": pieces,
        "logprobs": [-0.5] * 4, "spans": [3, 1, 3, 4], "entropy": 0.1, "think": "a", "actions": ["Up"], "valid": True,
        "effective": True, "hit_length_limit": False, "reward": 0.5, "temperature": 1.0, "info": {},
        "values": [0.1, 0.2, 0.3, 0.4], "advantages": [1.0, -2.0, 0.0, 0.5], "returns": [1.0] * 4,
        "loss_mask": [True] * 4, "advantage_mask": [False, True, False, True],
    }  # fmt: skip
    return {
        "schema": 2, "iteration": 3, "validation_set": None, "policy": "policy", "group": group, "member": member,
        "seed": 2**60 + 1, "status": "terminated", "success": success, "return": float(success), "difficulty": 2,
        "error": None, "turns": [turn | {"turn": k + 1} | changes for k in range(turns)],
        "final_images": ["images/a.png"],
    }  # fmt: skip


def browse(page: Path, *arguments: str, view: str = "") -> str:
    """Return the document of a file after its script has run."""
    return visit(f"{page.as_uri()}#{view}", *arguments, profile=page.parent / "profile")


def visit(address: str, *arguments: str, profile: Path) -> str:
    """Return the document of an address after its script has run."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *_flags(profile), *arguments, "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


@dataclass
class Visited:
    """What a page did in a browser.

    Attributes:
        requests: Addresses of all that it loaded, itself included.
        errors: Errors of the console, exceptions of its scripts and loads that failed.
        text: Its text, after its scripts have run.
    """

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    text: str = ""


def watched(addresses: Sequence[str], *, profile: Path, shows: str) -> dict[str, Visited]:
    """Visit pages with one browser, by Chromium's DevTools protocol.

    Args:
        addresses: Pages.
        profile: Folder for the browser's files.
        shows: JavaScript that is true once a page shows all; it is asked until it is.
    """
    assert CHROMIUM is not None
    profile.mkdir(parents=True, exist_ok=True)
    command = [CHROMIUM, *_flags(profile), "--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as browser:
        try:
            assert browser.stderr is not None
            line = next(line for line in browser.stderr if "DevTools listening on" in line)
            port = urlsplit(line.split()[-1]).port
            visits = _visits(f"http://127.0.0.1:{port}", addresses, shows)
            return asyncio.run(asyncio.wait_for(visits, LIMIT_S))
        finally:
            browser.kill()


async def _visits(server: str, addresses: Sequence[str], shows: str) -> dict[str, Visited]:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{server}/json/list") as answer:
            tabs = [one for one in await answer.json() if one["type"] == "page"]
        async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as tab:
            ids = itertools.count()
            visited = {address: Visited() for address in addresses}

            async def call(method: str, page: Visited, **parameters: object) -> dict[str, Any]:
                number = next(ids)
                await tab.send_json({"id": number, "method": method, "params": parameters})
                return await until(lambda message: message.get("id") == number, page)

            async def until(ends: Callable[[Any], bool], page: Visited) -> dict[str, Any]:
                while True:
                    message = await tab.receive_json(timeout=60)
                    _note(message, page)
                    if ends(message):
                        return dict(message)

            for domain in ("Page", "Network", "Runtime", "Log"):
                await call(f"{domain}.enable", Visited())
            for address, page in visited.items():
                await call("Page.navigate", page, url=address)
                await until(lambda message: message.get("method") == "Page.loadEventFired", page)
                while not page.text:
                    shown = f"{shows} ? document.body.innerText : ''"
                    done = await call("Runtime.evaluate", page, expression=shown)
                    # none of a page that leads to another one
                    page.text = done.get("result", {}).get("result", {}).get("value", "")
                    await asyncio.sleep(0 if page.text else 0.1)
            return visited


def _note(message: Mapping[str, Any], page: Visited) -> None:
    """Keep what a message of the browser says of a page."""
    params = message.get("params", {})
    match message.get("method"):
        case "Network.requestWillBeSent":
            page.requests.append(params["request"]["url"])
        case "Network.loadingFailed":
            page.errors.append(params["errorText"])
        case "Runtime.exceptionThrown":
            page.errors.append(str(params["exceptionDetails"]))
        case "Runtime.consoleAPICalled" if params["type"] == "error":
            page.errors.append(str(params["args"]))
        case "Log.entryAdded" if params["entry"]["level"] == "error":
            page.errors.append(params["entry"]["text"])


def _flags(profile: Path) -> list[str]:
    flags = ["--headless", "--disable-gpu", f"--user-data-dir={profile}"]
    # Chromium refuses its sandbox to root
    return [*flags, "--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else flags


in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian: apt install chromium)"
)
