"""Prompts with the real chat templates: what each family's own renderer makes of the same conversation."""

from __future__ import annotations

import functools
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.families import FAMILIES
from support.models.family_models import MODELS, tiny

import envs  # noqa: F401 - registers the environments
from envs.policies import OptimalPolicy
from ragen_pl.chat_formats.messages import user_message
from ragen_pl.data.conversations import conversation_batch
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.trajectory import Observation, Span

# their templates take content as a list of parts only
PARTS = {"smolvlm", "llava_next"}
STRIPPING = {"qwen3", "qwen3_5", "qwen3_5_vl", "lfm2_vl"}
# with several images in a prompt
NAMES = [name for name, kind in MODELS.items() if name in FAMILIES and not kind.single_image]
JOINING = sorted(set(NAMES) - STRIPPING)
VISION = [name for name in NAMES if FAMILIES[name].vision]
# arguments of a template under which the family's prompts are tested
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("qwen3", {"enable_thinking": False}),
    ("qwen3", {"enable_thinking": True}),
    ("qwen3_5", {"enable_thinking": False}),
    ("gemma4", {"enable_thinking": True}),
    ("llama3_2", {"date_string": "22 Nov 2026"}),
    ("qwen2_5_vl", {"add_vision_id": True}),
]
RESPONSE = "<think>go\n\non é</think><answer>Up</answer>"


@functools.cache
def bundle_of(name: str) -> ModelBundle:
    return tiny(name)


def picture(height: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(height * width)
    return rng.integers(0, 255, (height, width, 3), dtype=np.uint8)


def messages_of(name, system, users, responses):
    """Return the messages of a conversation; a user's message is a text and the number of its images."""
    messages = [{"role": "system", "content": system}] if system else []
    for number, (text, images) in enumerate(users):
        messages.append(user_message(text, images=images))
        if number < len(responses):
            messages.append({"role": "assistant", "content": responses[number]})
    if name in PARTS:
        for message in messages:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
    return messages


def rendered(name, messages, arguments) -> str:
    """Return the text that the family's own renderer gives, Llama's date pinned as ours is."""
    dates = {"date_string": "26 Jul 2024"} if name == "llama3_2" else {}
    return bundle_of(name).renderer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **dates | arguments
    )


def own_ids(name, messages, images, arguments) -> tuple[list[int], list[int]]:
    """Return the ids of the family's own tokenizer or processor, images expanded and not."""
    bundle, text = bundle_of(name), rendered(name, messages, arguments)
    bos = bundle.tokenizer.bos_token
    add_bos = bundle.processor is not None and bos is not None and not text.startswith(bos)
    unexpanded = bundle.tokenizer(text, add_special_tokens=add_bos)["input_ids"]
    if not images:
        return unexpanded, unexpanded
    processed = bundle.processor(
        text=[text], images=[images], add_special_tokens=add_bos, **bundle.image_settings
    )
    return list(processed["input_ids"][0]), unexpanded


def converse(context, users, responses, *, system="rules", images=()):
    """Return the prompt of each turn and the ids of each response."""
    conversation, left = context.start(system), list(images)
    prompts, sampled = [], []
    for number, (text, count) in enumerate(users):
        shown, left = left[:count], left[count:]
        observation = Observation(text=text, images=shown)
        prompts.append(context.observe(conversation, observation, max_turns=len(users)))
        if number < len(responses):
            ids = context.encode_response(responses[number])
            text = "".join(context.pieces(ids))
            conversation.respond(ids=ids, text=text, actions=["Up"])
            sampled.append(ids)
    return prompts, sampled


# ---- prompts are the template's own


@pytest.mark.parametrize("system", ["Be brief.\n\nReply <answer>…</answer>", None])
@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_prompts_are_those_of_the_familys_own_renderer(name, arguments, system):
    vision = FAMILIES[name].vision
    counts = [1, 0, 2, 1] if vision else [0] * 4
    users = [(f"see {number}\n\nUp.", count) for number, count in enumerate(counts)]
    images = [picture(48, 64), picture(64, 32), picture(40, 40), picture(48, 64)] if vision else []
    for window in ("all", 2, 1):
        context = ContextManager(
            bundle_of(name), window=window, system_prompt=system, template_kwargs=arguments
        )
        prompts, _ = converse(context, users, [RESPONSE] * 3, images=images)
        for number, prompt in enumerate(prompts):
            first = 0 if window == "all" else max(0, number + 1 - window)
            shown = images[sum(counts[:first]) : sum(counts[: number + 1])]
            turns = users[first : number + 1]
            messages = messages_of(name, system, turns, [RESPONSE] * (number - first))
            expanded, unexpanded = own_ids(name, messages, shown, arguments)
            assert prompt.ids.tolist() == expanded
            assert prompt.unexpanded_ids.tolist() == unexpanded
            assert len(prompt.images) == len(shown)


@pytest.mark.parametrize("name", ["qwen2_5", "smollm2", "qwen2_5_vl"])
def test_a_default_system_prompt_stays_unless_another_is_given(name):
    (prompt,), _ = converse(ContextManager(bundle_of(name), system_prompt=None), [("see", 0)], [])
    (other,), _ = converse(ContextManager(bundle_of(name), system_prompt="S"), [("see", 0)], [])
    decode = bundle_of(name).tokenizer.decode
    assert "You are" in decode(prompt.ids) and "You are" not in decode(other.ids)


@pytest.mark.parametrize("name", VISION)
def test_an_observation_that_names_a_slot_adds_none(name):
    bundle = bundle_of(name)
    hostile = f"see {bundle.processor.image_token} {FAMILIES[name].image_token}"
    image = picture(48, 64)
    (prompt,), _ = converse(ContextManager(bundle), [(hostile, 1)], [], images=[image])
    assert (prompt.ids == bundle.image_token_id).sum() == bundle.num_image_tokens(image)


# ---- one sample an episode


def samples_of(name: str, **settings: Any) -> int:
    """Return the number of samples of an episode of four turns."""
    context = ContextManager(bundle_of(name), window="all", system_prompt=None, **settings)
    users = [(f"see {number}", 0) for number in range(4)]
    messages = messages_of("", None, users, [f" {RESPONSE}\n"] * 4)
    return len(conversation_batch([messages], context).samples)


@pytest.mark.parametrize("name", JOINING)
def test_an_episode_is_one_sample_where_only_blanks_change(name):
    assert ContextManager(bundle_of(name), window="all").grows and samples_of(name) == 1


@pytest.mark.parametrize("name", sorted(STRIPPING))
def test_thoughts_are_stripped_or_kept_in_one_sample(name):
    stripping = ContextManager(bundle_of(name), window="all")
    # nothing that an engine keeps could be used
    assert not stripping.grows and samples_of(name) == 4
    keeping = ContextManager(bundle_of(name), window="all", keep_thoughts=True)
    assert keeping.grows and samples_of(name, keep_thoughts=True) == 1
    users = [("see 0", 0), ("see 1", 0)]
    shown = {}
    for context in (stripping, keeping):
        prompts, sampled = converse(context, users, [RESPONSE])
        shown[context.keep_thoughts] = context.bundle.tokenizer.decode(prompts[1].ids)
    prefix = np.concatenate([prompts[0].ids, sampled[0]])
    assert prompts[1].ids[: len(prefix)].tolist() == prefix.tolist()
    without = shown[True].replace("<think>go\n\non é</think>", "")
    if name.startswith("qwen3_5"):
        # its prompt opens the think block
        without = shown[True].replace("<think>\ngo\n\non é</think>", "")
    assert shown[False] == without != shown[True]


# ---- any text

# blanks that templates trim, characters of several tokens, tags
PIECES = [
    "Up",
    "go",
    "é",
    "€",
    "😀",
    "|",
    "<",
    "</think>",
    "<think>",
    "<answer>",
    "</answer>",
    "0",
    ".",
    "go on",
]
BLANKS = [" ", "\n", "\n\n", "\t", "\u00a0", "\u3000", "   "]


def texts_of(name):
    names = list(bundle_of(name).special_tokens.values())[:12]
    pieces = st.lists(st.sampled_from([*PIECES, *BLANKS, *BLANKS, *names]), max_size=8)
    return pieces.map("".join)


@pytest.mark.parametrize("name", JOINING)
@settings(max_examples=12, derandomize=True)
@given(data=st.data())
def test_any_response_stays_as_it_was_sampled(name, data):
    bundle, tokenizer = bundle_of(name), bundle_of(name).tokenizer
    responses = [data.draw(texts_of(name)) for _ in range(3)]
    texts = [data.draw(texts_of(name)) for _ in range(4)]
    users = [(text, 0) for text in texts]
    context = ContextManager(bundle, window="all", system_prompt="S")
    prompts, sampled = converse(context, users, responses)
    for turn, ids in enumerate(sampled):
        prefix = np.concatenate([prompts[turn].ids, ids])
        assert prompts[turn + 1].ids[: len(prefix)].tolist() == prefix.tolist()
    # the template trims the blanks of a marker as it trims those of a response, which we keep
    marked = [f"@{turn}@" for turn in range(3)]
    expected = rendered(name, messages_of(name, "S", users, marked), {})
    for mark, response in zip(marked, responses, strict=True):
        expected = expected.replace(mark, response)
    bos = "<s> " if name == "llava_next" else ""  # its processor adds it, before the first blank
    # where control tokens take the blanks after them, ids do not hold all of the text
    if not FAMILIES[name].strips:
        assert tokenizer.decode(prompts[3].ids) == unicodedata.normalize("NFC", bos + expected)
    # names of control tokens are plain letters
    plain, _ = converse(context, [("see", 0)] * 4, ["Up"] * 3)
    special = list(bundle.special_tokens)
    assert np.isin(prompts[3].ids, special).sum() == np.isin(plain[3].ids, special).sum()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, derandomize=True)
@given(data=st.data())
def test_any_observation_is_encoded_as_the_familys_own_renderer_does(name, data):
    pieces = st.lists(st.sampled_from([*PIECES, *BLANKS, *BLANKS]), max_size=8).map("".join)
    users = [(data.draw(pieces), 0) for _ in range(3)]
    prompts, _ = converse(
        ContextManager(bundle_of(name), window="all", system_prompt=None), users, [RESPONSE] * 2
    )
    expected, _ = own_ids(name, messages_of(name, None, users, [RESPONSE] * 2), [], {})
    assert prompts[2].ids.tolist() == expected


@pytest.mark.parametrize("name", [name for name in NAMES if not FAMILIES[name].strips])
@settings(max_examples=12, derandomize=True)
@given(data=st.data())
def test_pieces_of_a_written_response_join_to_its_text(name, data):
    text = data.draw(texts_of(name))
    context = ContextManager(bundle_of(name))
    ids = context.encode_response(text)
    written = context.template.response_prefix + text
    if context.generation_prefix:
        written = written.removeprefix("<think>")
    pieces = context.pieces(ids)
    assert len(pieces) == len(ids) and pieces[-1] == "" and "".join(pieces) == written


# ---- think blocks that the prompt opens


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_response_is_read_together_with_the_tag_that_the_prompt_holds(name):
    bundle = bundle_of(name)
    proxy = AgentProxy(
        environments=EnvironmentManager(target="ragen/FrozenLake-v0", max_turns=6),
        context=ContextManager(bundle, window="all"),
        max_response_tokens=200,
    )
    (episode,) = proxy.rollout(
        ScriptedResponder(policy=OptimalPolicy()),
        [EpisodeSpec(group=0, member=0, seed=1)],
        seed_key=(0,),
    )
    for turn in episode.turns:
        opened = bundle.tokenizer.decode(turn.prompt_ids).endswith("<think>\n")
        assert opened == (name == "qwen3_5") and turn.response_ids[-1] == bundle.end_of_turn_id
        assert turn.response_text.startswith("<think>") != opened
        assert turn.action_is_valid and turn.think
        thought = bundle.tokenizer.decode(turn.response_ids[turn.spans == Span.THINK])
        answer = bundle.tokenizer.decode(turn.response_ids[turn.spans == Span.ACTION])
        assert thought.strip() == turn.think and answer == turn.actions[0]
