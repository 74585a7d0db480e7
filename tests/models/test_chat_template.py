"""Chat templates: what they do to old responses, their arguments, the clock, and the end of a turn."""

from __future__ import annotations

import copy
import re
from datetime import datetime

import pytest
from support.models.families import FAMILIES, read_template
from support.models.family_models import MODELS, TEXT, tiny
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import chat_template_utils

from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.chat_formats.chat_template import ChatTemplate
from ragen_pl.chat_formats.messages import History, user_message
from ragen_pl.models.build import build_small_lm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.parsing import parse_response
from ragen_pl.trajectory import Observation

HISTORIES = {
    History.KEPT: {
        "qwen2_5", "lfm2", "smollm2", "qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_next", "internvl",
        "llava_onevision", "phi3",
    },
    History.TRIMMED: {"llama3_2", "gemma3", "gemma4", "gemma3_vl", "gemma4_vl"},
    History.WITHOUT_THOUGHTS: {"qwen3", "qwen3_5", "qwen3_5_nothink", "qwen3_5_vl", "lfm2_vl"},
}  # fmt: skip
ENDS = {
    "llama3_2": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "gemma3_vl": "<end_of_turn>",
    "gemma4": "<turn|>",
    "gemma4_vl": "<turn|>",
    "gemma4_vl_experts": "<turn|>",
    "smolvlm": "<end_of_utterance>",
    "llava_next": "</s>",
    "phi3": "<|end|>",
}
PLAIN = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
MESSAGES = [user_message("see", images=0)]


def of_family(name: str, **arguments: object) -> ChatTemplate:
    tokenizer = FAMILIES[name].tokenizer()
    counts = (1, 2) if FAMILIES[name].vision else ()
    return ChatTemplate(tokenizer, tokenizer, arguments, counts)


def of_text(template: str, **arguments: object) -> ChatTemplate:
    tokenizer = copy.deepcopy(FAMILIES["smollm2"].tokenizer())
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, tokenizer, arguments)


# ---- old responses


@pytest.mark.parametrize("name", FAMILIES)
def test_history_of_each_family(name):
    template = of_family(name)
    assert name in HISTORIES[template.history] and template.is_static


@pytest.mark.parametrize(
    ("content", "history"),
    [
        ("m.content", History.KEPT),
        ("m.content | trim", History.TRIMMED),
        ("m.content.lstrip('\n') if m.role == 'assistant' else m.content", History.TRIMMED),
        ("m.content.split('</think>')[-1]", History.WITHOUT_THOUGHTS),
        ("m.content.split('</think>')[-1] if not loop.last else m.content", History.WITHOUT_THOUGHTS),
        ("m.content.replace('</think><', '</think>\n\n<')", History.TRIMMED),
        ("m.content.replace('\n\n', '\n')", History.REWRITTEN),
        ("m.content.replace('  ', ' ')", History.REWRITTEN),
        ("m.content if loop.last else m.content | upper", History.REWRITTEN),
        ("m.content if loop.last else '…'", History.REWRITTEN),
        ("m.content.replace('</answer>', '')", History.REWRITTEN),
    ],
)  # fmt: skip
def test_history_of_a_template(content, history):
    assert of_text(PLAIN.replace("m.content", f"({content})")).history is history


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.vision])
def test_each_image_has_its_slot_before_the_text(name):
    tokenizer = FAMILIES[name].tokenizer()
    template = ChatTemplate(tokenizer, tokenizer, {}, (1, 2))
    slot = FAMILIES[name].slot_token
    assert template.is_static and name in HISTORIES[template.history]
    for images in range(4):
        assert template.user_text(images).before.count(slot) == images
        assert template.before_first("S", images=images).count(slot) == images
        assert slot not in template.head("S") + template.user_text(images).after


def test_images_without_a_place_are_refused():
    with pytest.raises(ValueError, match="no place for a message with 2 images"):
        of_family("qwen3").user_text(2)


def test_user_messages_that_depend_on_their_place_have_no_fixed_text():
    numbered = of_text(PLAIN.replace("m.content", "(loop.index0 ~ m.content)"))
    assert not numbered.is_static and numbered.history is History.REWRITTEN
    assert of_family("qwen2_5_vl").is_static
    pictures = of_family("qwen2_5_vl", add_vision_id=True)
    assert not pictures.is_static and pictures.history is History.KEPT


def test_a_template_that_raises_in_a_second_turn_is_rendered_as_a_whole():
    single = (
        "{%- if messages | length > 2 -%}{{ raise_exception('one turn') }}{%- endif -%}" + PLAIN
    )
    template = of_text(single)
    assert not template.is_static and "see" in template.render(MESSAGES)


def test_thoughts_may_be_kept_by_an_argument_of_the_template():
    strips = PLAIN.replace("m.content", "(m.content if keep else m.content.split('</think>')[-1])")
    assert of_text(strips).history is History.WITHOUT_THOUGHTS
    assert of_text(strips, keep=True).history is History.KEPT


@pytest.mark.parametrize(
    ("last", "history"),
    [("{{ eos_token }}", History.KEPT), ("", History.KEPT), ("The end.", History.REWRITTEN)],
)
def test_an_end_of_text_after_the_last_message_is_no_part_of_a_turn(last, history):
    closing = "{%- if not add_generation_prompt -%}" + last + "{%- endif -%}"
    template = of_text(PLAIN.replace("<|end|>", "{{ '<|endoftext|>\n' }}") + closing)
    assert template.history is history
    assert template.response_suffix == "<|endoftext|>\n" + (
        last if history is History.REWRITTEN else ""
    )


# ---- arguments


def test_arguments_reach_the_template():
    off, on = of_family("qwen3", enable_thinking=False), of_family("qwen3")
    assert off.render(MESSAGES) == on.render(MESSAGES) + "<think>\n\n</think>\n\n"
    assert on.opening == "" and off.opening == ""
    assert of_family("qwen3_5").opening == "<think>\n"
    assert of_family("qwen3_5", enable_thinking=False).opening == ""
    assert of_family("qwen3_5_nothink", enable_thinking=True).opening == "<think>\n"


@pytest.mark.parametrize(
    ("family", "argument", "reads"),
    [
        ("qwen3", "enable_think", "reads enable_thinking; did you mean enable_thinking?"),
        # the template sets a variable of this name itself
        ("qwen3", "content", "reads enable_thinking"),
        ("qwen3", "messages", "reads enable_thinking"),
        ("qwen2_5", "enable_thinking", "reads none"),
        ("llama3_2", "strftime_now", "reads custom_tools, date_string, tools_in_user_message"),
        ("gemma3", "bos_token", "reads none"),
        ("qwen3_5", "date", "reads add_vision_id, enable_thinking"),
        ("lfm2_vl", "x", "reads preserve_thinking"),
    ],
)
def test_an_argument_that_the_template_does_not_read_is_refused(family, argument, reads):
    with pytest.raises(ValueError, match=rf"template_kwargs\.{argument}: .* {re.escape(reads)}$"):
        of_family(family, **{argument: "1"})


# ---- the clock


@pytest.fixture(params=[datetime(2026, 11, 22), datetime(2031, 1, 3)])
def today(request, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return request.param

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    return request.param


def test_a_date_of_the_clock_is_pinned(today):
    template = of_family("llama3_2")
    assert f"{today:%d %b %Y}" in FAMILIES["llama3_2"].tokenizer().apply_chat_template(
        MESSAGES, tokenize=False
    )
    assert template.pinned == "26 Jul 2024" and "Today Date: 26 Jul 2024" in template.render(
        MESSAGES
    )
    given = of_family("llama3_2", date_string="1 May 2025")
    assert given.pinned is None and "Today Date: 1 May 2025" in given.render(MESSAGES)
    assert of_family("qwen3").pinned is None


def test_every_format_of_a_date_is_pinned_and_nothing_else_changes(today):
    dated = (
        "\n  {%- macro day() -%}{{ strftime_now('%Y-%m-%d') }}{%- endmacro -%}\n{{ day() }} "
        '{{ strftime_now("%A, %d %B \'%y") }}{% generation %}\n{% endgeneration %}' + PLAIN
    )
    template = of_text(dated)
    assert template.pinned == "26 Jul 2024"
    fixed = dated.replace("strftime_now('%Y-%m-%d')", "'2024-07-26'")
    fixed = fixed.replace('strftime_now("%A, %d %B \'%y")', '"Friday, 26 July \'24"')
    assert template.render(MESSAGES) == of_text(fixed).render(MESSAGES)
    assert of_text(fixed).pinned is None


def test_a_computed_format_of_a_date_is_refused():
    with pytest.raises(ValueError, match="computes the format of the date"):
        of_text("{% set form = '%Y' %}{{ strftime_now(form) }}" + PLAIN)


def test_what_is_no_template_is_refused():
    with pytest.raises(ValueError, match=r"no Jinja template \(line 2: .*endfor"):
        of_text("\n{% if messages %}{% endfor %}")


# ---- the end of a turn


@pytest.mark.parametrize("name", MODELS)
def test_a_turn_ends_with_the_templates_token(name):
    bundle = tiny(name)
    end = bundle.tokenizer.convert_ids_to_tokens(bundle.end_of_turn_id)
    assert end == ENDS.get(name, "<|im_end|>")
    family = FAMILIES[MODELS[name].family or name]
    generation = family.eos_token_ids(bundle.tokenizer)
    assert bundle.eos_token_ids == {*generation, bundle.tokenizer.eos_token_id}
    assert not bundle.eos_token_ids & set(bundle.banned_token_ids)
    assert bundle.image_token_id is None or bundle.image_token_id in bundle.banned_token_ids


def test_the_templates_end_stops_responses_that_no_config_names():
    bundle = tiny("gemma3")
    bundle.model.generation_config.eos_token_id = 1
    end = bundle.tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert bundle.end_of_turn_id == end and bundle.eos_token_ids == {1, end}
    assert end not in bundle.banned_token_ids


@pytest.mark.parametrize(
    ("close", "end"), [("<|end|>", "<|end|>"), ("\n<|user|>", "<|user|>"), ("\n", "<|end|>"), ("", "<|end|>")]
)  # fmt: skip
def test_the_end_is_the_first_control_token_after_a_response_else_eos(close, end):
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    bundle = build_small_lm(text=small)
    tokenizer = copy.deepcopy(bundle.tokenizer)
    tokenizer.chat_template = PLAIN.replace("<|end|>", close)
    other = ModelBundle(bundle.model, tokenizer)
    assert other.end_of_turn_id == tokenizer.convert_tokens_to_ids(end)
    assert other.eos_token_ids == {bundle.end_of_turn_id, other.end_of_turn_id}


# ---- answers after control tokens

CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
# gpt-oss's thoughts and answer, as a model samples them
THOUGHTS = "<|channel|>analysis<|message|>the goal is up<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def channels() -> ModelBundle:
    tokenizer = copy.deepcopy(FAMILIES["smollm2"].tokenizer())
    tokenizer.add_tokens([AddedToken(name, special=True) for name in CHANNELS])
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = read_template("gptoss")
    config = LlamaConfig(vocab_size=len(tokenizer), **TEXT)
    return ModelBundle(LlamaForCausalLM(config).eval(), tokenizer)


def test_control_tokens_that_a_template_writes_inside_a_response_are_sampled(channels):
    template = channels.chat_template()
    assert template.header == FINAL
    assert template.inner == {"<|start|>", "<|channel|>", "<|message|>", "<|end|>"}
    banned = {channels.tokenizer.convert_ids_to_tokens(n) for n in channels.banned_token_ids}
    assert banned.isdisjoint(CHANNELS[:5]) and {"<|call|>", "<|im_start|>"} <= banned
    assert channels.tokenizer.convert_ids_to_tokens(channels.end_of_turn_id) == "<|return|>"
    # templates without such a format
    for name in ("qwen3", "llama3_2", "gemma4"):
        assert of_family(name).inner == frozenset() and of_family(name).header == ""
    # Gemma 4's newer templates write thoughts in a channel
    assert of_family("gemma4_vl").inner == {"<|channel>", "<channel|>"}


def test_the_words_of_a_response_follow_its_control_tokens(channels):
    context = ContextManager(channels, window="all", system_prompt=None, max_tokens=4096)
    ids = context.encode_response("<answer>Up</answer>")
    text = "".join(context.pieces(ids))
    assert text == FINAL + "<answer>Up</answer>"
    sampled = THOUGHTS + text
    for response in (text, sampled):
        start = context.words_start(response)
        parsed = parse_response(response, ["Up"], prompt_format=PromptFormat.NO_THINK, start=start)
        assert parsed.actions == [0] and response[start:] == "<answer>Up</answer>"
        ((_, *span),) = parsed.spans
        assert response[slice(*span)] == "Up"
    assert not parse_response(sampled, ["Up"], prompt_format=PromptFormat.NO_THINK).valid
    # a later prompt shows the words only, as the template does
    talk = context.start("")
    context.observe(talk, Observation(text="see"), max_turns=2)
    talk.respond(ids=ids, text=sampled, actions=["Up"])
    prompt = context.observe(talk, Observation(text="now"), max_turns=2)
    shown = channels.tokenizer.decode(prompt.ids)
    assert "<|start|>assistant<|channel|>final<|message|><answer>Up</answer><|end|>" in shown
    assert "analysis" not in shown.partition("user<|message|>")[2]
