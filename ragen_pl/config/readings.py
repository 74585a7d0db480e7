"""Names of the diagnostics that an alarm may read, collected from the modules that compute them.

A module declares its names in the constant `READINGS`. It is read from the source: importing the module
would import torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PACKAGES = ("metrics", "callbacks")


@cache
def declared_readings() -> tuple[str, ...]:
    """Return the names of all readings; some are patterns, such as `action/*`."""
    package = Path(__file__).parents[1]
    files = [file for name in _PACKAGES for file in sorted((package / name).glob("*.py"))]
    return tuple(name for file in files for name in _readings_in(file))


def _readings_in(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.AnnAssign) or node.value is None:
            continue
        if isinstance(node.target, ast.Name) and node.target.id == "READINGS":
            yield from ast.literal_eval(node.value)
