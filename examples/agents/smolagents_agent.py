"""Shop assistant of smolagents. It writes its history anew in each step, so that each step is a sample of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

from smolagents import OpenAIModel, ToolCallingAgent, tool

TASK = json.loads(os.environ["RAGEN_TASK"])


@tool
def price(item: str) -> str:
    """Return the price of an item.

    Args:
        item: Name of the item.
    """
    return str(TASK["prices"].get(item, "no such item"))


@tool
def stock(item: str) -> str:
    """Return how many of an item are in stock.

    Args:
        item: Name of the item.
    """
    return str(TASK["stock"].get(item, "no such item"))


def main() -> str:
    """Return the assistant's answer."""
    agent = ToolCallingAgent(
        tools=[price, stock], model=OpenAIModel(model_id="policy"), max_steps=6
    )
    return str(agent.run(TASK["question"]))


if __name__ == "__main__":
    right = str(TASK["answer"]) in main().split()
    result = {"reward": float(right), "success": right}
    Path(os.environ["RAGEN_RESULT"]).write_text(json.dumps(result))
