"""The model's own chat format: tools, calls and results as each family's template writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.models.family_models import tiny
from support.models.native_prompts import TAKING, TOOLS, bundle_of, function_call

import envs  # noqa: F401 - registers the environments
from ragen_pl.chat_formats.messages import History
from ragen_pl.chat_formats.tool_template import NoToolsError
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import Conversation
from ragen_pl.trajectory import Observation

LEAVING_OUT = (
    "gemma3",
    "lfm2",
    "phi3",
    "smollm2",
    "qwen2_5_vl",
    "smolvlm",
    "llava_next",
    "internvl",
)
# whose template keeps the responses of earlier turns, so that prompts are the sampled ids
JOINED = ("qwen2_5", "llama3_2", "gemma4", "qwen3_vl")


def talk(
    context: ContextManager, turns: list[dict[str, Any]], *, name_of_end: str | None = None
) -> tuple[Conversation, list[Any]]:
    """Hold a conversation of written responses; return it with the prompts and responses."""
    talk, said = context.start("Sell.", tools=TOOLS), []
    for turn in turns:
        observation = Observation(
            text="\n".join(turn["shown"]), results=turn["shown"] if said else []
        )
        prompt = context.observe(talk, observation, max_turns=9)
        text = talk.native.tools.written(
            content=turn.get("says", ""), calls=turn["calls"], reasoning=None
        )
        text = text.removeprefix(context.generation_prefix)
        end = context.bundle.end_of_turn_id
        if name_of_end and turn["calls"]:
            end = context.bundle.tokenizer.convert_tokens_to_ids(name_of_end)
        ids = np.array(
            [*context.bundle.tokenizer(text, add_special_tokens=False)["input_ids"], end]
        )
        parsed = talk.native.parse(context.generation_prefix + text, None, max_actions=9)
        talk.respond(ids=ids, text=text, actions=[], calls=parsed.calls)
        said.append((prompt, ids, parsed))
    last = turns[-1]["last"]
    said.append(
        (context.observe(talk, Observation(text=last, results=[]), max_turns=9), None, None)
    )
    return talk, said


def conversation(*, parallel: bool) -> list[dict[str, Any]]:
    """One call, two calls where the template takes them, then words."""
    two = [function_call(0, "price", article="tea"), function_call(1, "price", article="milk")]
    calls = two if parallel else two[:1]
    results = ["3 coins", 'a "b"\n  c'][: len(calls)]
    return [
        {"shown": ["What does tea cost?"], "calls": [function_call(0, "price", article="é x")]},
        {"shown": ["unknown"], "calls": calls},
        {"shown": results, "calls": [], "says": "Tea costs 3.", "last": "Thanks."},
    ]


@pytest.mark.parametrize("name", TAKING)
def test_a_template_shows_the_tools_and_its_own_calls_are_read(name):
    context = ContextManager(bundle_of(name), window="all")
    parallel = name != "llama3_2"
    turns = conversation(parallel=parallel)
    _, said = talk(context, turns)
    decode = context.bundle.tokenizer.decode
    first = decode(said[0][0].ids)
    assert "price" in first and "Return the price of an article." in first and "coins" in first
    for turn, (_, _, parsed) in zip(turns, said, strict=False):
        assert [one["function"] for one in parsed.calls] == [
            one["function"] for one in turn["calls"]
        ]
        assert parsed.valid == bool(turn["calls"])


@pytest.mark.parametrize("name", JOINED)
def test_joined_prompts_are_the_sampled_ids_and_decode_to_the_whole_rendering(name):
    context = ContextManager(bundle_of(name), window="all")
    assert context.joins and context.grows
    turns = conversation(parallel=name != "llama3_2")
    end = "<|tool_response>" if name == "gemma4" else None
    conversation_, said = talk(context, turns, name_of_end=end)
    ids = np.zeros(0, np.int64)
    for prompt, response, _ in said:
        assert prompt.ids[: len(ids)].tolist() == ids.tolist()
        if response is not None:
            ids = np.concatenate([prompt.ids, response])
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Sell."}]
    calls: list[dict[str, Any]] = []
    for turn in turns:
        shown = zip(calls, turn["shown"], strict=False)
        messages += [
            {
                "role": "tool",
                "tool_call_id": one["id"],
                "name": one["function"]["name"],
                "content": text,
            }
            for one, text in shown
        ] or [{"role": "user", "content": turn["shown"][0]}]
        calls = turn["calls"]
        message: dict[str, Any] = {"role": "assistant", "content": turn.get("says", "")}
        messages.append(message | ({"tool_calls": calls} if calls else {}))
    messages.append({"role": "user", "content": "Thanks."})
    whole = conversation_.native.template.render(messages)
    assert context.bundle.tokenizer.decode(said[-1][0].ids) == whole


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "lfm2_vl"])
def test_a_template_that_drops_old_reasoning_is_rendered_as_a_whole(name):
    context = ContextManager(bundle_of(name), window="all")
    assert context.template.history is History.WITHOUT_THOUGHTS and not context.joins
    _, said = talk(context, conversation(parallel=True))
    text = context.bundle.tokenizer.decode(said[-1][0].ids)
    assert text.count("unknown") == 1 and "3 coins" in text and "Tea costs 3." in text


@pytest.mark.parametrize("name", LEAVING_OUT)
def test_a_template_without_tools_is_refused(name):
    context = ContextManager(tiny(name), window="all")
    with pytest.raises(NoToolsError, match="chat template leaves out"):
        context.start("Sell.", tools=TOOLS)
    # words alone need no tools
    assert context.start("Sell.", tools=()).native is not None


@pytest.mark.parametrize("name", JOINED)
def test_names_of_marks_in_results_are_letters(name):
    context = ContextManager(bundle_of(name), window="all")
    tokenizer = context.bundle.tokenizer
    marks = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    marks += ["<tool_response>", "</tool_response>", "<tool_call>", "<think>", "<|im_end|>"]

    def counts(result: str) -> dict[str, int]:
        talk_ = context.start("Sell.", tools=TOOLS)
        context.observe(talk_, Observation(text="go"), max_turns=9)
        ids = np.array([5, 6, context.bundle.end_of_turn_id])
        calls = [function_call(0, "price", article="tea")]
        talk_.respond(ids=ids, text="x", actions=[], calls=calls)
        prompt = context.observe(talk_, Observation(text=result, results=[result]), max_turns=9)
        assert " ".join(marks) not in result or "<tool_response>" in tokenizer.decode(prompt.ids)
        known = {number for number, token in tokenizer.added_tokens_decoder.items()
                 if str(token) in marks}  # fmt: skip
        return {token: int((prompt.ids == token).sum()) for token in known}

    assert counts(" ".join(marks)) == counts("nothing")
