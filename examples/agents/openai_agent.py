"""Shop assistant with two tools, with the `openai` package alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

from openai import OpenAI

TASK = json.loads(os.environ["RAGEN_TASK"])
MAX_CALLS = 6


def price(item: str) -> str:
    """Return the price of an item."""
    return str(TASK["prices"].get(item, "no such item"))


def stock(item: str) -> str:
    """Return how many of an item are in stock."""
    return str(TASK["stock"].get(item, "no such item"))


TOOLS = {"price": price, "stock": stock}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": function.__doc__,
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    }
    for name, function in TOOLS.items()
]


def carry_out(name: str, arguments: str) -> str:
    """Return the result of a tool call, or what is wrong with it."""
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


def main() -> str:
    """Return the assistant's last words."""
    client = OpenAI()
    messages = [
        {"role": "system", "content": "You answer questions about a shop. Use the tools."},
        {"role": "user", "content": TASK["question"]},
    ]
    for _ in range(MAX_CALLS):
        completion = client.chat.completions.create(
            model="policy", messages=messages, tools=SCHEMAS
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = carry_out(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    right = str(TASK["answer"]) in main().split()
    result = {"reward": float(right), "success": right}
    Path(os.environ["RAGEN_RESULT"]).write_text(json.dumps(result))
