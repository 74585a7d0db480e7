"""Model families whose chat template takes tools."""

from __future__ import annotations

import functools
from typing import Any

from support.episodes.shop import Shop
from support.models.family_models import tiny

import envs  # noqa: F401 - registers the environments
from ragen_pl.models.bundle import ModelBundle

# families whose template writes tool calls
TAKING = ("qwen2_5", "qwen3", "qwen3_5", "llama3_2", "gemma4", "qwen3_vl", "lfm2_vl")
TOOLS = Shop.tool_schemas


@functools.cache
def bundle_of(name: str) -> ModelBundle:
    bundle = tiny(name)
    bundle.calls_tools = True
    return bundle


def function_call(number: int, name: str, **arguments: object) -> dict[str, Any]:
    return {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
