"""Pages in a browser without a window, and a record of an episode to show in them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

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
    flags = ["--headless", "--disable-gpu", f"--user-data-dir={profile}", *arguments]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--no-sandbox")
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", address], capture_output=True, text=True, timeout=60
    )
    return done.stdout


in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian: apt install chromium)"
)
