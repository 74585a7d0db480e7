"""Shop assistant of LangGraph. The two tools of one response run side by side."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

TASK = json.loads(os.environ["RAGEN_TASK"])


@tool
def price(item: str) -> str:
    """Return the price of an item."""
    return str(TASK["prices"].get(item, "no such item"))


@tool
def stock(item: str) -> str:
    """Return how many of an item are in stock."""
    return str(TASK["stock"].get(item, "no such item"))


def main() -> str:
    """Return the assistant's last words."""
    model = ChatOpenAI(model="policy").bind_tools([price, stock])

    def assistant(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("assistant", assistant)
    graph.add_node("tools", ToolNode([price, stock]))
    graph.add_edge(START, "assistant")
    graph.add_conditional_edges("assistant", tools_condition)
    graph.add_edge("tools", "assistant")
    begin = [
        {"role": "system", "content": "You answer questions about a shop. Use the tools."},
        {"role": "user", "content": TASK["question"]},
    ]
    end = graph.compile().invoke({"messages": begin}, {"recursion_limit": 12})
    return str(end["messages"][-1].content)


if __name__ == "__main__":
    right = str(TASK["answer"]) in main().split()
    result = {"reward": float(right), "success": right}
    Path(os.environ["RAGEN_RESULT"]).write_text(json.dumps(result))
