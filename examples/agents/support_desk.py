"""The support desk as an agent program: the tools and rules of `env=support_desk`, played over HTTP.

It asks one request after the other, so its trajectories are those of `env=support_desk env.prompt_format=native`: the
same prompts, the same sampled tokens, the same rewards. A policy can be trained in one and used in the other.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from ragen_pl.envs.support_desk import SupportDesk

# as in conf/env/support_desk.yaml; a task may have other values
SETTINGS: dict[str, Any] = {
    "max_turns": 6,
    "invalid_ends": True,
    "desk": {"rules": 2, "requests": 1, "orders": 1, "grant_fraction": 0.45, "wrong_cost": 0.1},
}


def ask(messages: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the id of a response and its choice."""
    body = {"model": "policy", "messages": messages, "tools": SupportDesk.tool_schemas}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        completion = json.load(answer)
    return completion["id"], completion["choices"][0]


def play(seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Play an episode and return its result."""
    desk = SupportDesk(**settings["desk"])
    observation, _ = desk.reset(seed=seed)
    messages = [
        {"role": "system", "content": desk.rules},
        {"role": "user", "content": observation},
    ]
    result: dict[str, Any] = {"success": False, "rewards": {}, "invalid": []}
    for _ in range(settings["max_turns"]):
        response, choice = ask(messages)
        message = choice["message"]
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            # the trainer takes env.format_penalty for it
            result["invalid"].append(response)
            if settings["invalid_ends"]:
                break
            messages.append({"role": "user", "content": "error: expected a tool call"})
            continue
        # one action a turn; the other calls get an answer too
        first, *others = calls
        arguments = json.loads(first["function"]["arguments"])
        action = {"name": first["function"]["name"], "arguments": arguments}
        shown, _, over, _, info = desk.step(json.dumps(action, ensure_ascii=False))
        messages.append({"role": "tool", "tool_call_id": first["id"], "content": shown})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "error: not carried out"}
            for call in others
        ]
        result["rewards"][response] = dict(info["reward_parts"])
        result["success"] = info["success"]
        if not info["action_is_valid"]:
            result["invalid"].append(response)
        if over or (settings["invalid_ends"] and not info["action_is_valid"]):
            break
    return result


def episode(task: dict[str, Any] | None) -> dict[str, Any]:
    """Play an episode of a task, for `env.function`, and return its result."""
    return play(int(os.environ["RAGEN_SEED"]), SETTINGS | (task or {}))


if __name__ == "__main__":
    result = episode(json.loads(os.environ["RAGEN_TASK"]))
    Path(os.environ["RAGEN_RESULT"]).write_text(json.dumps(result))
