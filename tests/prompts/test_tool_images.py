"""Images of tool results: each stands in its own result, as the model's own template places it."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from support.models.families import FAMILIES
from support.models.family_models import tiny
from support.models.native_prompts import TOOLS, bundle_of, function_call

from ragen_pl.environments.manager import _tool_results
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.histories import RecordedCall
from ragen_pl.trajectory import JOINED, ChatRequest, Observation

SEEING = ("qwen3_vl", "qwen3_5_vl", "gemma4_vl", "lfm2_vl")
# images of each result
COUNTS = ((1, 1), (1, 0), (0, 1), (2, 0, 1), (0, 3), (1, 2, 0), (0, 0), (2,))


def picture(number: int) -> np.ndarray:
    return np.full((64, 64 + 32 * number, 3), 40 * number, np.uint8)


def results_of(counts: tuple[int, ...]) -> list[Observation]:
    numbers = iter(range(sum(counts)))
    return [
        Observation(text=f"result {n}", images=[picture(next(numbers)) for _ in range(count)])
        for n, count in enumerate(counts)
    ]


def prompt_after(bundle: ModelBundle, counts: tuple[int, ...], *, keep: bool) -> tuple[Any, Any]:
    """Return the conversation and the prompt after calls whose results have so many images."""
    context = ContextManager(
        bundle, window="all", system_prompt=None, max_tokens=8192, keep_thoughts=keep
    )
    talk = context.start("", tools=TOOLS)
    context.observe(talk, Observation(text="go"), max_turns=9)
    name = TOOLS[0]["function"]["name"]
    text = talk.native.tools.written(
        content="", calls=[function_call(number, name) for number in range(len(counts))]
    )
    parsed = talk.native.parse(text, None, max_actions=9)
    talk.respond(ids=context.encode_response(text), text=text, actions=[], calls=parsed.calls)
    observation = _tool_results(results_of(counts), calls=len(counts))
    return talk, context.observe(talk, observation, max_turns=9)


def own_messages(calls: list[dict[str, Any]], counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the messages of the calls and of results with images in them."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    for number, (call, count) in enumerate(zip(calls, counts, strict=True)):
        text, name = f"result {number}", call["function"]["name"]
        parts = [*[{"type": "image"}] * count, {"type": "text", "text": text}]
        content = parts if count else text
        messages.append(
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
        )
    return messages


@pytest.mark.parametrize("keep", [False, True], ids=["rendered", "joined"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", SEEING)
def test_a_template_shows_images_where_it_shows_its_own(name, counts, keep):
    bundle = bundle_of(name)
    talk, prompt = prompt_after(bundle, counts, keep=keep)
    own = talk.native.template.render(own_messages(talk.exchanges[0].calls, counts))
    slot = FAMILIES[name].slot_token
    assert own.count(slot) == sum(counts)
    numbers = iter(range(sum(counts)))
    expected = re.sub(
        re.escape(slot), lambda _: bundle.images.replacement(picture(next(numbers))), own
    )
    text = bundle.decode(prompt.ids)
    # without what the prompt of the response has before the results
    start = expected.rindex("}" if name == "gemma4_vl" and not any(counts) else "result 0") - 40
    assert text.endswith(expected[start:])
    assert [image.shape for image in prompt.images] == [
        picture(number).shape for number in range(sum(counts))
    ]


@pytest.fixture(scope="module")
def blind() -> ModelBundle:
    """A model whose template shows no image in a tool message."""
    bundle = tiny("qwen3_vl")
    bundle.calls_tools = True
    template = bundle.processor.chat_template
    changed = re.sub(
        r"(\{%-? (?:el)?if message\.role == .tool. -?%\})",
        r"\1{%- if message.content is not string %}{%- set ns_text = message.content[-1].text %}"
        r"{%- set message = {'role': 'tool', 'content': ns_text} %}{%- endif %}",
        template,
    )
    assert changed != template
    bundle.processor.chat_template = changed
    return bundle


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_without_such_slots_the_images_follow_and_words_say_whose_they_are(blind, counts):
    _, prompt = prompt_after(blind, counts, keep=True)
    text = blind.decode(prompt.ids)
    last = text.index(f"result {len(counts) - 1}\n")
    slots = "<|image_pad|>"
    assert slots not in text[:last] and (slots in text[last:]) == any(counts)
    owners = [int(owner) for owner in re.findall(r"Image \d+ belongs to result (\d+)", text)]
    expected = [number + 1 for number, count in enumerate(counts) for _ in range(count)]
    assert owners == (expected if len(counts) > 1 else [])


@pytest.mark.parametrize("name", SEEING)
def test_a_programs_results_show_their_own_images(name):
    """Joined to the recorded response, and with parts in any order."""
    bundle = bundle_of(name)
    context = ContextManager(bundle, window="all", system_prompt=None, max_tokens=8192)
    talk = context.start("", tools=())
    tools = json.loads(json.dumps(TOOLS))
    tool = tools[0]["function"]["name"]
    calls = [{"id": f"call0000{n}", "name": tool, "arguments": {}} for n in range(2)]
    asked = ChatRequest(messages=[{"role": "user", "content": "go"}], tools=tools)
    prompt = context.observe_request(talk, asked, [])
    written = [function_call(number, tool) for number in range(2)]
    ids = context.encode_response(talk.native.tools.written(content="", calls=written))
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    talk.calls.append(RecordedCall(request=asked, message=message, prompt=prompt, response_ids=ids))
    image, first, second = (
        {"type": "image", "digest": "a"},
        {"type": "text", "text": "first"},
        {"type": "text", "text": "second"},
    )
    results = [
        {"role": "tool", "name": tool, "tool_call_id": call["id"], "content": content}
        for call, content in zip(calls, ([first, image], [image, second, image]), strict=True)
    ]
    request = ChatRequest(messages=[*asked.messages, message, *results], tools=tools)
    images = [picture(number) for number in range(3)]
    joined = context.observe_request(talk, request, images)
    assert talk.history == JOINED
    text = bundle.decode(joined.unexpanded_ids)
    slot = FAMILIES[name].slot_token
    order = re.findall(f"first|second|{re.escape(slot)}", text[text.index("first") :])
    # Gemma shows the images of a result after its text
    places = ["first", slot, "second", slot, slot]
    assert order == (places if name == "gemma4_vl" else ["first", slot, slot, "second", slot])


def test_result_images_fit_the_results():
    with pytest.raises(ValueError, match="result_images"):
        Observation(text="", results=["a", "b"], images=[picture(0)], result_images=[0, 0])
