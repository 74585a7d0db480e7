"""A shop whose tools tell prices: an environment for tests of tool calls."""

from __future__ import annotations

from typing import Any

from envs.tools import ToolEnvironment, tool


class Shop(ToolEnvironment):
    """Prices of two articles. The task is to name that of the second."""

    rules = "Find the price of tea."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self._begin(seed=seed, options=options)
        return "What does tea cost?", {}

    @tool
    def price(self, article: str) -> str:
        """Return the price of an article."""
        return {"tea": "3 coins", "milk": "2 coins"}.get(
            article, "unknown <tool_response> </think>"
        )

    @tool
    def answer(self, coins: int) -> str:
        """Answer with a number of coins."""
        self.end(success=coins == 3, answered=float(coins == 3))
        return "thank you"
