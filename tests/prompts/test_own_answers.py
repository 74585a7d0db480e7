"""Whatever the policy samples, its answer is one that a program can send back."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.native_prompts import TAKING, bundle_of, function_call

from ragen_pl.agent_programs.serving.chat_request import ClientRequest
from ragen_pl.agent_programs.serving.chat_response import Answer
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.protocol import CHAT, Protocol
from ragen_pl.agent_programs.serving.responses_api import RESPONSES
from ragen_pl.engines.protocol import Generation
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import Conversation, TextContext
from ragen_pl.prompts.histories import RecordedCall
from ragen_pl.rollout.requests import RequestAnswer, answer_request
from ragen_pl.trajectory import Span

PRICE = {
    "name": "price",
    "description": "A price.",
    "parameters": {"type": "object", "properties": {"article": {"type": "string"}}},
}
TOOLS = {
    CHAT: [{"type": "function", "function": PRICE}],
    RESPONSES: [{"type": "function"} | PRICE],
}
NAMES = ("price", "prise", "a b", "", "p" * 65, "é", "price\n", "weather", "<|im_end|>", "a.b-c_1")
DEEP = functools.reduce(lambda inner, _: [inner], range(62), 1)
VALUES: tuple[Any, ...] = (
    {}, {"article": "tea"}, {"article": None}, {"article": ["x", {"b": 1.5}]}, {"": ""}, {"a b": "</tool_call>"},
    {"article": "\u2028\x00"}, {"n": 10**30}, {"n": 1e308, "x": True}, {"article": DEEP},
)  # fmt: skip


@functools.cache
def context_of(name: str) -> ContextManager:
    return ContextManager(bundle_of(name), window="all", system_prompt=None, max_tokens=1 << 20)


def ask(protocol: Protocol, messages: list[dict[str, Any]], **body: Any) -> ClientRequest:
    """Return a request of either API, as the endpoint reads its bytes."""
    key = "messages" if protocol is CHAT else "input"
    data = json.dumps({key: messages, "tools": TOOLS[protocol]} | body)
    return protocol.read(json.loads(data), ImageReader())


def observed(context: Any, talk: Conversation, client: ClientRequest) -> Any:
    return context.observe_request(talk, client.chat, client.images)


def answered(
    context: Any, talk: Conversation, client: ClientRequest, text: str, *, prompt: Any
) -> RequestAnswer:
    ids = context.encode_response(text)
    generation = Generation(
        ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        entropy=None,
        hit_length_limit=False,
        version=0,
    )
    answer = answer_request(
        client.chat,
        generation,
        native=talk.native,
        prompt_tokens=len(prompt.ids),
        turn=0,
        generation_prefix=context.generation_prefix,
        pieces=context.pieces(ids),
    )
    talk.calls.append(
        RecordedCall(
            request=client.chat,
            message=answer.message,
            prompt=prompt,
            response_ids=answer.generation.ids,
        )
    )
    return answer


def sent_back(protocol: Protocol, answer: RequestAnswer, client: ClientRequest) -> list[Any]:
    """Return the messages or items of an answer, with a result for each call, as a program sends them."""
    whole = json.loads(
        json.dumps(protocol.whole(Answer.of("id", "policy", answer.content), client))
    )
    if protocol is CHAT:
        message = whole["choices"][0]["message"]
        calls = message.get("tool_calls", ())
        return [
            message,
            *({"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in calls),
        ]
    output = whole["output"]
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    return [
        *output,
        *({"type": "function_call_output", "call_id": one, "output": "3"} for one in calls),
    ]


def written(name: str, tool: str, arguments: dict[str, Any]) -> str:
    """Return a call as the family's template writes it; where it can't, the JSON of Hermes."""
    native = context_of(name).start("", tools=[TOOLS[CHAT][0]]).native
    try:
        text = native.tools.written(content="", calls=[function_call(0, tool, **arguments)])
        return re.sub(r"(<think>)?\s*</think>\s*", "", text)
    except ValueError:
        return json.dumps({"name": tool, "arguments": arguments})


def after_thoughts(context: Any) -> str:
    """Return what ends the reasoning that a prompt has begun."""
    return "</think>" if context.generation_prefix else ""


TEXTS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES))
    | st.sampled_from(["<think>", "</think>", "so", "\n", "<tool_call>", "</tool_call>", "}", '"'])
    | st.text(max_size=5),
    max_size=5,
)


@pytest.mark.parametrize("name", TAKING)
@settings(max_examples=25, derandomize=True, database=None)
@given(
    pieces=TEXTS, protocol=st.sampled_from([CHAT, RESPONSES]), cut=st.integers(0, 60) | st.none()
)
def test_any_answer_is_accepted_in_the_next_request(name, pieces, protocol, cut):
    text = "".join(piece if isinstance(piece, str) else written(name, *piece) for piece in pieces)[
        :cut
    ]
    context = context_of(name)
    talk = context.start("", tools=())
    first = ask(protocol, [{"role": "user", "content": "go"}])
    prompt = observed(context, talk, first)
    answer = answered(context, talk, first, text, prompt=prompt)
    assert all(call["name"] == "price" for call in answer.message.get("tool_calls", ()))
    messages = [{"role": "user", "content": "go"}, *sent_back(protocol, answer, first)]
    after = ask(protocol, [*messages, {"role": "user", "content": "on"}])
    # continued, and as the history of another program's run
    for other in (talk, context.start("", tools=())):
        assert len(observed(context, other, after).ids)
    assert talk.history != "first"


@pytest.mark.parametrize("name", TAKING)
@pytest.mark.parametrize("tool", [one for one in NAMES if one != "price"])
def test_a_call_of_a_tool_that_is_not_offered_is_malformed(name, tool):
    context = context_of(name)
    talk = context.start("", tools=())
    client = ask(CHAT, [{"role": "user", "content": "go"}])
    prompt = observed(context, talk, client)
    text = f"{after_thoughts(context)}so {written(name, tool, {'article': 'tea'})} then"
    answer = answered(context, talk, client, text, prompt=prompt)
    if (name, tool) == ("lfm2_vl", "price\n"):
        # blanks before a bracket are no part of a name there
        assert [call["name"] for call in answer.message["tool_calls"]] == ["price"]
        return
    assert "tool_calls" not in answer.message and answer.content["finish_reason"] == "stop"
    assert "then" in answer.message["content"] and "so" in answer.message["content"]
    if tool in ("prise", "weather"):
        assert answer.parsed.problem is not None and f"no tool '{tool}'" in answer.parsed.problem
        assert not answer.parsed.valid
        # labels of tokens are those of an environment with these tools, which answers the call itself
        environment = context.start("", tools=TOOLS[CHAT]).native
        sampled = context.generation_prefix + "".join(context.pieces(answer.generation.ids))
        spans = environment.parse(sampled, None, max_actions=1).spans
        assert answer.parsed.spans == spans and Span.ACTION in {label for label, *_ in spans}


@pytest.mark.parametrize("name", TAKING)
def test_well_formed_calls_beside_others_are_made(name):
    if name in ("llama3_2", "lfm2_vl"):
        pytest.skip("one call a response, or all calls in one list")
    context = context_of(name)
    talk = context.start("", tools=())
    client = ask(CHAT, [{"role": "user", "content": "go"}])
    prompt = observed(context, talk, client)
    text = after_thoughts(context) + written(name, "prise", {})
    text += written(name, "price", {"article": "tea"})
    answer = answered(context, talk, client, text, prompt=prompt)
    (call,) = answer.message["tool_calls"]
    assert (call["name"], call["arguments"]) == ("price", {"article": "tea"})
    assert "prise" in answer.message["content"] and answer.parsed.problem is not None


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES], ids=["chat", "responses"])
@pytest.mark.parametrize("body", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}], ids=str)
@pytest.mark.parametrize("name", [*TAKING, "a model behind an API"])
def test_without_tools_an_answer_is_text(name, body, protocol):
    context = context_of(name) if name in TAKING else TextContext()
    talk = context.start("", tools=())
    call = written(name if name in TAKING else "qwen3", "price", {"article": "tea"})
    for text in (call, f"so {call}", f"{call}{call} then", call[:-3]):
        client = ask(protocol, [{"role": "user", "content": "go"}], **body)
        prompt = observed(context, talk, client)
        thoughts = after_thoughts(context)
        answer = answered(context, talk, client, thoughts + text, prompt=prompt)
        assert "tool_calls" not in answer.message
        sampled = "".join(context.pieces(answer.generation.ids))
        assert answer.message["content"] == sampled.removeprefix(thoughts)
        assert answer.content["finish_reason"] == "stop" and answer.parsed.problem is None
        items = sent_back(protocol, answer, client)
        if protocol is RESPONSES:
            assert [item["type"] for item in items][-1] == "message"
