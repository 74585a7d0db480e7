"""A picture in the question, one that a tool returns where the SDK can, and streamed answers; argv[1] names the SDK,
argv[2] the API."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

TASK = json.loads(os.environ.get("RAGEN_TASK", '{"pictures": []}'))
URLS = [f"data:image/png;base64,{picture}" for picture in TASK["pictures"]]
FILES = [base64.b64decode(picture) for picture in TASK["pictures"]]
QUESTION = "What is this?"
API = sys.argv[2] if len(sys.argv) > 2 else "chat"


def of_openai() -> str:
    from openai import OpenAI

    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    shown = {"type": "image_url", "image_url": {"url": URLS[0], "detail": "low"}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION}, shown]}]
    client = OpenAI()
    while True:
        with client.chat.completions.stream(
            model="policy", messages=messages, tools=tools, stream_options={"include_usage": True}
        ) as stream:
            completion = stream.get_final_completion()
        assert completion.usage.completion_tokens > 0
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        seen = {"type": "image_url", "image_url": {"url": URLS[1]}}
        messages.append(
            {
                "role": "tool",
                "tool_call_id": message.tool_calls[0].id,
                "content": [{"type": "text", "text": "seen"}, seen],
            }
        )


def of_langgraph() -> str:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def look(place: str) -> Any:
        """Look at a place."""
        return [
            {"type": "text", "text": "seen"},
            {"type": "image_url", "image_url": {"url": URLS[1]}},
        ]

    model = ChatOpenAI(model="policy", streaming=True).bind_tools([look])
    graph = StateGraph(MessagesState)
    graph.add_node("assistant", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([look]))
    graph.add_edge(START, "assistant")
    graph.add_conditional_edges("assistant", tools_condition)
    graph.add_edge("tools", "assistant")
    shown = {"type": "image", "base64": TASK["pictures"][0], "mime_type": "image/png"}
    begin = HumanMessage(content=[{"type": "text", "text": QUESTION}, shown])
    parts = [
        str(message.content)
        for message, _ in graph.compile().stream({"messages": [begin]}, stream_mode="messages")
        if message.type.startswith("AI") or message.type == "ai"
    ]
    return "".join(parts)


def of_smolagents() -> str:
    from PIL import Image
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def look(place: str) -> str:
        """Look at a place.

        Args:
            place: the place.
        """
        return "seen"

    agent = ToolCallingAgent(
        tools=[look], model=OpenAIModel(model_id="policy"), max_steps=4, stream_outputs=True
    )
    return str(agent.run(QUESTION, images=[Image.open(io.BytesIO(FILES[0]))]))


def of_openai_agents() -> str:
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    @function_tool
    def look(place: str) -> str:
        """Look at a place."""
        return "seen"

    set_tracing_disabled(True)
    if API == "chat":
        set_default_openai_api("chat_completions")

    async def run() -> str:
        agent = Agent(name="assistant", tools=[look], model="policy")
        shown = {"type": "input_image", "image_url": URLS[0], "detail": "auto"}
        content = [{"type": "input_text", "text": QUESTION}, shown]
        streamed = Runner.run_streamed(agent, [{"role": "user", "content": content}])
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)

    return asyncio.run(run())


def of_pydantic_ai() -> str:
    from pydantic_ai import Agent, BinaryContent

    agent = Agent("openai-chat:policy" if API == "chat" else "openai-responses:policy")

    @agent.tool_plain
    def look(place: str) -> Any:
        """Look at a place."""
        return BinaryContent(FILES[1], media_type="image/png")

    async def run() -> str:
        shown = BinaryContent(FILES[0], media_type="image/png")
        async with agent.run_stream([QUESTION, shown]) as streamed:
            return str(await streamed.get_output())

    return asyncio.run(run())


if __name__ == "__main__":
    words = globals()[f"of_{sys.argv[1]}"]()
    Path(os.environ["RAGEN_RESULT"]).write_text(
        json.dumps({"reward": 1.0, "success": "cat" in words, "info": {"words": words}})
    )
