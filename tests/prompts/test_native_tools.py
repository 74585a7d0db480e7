"""An environment with tools in the model's own chat format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.models.native_prompts import TAKING, TOOLS, bundle_of, function_call

import envs  # noqa: F401 - registers the environments
from envs.tools import call_text
from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.chat_formats.tool_template import NoToolsError
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import TextResponder
from ragen_pl.trajectory import EpisodeStatus, Observation, Span, Trajectory

SHOP = "support.episodes.shop.Shop"
CALL = '<tool_call>{"name": "price", "arguments": {"article": "tea"}}</tool_call>'


def call(name: str, **arguments: object) -> dict[str, Any]:
    return json.loads(call_text(name, **arguments))


# ---- an environment with tools


class Written(TextResponder):
    """Writes given responses, the last one again and again."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts = texts

    def respond(self, episode):
        return self.texts[min(episode.slot.turn, len(self.texts) - 1)]


def played(lm: ModelBundle, *texts: str, **settings: Any) -> Trajectory:
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target=SHOP, prompt_format=PromptFormat.NATIVE, **{"max_turns": 3, "invalid_ends": False} | settings
        ),
        context=ContextManager(lm, window="all"),
        max_response_tokens=200,
    )  # fmt: skip
    spec = EpisodeSpec(group=0, member=0, seed=0)
    (trajectory,) = proxy.rollout(Written(*texts), [spec], seed_key=(0, "test"))
    return trajectory


ANSWER = CALL.replace("price", "answer").replace('"article": "tea"', '"coins": 3')


def test_calls_are_carried_out_and_their_results_shown(lm):
    episode = played(lm, f"<think>look</think>{CALL}", ANSWER)
    assert episode.success and episode.status is EpisodeStatus.TERMINATED
    first, second = episode.turns
    assert first.think == "look" and first.action_is_valid and second.reward == 1.0
    assert json.loads(first.actions[0]) == call("price", article="tea")
    assert second.observation.text == "3 coins"
    text = lm.tokenizer.decode(second.prompt_ids)
    assert text.endswith("<|end|><|user|>3 coins<|assistant|>")
    assert "Find the price of tea." in text and "Answer with one call" not in text
    labels = set(first.spans.tolist())
    assert labels == {Span.THINK, Span.ACTION, Span.TAG, Span.END}


def test_several_calls_of_a_response_have_a_result_each(lm):
    milk = CALL.replace("tea", "milk")
    episode = played(lm, CALL + milk, ANSWER, max_actions_per_turn=2)
    assert episode.turns[1].observation.results == ["3 coins", "2 coins"]
    assert episode.turns[0].action_is_valid and len(episode.turns[0].actions) == 2
    limited = played(lm, CALL + milk, ANSWER)
    assert limited.turns[1].observation.results == ["3 coins", "error: not carried out"]


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        (CALL.replace('"tea"', "tea"), "error: "),
        ("tea costs three", "error: expected a tool call"),
        (f"<think>{CALL}</think>hm", "error: expected a tool call"),
        ("", "error: expected a tool call"),
        (CALL.replace("price", "prise"), "error: no tool 'prise' is offered at character 0: "),
    ],
    ids=["wrong JSON", "words", "inside reasoning", "nothing", "unknown tool"],
)
def test_a_response_without_a_well_formed_call_is_not_valid(lm, response, shown):
    episode = played(lm, response, ANSWER)
    first, second = episode.turns
    assert not first.action_is_valid and first.actions == []
    assert first.reward_terms == {"format": -0.05}
    assert second.observation.text.startswith(shown) and not second.observation.results
    assert episode.success
    assert played(lm, response, ANSWER, invalid_ends=True).status is EpisodeStatus.TERMINATED


@pytest.mark.parametrize("malformed_first", [False, True])
def test_a_call_beside_a_malformed_one_is_carried_out_and_penalized(lm, malformed_first):
    malformed = CALL.replace('"tea"', "tea")
    response = malformed + CALL if malformed_first else CALL + malformed
    episode = played(lm, response, ANSWER)
    first, second = episode.turns
    assert [json.loads(action) for action in first.actions] == [call("price", article="tea")]
    assert not first.action_is_valid and first.reward_terms["format"] == -0.05
    assert second.observation.results == ["3 coins"]
    assert episode.success and second.action_is_valid
    # an agent program goes on too
    assert played(lm, response, ANSWER, invalid_ends=True).success


def test_without_tools_a_malformed_call_is_an_answer(lm):
    text = CALL.replace('"tea"', "tea")
    parsed = (
        ContextManager(lm, window="all")
        .start("Talk.", tools=())
        .native.parse(text, None, max_actions=1)
    )
    assert parsed.valid and parsed.actions == [text] and parsed.problem is None


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "lfm2_vl"])
def test_a_call_beside_a_malformed_one_is_shown_again_where_prompts_are_rendered(name):
    native = ContextManager(bundle_of(name), window="all").start("Sell.", tools=TOOLS).native
    written = native.tools.written(content="", calls=[function_call(0, "price", article="tea")])
    ((start, end),) = [call_.span for call_ in native.message(written).calls]
    for cut in range(start + 1, end):
        malformed = written[start:cut]
        text = written + malformed
        parsed = native.parse(text, None, max_actions=1)
        assert len(parsed.calls) == len(parsed.actions) == 1
        message = native.assistant_message(text, calls=parsed.calls, plain=str)
        assert [one["function"]["name"] for one in message["tool_calls"]] == ["price"]
        assert malformed.strip() in message["content"]
        assert native.template.render([{"role": "user", "content": "go"}, message])


@pytest.mark.parametrize("arguments", [{"article": 3}, {}])
def test_the_environment_refuses_other_calls(lm, arguments):
    text = f"<tool_call>{call_text('price', **arguments)}</tool_call>"
    first, second, *_ = played(lm, text, ANSWER).turns
    assert not first.action_is_valid and first.reward_terms["format"] == -0.05
    assert "article" in second.observation.results[0]


def test_words_beside_a_call_are_kept(lm):
    episode = played(lm, f"<think>look</think>I look. {CALL}", ANSWER)
    assert episode.turns[0].action_is_valid and episode.success
    assert "I look." in lm.tokenizer.decode(episode.turns[1].prompt_ids)


def test_a_cut_response_has_no_calls(lm, play):
    text = f"<think>look at the prices of all articles</think>{CALL}"
    length = len(lm.tokenizer(text, add_special_tokens=False)["input_ids"])

    def write(session: int, turn: int) -> tuple[str, bool]:
        return (text, False) if turn == 0 else (ANSWER, True)

    spec = EpisodeSpec(group=0, member=0, seed=0)
    settings = {"prompt_format": PromptFormat.NATIVE, "max_turns": 3, "invalid_ends": False}
    ((episode,), _) = play(SHOP, [spec], write, response_tokens=length, **settings)
    first, second = episode.turns
    assert first.hit_length_limit and first.actions == [] and not first.action_is_valid
    assert not second.observation.results and episode.success


@pytest.mark.parametrize("name", ["llama3_2", "qwen2_5"])
def test_a_response_with_more_calls_than_the_template_shows_is_not_valid(name):
    context = ContextManager(bundle_of(name), window="all")
    native = context.start("Sell.", tools=TOOLS).native
    call_ = function_call(0, "price", article="tea")
    if name == "llama3_2":
        text = native.tools.written(content="", calls=[call_])
        text, limit = "; ".join([text, text]), 1
    else:
        text, limit = native.tools.written(content="", calls=[call_] * 33), 32
    parsed = native.parse(text, None, max_actions=1)
    assert parsed.problem == f"found {limit + 1} tool calls, expected at most {limit}"
    assert not parsed.valid and not parsed.calls


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "lfm2_vl"])
def test_refused_calls_are_words_of_a_prompt_that_is_rendered_as_a_whole(name):
    native = ContextManager(bundle_of(name), window="all").start("Sell.", tools=TOOLS).native
    text = native.tools.written(content="", calls=[function_call(0, "price", article="tea")] * 33)
    parsed = native.parse(text, None, max_actions=1)
    assert parsed.problem is not None and not parsed.calls
    message = native.assistant_message(text, calls=parsed.calls, plain=str)
    assert message == {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", TAKING)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"a": None}, {"a": [[{"b": 1.5}], "x"]}, {"": ""}, {"a b": "<|im_end|></tool_call>"}],
)
def test_no_arguments_of_a_call_break_the_next_prompt(name, arguments):
    context = ContextManager(bundle_of(name), window="all")
    talk_ = context.start("Sell.", tools=TOOLS)
    context.observe(talk_, Observation(text="go"), max_turns=9)
    native = talk_.native
    try:
        text = native.tools.written(content="", calls=[function_call(0, "price", **arguments)])
    except NoToolsError:
        text = "not a call that this template writes"
    parsed = native.parse(text, None, max_actions=1)
    ids = np.array([5, 6, context.bundle.end_of_turn_id])
    talk_.respond(ids=ids, text=text, actions=[], calls=parsed.calls)
    results = ["no"] if parsed.calls else []
    prompt = context.observe(talk_, Observation(text="no", results=results), max_turns=9)
    assert "no" in context.bundle.tokenizer.decode(prompt.ids)


def test_actions_by_name_are_the_words_of_a_response(lm):
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target="envs:ragen/FrozenLake-v0", prompt_format=PromptFormat.NATIVE, max_turns=2
        ),
        context=ContextManager(lm, window="all"),
        max_response_tokens=200,
    )
    spec = EpisodeSpec(group=0, member=0, seed=0)
    for text, valid in (("<think>go</think> right", True), ("Right", True), ("Right now", False)):
        (episode,) = proxy.rollout(Written(text), [spec], seed_key=(0, "test"))
        assert episode.turns[0].action_is_valid == valid
    assert "Answer with the name of one action." in lm.tokenizer.decode(episode.turns[0].prompt_ids)
