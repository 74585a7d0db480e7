r"""Two agents of one policy: a lead who answers, and a scout who sees what the lead does not.

The lead writes to the scout, the scout sees a letter and reports, and the lead answers with the report alone. The
answer is right if it has the letter more often than the other one. Each agent has a conversation of its own; the
scout's is a sample of its own, and its report is credited with the lead's reward besides its own.

    PYTHONPATH=examples/agents python -m ragen_pl.fit env=program env.function=two_agents.play \
        env.tasks=two_agents.tasks
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

LETTERS = ("a", "o")
tasks = [{"letter": letter} for letter in LETTERS]
REPORT_REWARD = 0.5


class Agent:
    """A conversation with the policy under its own instructions."""

    def __init__(self, instructions: str) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}]

    def ask(self, text: str) -> tuple[str, str]:
        """Say something; return the id of the response and its words."""
        self.messages.append({"role": "user", "content": text})
        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps({"model": "policy", "messages": self.messages}).encode(),
            {
                "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            completion = json.load(answer)
        message = completion["choices"][0]["message"]
        self.messages.append(message)
        return completion["id"], message["content"]


def prefers(text: str, letter: str) -> bool:
    """Return whether a text has a letter more often than each of the others."""
    return all(text.count(letter) > text.count(other) for other in LETTERS if other != letter)


def play(task: dict[str, str]) -> dict[str, Any]:
    """Play an episode and return its result."""
    lead = Agent("you lead. ask the scout, then answer.")
    scout = Agent("you scout. report the letter.")
    _, question = lead.ask("the scout waits.")
    report_id, report = scout.ask(f"letter {task['letter']} . {question}")
    _, answer = lead.ask(f"report {report}")
    right = prefers(answer, task["letter"])
    reported = REPORT_REWARD * prefers(report, task["letter"])
    return {
        "reward": float(right),
        "success": right,
        "rewards": {report_id: {"report": reported}},
    }
