"""Shop assistant of Pydantic AI."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic_ai import Agent

TASK = json.loads(os.environ["RAGEN_TASK"])
agent = Agent(
    "openai-chat:policy", system_prompt="You answer questions about a shop. Use the tools."
)


@agent.tool_plain
def price(item: str) -> str:
    """Return the price of an item."""
    return str(TASK["prices"].get(item, "no such item"))


@agent.tool_plain
def stock(item: str) -> str:
    """Return how many of an item are in stock."""
    return str(TASK["stock"].get(item, "no such item"))


if __name__ == "__main__":
    right = str(TASK["answer"]) in agent.run_sync(TASK["question"]).output.split()
    result = {"reward": float(right), "success": right}
    Path(os.environ["RAGEN_RESULT"]).write_text(json.dumps(result))
