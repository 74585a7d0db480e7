"""ModelBundle with models of several families, and loading pretrained models."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AddedToken,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from ragen_pl.engines.generation_check import GenerationCheck
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, generate
from ragen_pl.models.build import build_small_lm, build_small_vlm, load_pretrained
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.small_vlm.tokenizer import load_tokenizer
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_trainer
from ragen_pl.trajectory import Observation

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1}  # fmt: skip


@pytest.fixture(scope="module")
def vlm():
    return build_small_vlm(seed=0)


@pytest.fixture(scope="module")
def lm():
    return build_small_lm(seed=0)


def image(side: int = 64) -> np.ndarray:
    return np.zeros((side, side, 3), dtype=np.uint8)


def test_banned_and_eos_token_ids(vlm, lm):
    # pad, user, assistant, system and image; neither the end of a turn (1) nor the tags (508 to 511)
    assert vlm.banned_token_ids == lm.banned_token_ids == (0, 2, 3, 4, 5)
    assert vlm.eos_token_ids == {1} and vlm.end_of_turn_id == 1 and vlm.pad_token_id == 0


def test_rows_of_the_head_without_a_token_are_banned():
    padded = build_small_lm(seed=0, text={"vocab_size": 520})
    assert padded.banned_token_ids == (0, 2, 3, 4, 5, *range(512, 520))


def bundle_of_ids(*, letters, control, rows, added=()):
    """Return a model of so many rows and a tokenizer with these ids of letters and control tokens.

    Tokens that are added, names and whether they are special, follow the largest of them.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    control = dict(zip(("<|pad|>", "<|start|>", "<|end|>"), control, strict=True))
    vocabulary = dict(zip(alphabet, letters, strict=True)) | control
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(name, special=True) for name in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|end|>", pad_token="<|pad|>"
    )
    for name, special in added:
        tokenizer.add_tokens([AddedToken(name, special=special)])
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>{% endif %}"
    )
    eos = control["<|end|>"]
    model = LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=rows, eos_token_id=eos))
    return ModelBundle(model.eval(), tokenizer)


LETTERS = range(256)
ADDED = (("<word>", False), ("<|tool|>", True))


@pytest.mark.parametrize(
    ("letters", "control", "rows", "added"),
    [
        (LETTERS, (256, 257, 258), 264, ()),
        (LETTERS, (257, 258, 259), 265, ()),
        (LETTERS, (260, 261, 262), 268, ()),
        ([n + 2 * (n > 49) + 3 * (n > 199) for n in LETTERS], (262, 266, 270), 280, ADDED),
        (range(10, 266), (5, 6, 7), 266, ()),
        (range(10, 266), (266, 5, 7), 266, ()),
        (LETTERS, (256, 257, 258), 259, ADDED),
        (range(3, 259), (0, 1, 2), 250, ADDED),
    ],
    ids=[
        "none",
        "of one",
        "of four",
        "several",
        "at the start",
        "at the start, and padding beyond the rows",
        "a longer tokenizer",
        "a longer tokenizer, of letters",
    ],
)
def test_ids_of_a_gap_in_the_vocabulary_are_banned_and_the_ends_of_responses_are_not(
    letters, control, rows, added
):
    """Ids of control tokens that do not follow the ids of the words, and tokens that the model has not."""
    bundle = bundle_of_ids(letters=letters, control=control, rows=rows, added=added)
    assert bundle.end_of_turn_id == control[2]
    word = bundle.tokenizer.convert_tokens_to_ids("<word>") if added else control[2]
    ids = {*letters, control[2], word} & {*range(rows)}
    assert bundle.banned_token_ids == tuple(sorted(set(range(rows)) - ids))
    assert set(bundle.can_sample(torch.arange(400)).nonzero().flatten().tolist()) == ids
    # the engine, the trainer and the check of an engine's answers
    allowed = GenerationCheck.of(bundle).allowed
    assert set(np.flatnonzero(allowed).tolist()) == ids
    context = ContextManager(bundle, system_prompt=None, max_tokens=300)
    assert check_trainer(context, image_size=None, policy=PolicyModule(bundle)) < 1e-4
    engine = TransformersEngine(PolicyModule(bundle))
    text = "Up <word> <|tool|>"
    prompt = context.observe(context.start(""), Observation(text=text), max_turns=2)
    assert bundle.decode(prompt.ids) == f"<|start|>{text}<|end|><|start|>"
    assert prompt.ids.max() < rows
    requests = [
        GenerationRequest(session=n, prompt=prompt, max_tokens=20 + n, temperature=4.0, seed=n)
        for n in range(8)
    ]
    sampled = {
        token for answer in generate(engine, requests, keep=False) for token in answer.ids.tolist()
    }
    assert sampled <= ids and len(sampled) > 50


@pytest.mark.parametrize(
    ("letters", "control", "named"),
    [
        (range(3, 259), (0, 1, 2), "'.' with id 258"),
        (LETTERS, (256, 258, 257), "'<.start.>' with id 258"),
    ],
    ids=["of a letter", "of the template"],
)
def test_a_token_that_the_model_does_not_read_is_refused_by_name(letters, control, named):
    bundle = bundle_of_ids(letters=letters, control=control, rows=258)
    context = ContextManager(bundle, system_prompt=None, max_tokens=300)
    with pytest.raises(ValueError, match=rf"the token {named}, and the model has 258 embeddings"):
        # every byte of text in UTF-8
        for letter in map(chr, range(0x180)):
            context.observe(context.start(""), Observation(text=letter), max_turns=2)


def test_image_tokens_are_expanded_to_one_for_each_feature(vlm):
    text = "<|user|><|image|>then<|image|>"
    expanded = vlm.expand_image_slots(text, [image(32), image(48)])
    assert expanded == "<|user|>" + "<|image|>" * 4 + "then" + "<|image|>" * 9
    with pytest.raises(ValueError, match="2 image slots for 1 images"):
        vlm.expand_image_slots(text, [image()])


def test_text_model_with_images_raises(lm):
    assert lm.image_token_id is None and lm.processor is None
    with pytest.raises(ValueError, match="model=small_vlm"):
        lm.expand_image_slots("<|user|>", [image()])


def test_pieces_join_to_the_text(lm):
    text = "<think>me 1 2</think><answer>Up</answer>"
    ids = lm.tokenizer(text)["input_ids"]
    assert "".join(lm.piece(token) for token in ids) == text


def test_decoder_and_head_match_the_model(vlm, lm):
    ids = torch.tensor([[2, 40, 41, 3]])
    for bundle in (vlm, lm):
        states = bundle.backbone(input_ids=ids, use_cache=False).last_hidden_state
        assert states.shape == (1, 4, bundle.hidden_size)
        assert torch.equal(bundle.lm_head(states), bundle.model(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["vlm", "lm"])
def test_saved_bundle_loads_unchanged(name, request, tmp_path):
    bundle = request.getfixturevalue(name)
    bundle.save(tmp_path)
    loaded = load_pretrained(str(tmp_path))
    assert type(loaded.model) is type(bundle.model) and not loaded.model.training
    assert (loaded.processor is None) == (bundle.processor is None)
    weights = loaded.model.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in bundle.model.state_dict().items())
    for property_name in ("banned_token_ids", "eos_token_ids", "image_token_id", "pad_token_id"):
        assert getattr(loaded, property_name) == getattr(bundle, property_name)
    chat = [{"role": "user", "content": "reach the goal"}]
    texts = [each.renderer.apply_chat_template(chat, tokenize=False) for each in (loaded, bundle)]
    assert texts[0] == texts[1] == "<|user|>reach the goal"
    words = "<think>me 12 3 || Up\n\n don't</think>"
    for tokenizer in (loaded.tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer(words)["input_ids"] == bundle.tokenizer(words)["input_ids"]
        assert len(tokenizer) == 512


@pytest.mark.parametrize(
    ("kind", "config", "scale"),
    [
        (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0}),
        (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
        (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 0.5, "head_dim": 16}),
    ],
)
def test_logits_are_scaled_as_by_the_model(kind, config, scale):
    made = kind(config(vocab_size=600, pad_token_id=0, eos_token_id=1, **TINY, **scale)).eval()
    bundle = ModelBundle(made, load_tokenizer())
    ids = torch.arange(8, 24)[None]
    with torch.no_grad():
        states = bundle.backbone(input_ids=ids).last_hidden_state
        torch.testing.assert_close(bundle.lm_head(states), made(input_ids=ids).logits)


def test_control_tokens_without_a_role_are_banned():
    bundle = build_small_lm(seed=0)
    bundle.tokenizer.add_tokens([AddedToken("<|secret|>", special=True)])
    bundle.model.resize_token_embeddings(len(bundle.tokenizer))
    secret = bundle.tokenizer.convert_tokens_to_ids("<|secret|>")
    assert secret in bundle.banned_token_ids and bundle.special_tokens[secret] == "<|secret|>"


def test_pretrained_language_model_loads(tmp_path):
    tokenizer = load_tokenizer()
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=600, eos_token_id=[1, 7], **TINY))
    ModelBundle(made, tokenizer).save(tmp_path)
    bundle = load_pretrained(str(tmp_path), dtype="bfloat16", attn_implementation="eager")
    assert bundle.eos_token_ids == {1, 7} and bundle.hidden_size == 32
    assert bundle.banned_token_ids[-1] == 599 and 7 not in bundle.banned_token_ids
    assert next(bundle.model.parameters()).dtype == torch.bfloat16
    assert bundle.model.config._attn_implementation == "eager"
    # plain AutoTokenizer would read it with Qwen's rules for digits and blanks
    assert bundle.tokenizer("me 12 3")["input_ids"] == tokenizer("me 12 3")["input_ids"]
    # a generation config that is changed after the bundle was made
    bundle.model.generation_config.eos_token_id = [1, 4]
    assert bundle.eos_token_ids == {1, 4} and 4 not in bundle.banned_token_ids


def test_pretrained_vision_language_model_loads(tmp_path):
    eyes = CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    config = LlavaConfig(
        vision_config=eyes, text_config=Qwen2Config(vocab_size=512, **TINY), image_token_index=5,
        vision_feature_select_strategy="full", vision_feature_layer=-1, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}), load_tokenizer(),
        patch_size=16, vision_feature_select_strategy="full", image_token="<|image|>", num_additional_image_tokens=1,
        chat_template=load_tokenizer().chat_template,
    )  # fmt: skip
    ModelBundle(LlavaForConditionalGeneration(config), processor.tokenizer, processor).save(
        tmp_path
    )
    bundle = load_pretrained(str(tmp_path))
    assert bundle.image_token_id == 5
    features = bundle.images.encode([image(), image()])
    assert features.tokens.shape == (2 * bundle.num_image_tokens(image()), 32)


def test_model_with_patch_grids_loads(tmp_path):
    tokenizer = load_tokenizer()
    marks = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]  # 512 to 515
    tokenizer.add_special_tokens(
        {"extra_special_tokens": marks}, replace_extra_special_tokens=False
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": 520, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": 1, **TINY},
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
                       "patch_size": 14, "fullatt_block_indexes": [0]},
        image_token_id=512, video_token_id=513, vision_start_token_id=514, vision_end_token_id=515,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}), tokenizer,
        video_processor=Qwen2VLVideoProcessor(), chat_template=tokenizer.chat_template,
    )  # fmt: skip
    ModelBundle(Qwen2_5_VLForConditionalGeneration(config), tokenizer, processor).save(tmp_path)
    bundle = load_pretrained(str(tmp_path))
    shown = [np.full((56, 56, 3), 10, np.uint8), np.full((28, 56, 3), 200, np.uint8)]
    features = bundle.images.encode([*shown, shown[0]])
    assert features.counts == (4, 2, 4) and features.grids.tolist() == [
        [1, 4, 4],
        [1, 2, 4],
        [1, 4, 4],
    ]
    for given, expected in (
        ({"min_pixels": 112 * 112}, 112 * 112),
        ({"max_pixels": 28 * 28}, 28 * 28),
        ({"min_pixels": 84 * 84, "max_pixels": 112 * 112}, 84 * 84),
    ):
        # the range of pixels has other names in transformers now, whose old ones are a warning
        other = load_pretrained(str(tmp_path), image_processor=given).images.encode(shown[:1])
        assert other.counts == (expected // 28**2,)
    alone = bundle.images.encode(shown[1:])
    torch.testing.assert_close(alone.tokens, features.tokens[4:6])
    assert {512, 513, 514, 515, 516, 519} < set(bundle.banned_token_ids)


def test_missing_model_raises_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.build\.path=.*save_pretrained") as caught:
        load_pretrained(str(tmp_path / "nothing"))
    assert "\n" not in str(caught.value)


def test_unknown_dtype_raises(lm, tmp_path):
    lm.save(tmp_path)
    with pytest.raises(ValueError, match=r"dtype=float33.*float32"):
        load_pretrained(str(tmp_path), dtype="float33")


def test_text_models_do_not_import_timm():
    code = (
        "import sys, ragen_pl.models.bundle, ragen_pl.models.build as build\n"
        "assert 'transformers' not in sys.modules\n"
        "build.build_small_lm(seed=0)\n"
        "assert 'timm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
