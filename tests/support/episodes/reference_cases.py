"""Reference cases of methods, computed by code of others (`tests/golden/methods.json`)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

FILE = Path(__file__).parents[2] / "golden" / "methods.json"


@cache
def _read() -> list[dict]:
    return json.loads(FILE.read_text())["cases"]


def reference_cases(*kinds: str) -> list[dict]:
    """Return the cases of some kinds, each with `inputs` and `outputs`."""
    found = [case for case in _read() if case["kind"] in kinds]
    assert found
    return found
