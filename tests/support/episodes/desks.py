"""Settings of the support desk, an episode of a kind, and what its clerk says."""

from __future__ import annotations

from envs.support_desk import SupportDesk
from envs.support_desk_policy import Rule
from envs.tools import call_text

LARGE = {
    "rules": 7,
    "requests": 3,
    "orders": 4,
    "insist_fraction": 0.5,
    "lie_fraction": 0.5,
    "move_fraction": 0.5,
}
"""Settings in which everything happens."""


def say(text: str) -> str:
    return call_text("say", text=text)


def granted(desk: SupportDesk) -> bool:
    """Tell whether the episode is a plain refund of the full price without a code."""
    plain = not {Rule.CODE, Rule.USED} & set(desk.policy) and desk.requests[0].city is None
    return plain and not desk.broken_rules(desk.requests[0])
