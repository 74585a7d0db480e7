"""An answer as JSON by a schema; argv[1] names the SDK, argv[2] the API."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pydantic import BaseModel

QUESTION = "What does tea cost?"
API = sys.argv[2] if len(sys.argv) > 2 else "chat"


class Offer(BaseModel):
    """An offer of the shop."""

    item: str
    coins: int


def of_openai() -> Offer:
    from openai import OpenAI

    if API == "responses":
        response = OpenAI().responses.parse(model="policy", input=QUESTION, text_format=Offer)
        return response.output_parsed
    completion = OpenAI().chat.completions.parse(
        model="policy",
        messages=[{"role": "user", "content": QUESTION}],
        response_format=Offer,
        logprobs=True,
    )
    (choice,) = completion.choices
    assert choice.logprobs.content
    return choice.message.parsed


def of_langgraph() -> Offer:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="policy").with_structured_output(Offer).invoke(QUESTION)


def of_openai_agents() -> Offer:
    from agents import Agent, Runner, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    if API == "chat":
        set_default_openai_api("chat_completions")
    agent = Agent(name="assistant", output_type=Offer, model="policy")
    return Runner.run_sync(agent, QUESTION).final_output


def of_pydantic_ai() -> Offer:
    from pydantic_ai import Agent

    model = "openai-chat:policy" if API == "chat" else "openai-responses:policy"
    return Agent(model, output_type=Offer).run_sync(QUESTION).output


def of_smolagents() -> Offer:
    """Code in place of JSON: the policy writes a program, which ends at the stop string `</code>`."""
    from smolagents import CodeAgent, OpenAIModel, tool

    @tool
    def price(item: str) -> int:
        """Return the price of an item.

        Args:
            item: the item.
        """
        return 3

    agent = CodeAgent(tools=[price], model=OpenAIModel(model_id="policy"), max_steps=3)
    return Offer(item="tea", coins=int(agent.run(QUESTION)))


if __name__ == "__main__":
    offer = globals()[f"of_{sys.argv[1]}"]()
    right = offer == Offer(item="tea", coins=3)
    Path(os.environ["RAGEN_RESULT"]).write_text(json.dumps({"reward": 1.0, "success": right}))
