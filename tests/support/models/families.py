"""Model families by name: the real chat template of each, and a small tokenizer with its real control tokens.

Templates are read from the installed package trl, never retyped. The two that it has not are written here
and have `verified` False.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from support.models.family_tokenizers import TOKENIZERS
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

QWEN_CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
QWEN_TOOLS = ("<tool_call>", "</tool_call>")
QWEN_THINKS = (*QWEN_TOOLS, "<tool_response>", "</tool_response>", "<think>", "</think>")
GEMMA4_CONTROL = (
    "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>",
    "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|audio|>", "<|video|>", '<|"|>',
)  # fmt: skip
LFM2_CONTROL = (
    "<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|fim_pre|>", "<|fim_mid|>", "<|fim_suf|>", "<|im_start|>",
    "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<|tool_response_start|>", "<|tool_response_end|>",
)  # fmt: skip

# ChatML with SmolLM2's default system prompt; its own comes with the model's files
SMOLLM2 = """{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
INTERNVL = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{{ '<IMG_CONTEXT>\n' if part['type'] == 'image' else part['text'] }}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
        template: the name of a file of trl, or a template of ours.
        tokenizer_kind: how its tokenizer splits text, a key of `TOKENIZERS`.
        roles: its control tokens by attribute of the tokenizer; those of a processor included.
        control: its control tokens without an attribute.
        strips: whether the control tokens of messages take the blanks after them.
        words: added tokens that are no control tokens.
        eos_tokens: the tokens that its generation config names as ends of a response.
        slot_token: what the template writes for an image.
        image_token: stands for one feature of an image.
        vision: whether the family's model sees images.
        verified: whether the template is the family's own.
    """

    template: str
    tokenizer_kind: str
    roles: dict[str, str]
    control: tuple[str, ...] = ()
    strips: bool = False
    words: tuple[str, ...] = ()
    eos_tokens: tuple[str, ...]
    slot_token: str | None = None
    image_token: str | None = None
    vision: bool = False
    verified: bool = True

    @property
    def chat_template(self) -> str:
        """The template's text."""
        return read_template(self.template) if self.verified else self.template

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a small tokenizer with the family's control tokens and chat template."""
        standard = {
            name: token
            for name, token in self.roles.items()
            if name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        named = {name: token for name, token in self.roles.items() if name not in standard}
        tokenizer = TOKENIZERS[self.tokenizer_kind](
            **standard, extra_special_tokens=named, chat_template=self.chat_template
        )
        control = dict.fromkeys([*self.roles.values(), *self.control])
        tokenizer.add_tokens(
            [
                AddedToken(token, special=True, rstrip=self.strips and token in self.control)
                for token in control
            ]
        )
        tokenizer.add_tokens([AddedToken(word, special=False) for word in self.words])
        return tokenizer

    def eos_token_ids(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        """Return the ids of `eos_tokens`, for a generation config."""
        return [int(tokenizer.convert_tokens_to_ids(token)) for token in self.eos_tokens]


def read_template(name: str) -> str:
    """Return a template of the installed package trl, without importing the package."""
    package = importlib.util.find_spec("trl")
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / "chat_templates" / f"{name}.jinja"
    return file.read_text(encoding="utf-8")


_QWEN_ROLES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
_GEMMA_ROLES = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
_GEMMA3_IMAGES = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_LFM2_ROLES = {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
_SMOLLM2_ROLES = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}

FAMILIES: dict[str, Family] = {
    "qwen2_5": Family(
        template="qwen2_5",
        tokenizer_kind="qwen2",
        roles=_QWEN_ROLES,
        control=QWEN_CONTROL,
        words=QWEN_TOOLS,
        eos_tokens=_QWEN_ENDS,
    ),
    "qwen3": Family(
        template="qwen3",
        tokenizer_kind="qwen2",
        roles=_QWEN_ROLES,
        control=QWEN_CONTROL,
        words=QWEN_THINKS,
        eos_tokens=_QWEN_ENDS,
    ),
    # Qwen3.5-4B and larger; those of 2B and less differ in the default of enable_thinking
    "qwen3_5": Family(
        template="qwen3_5_think",
        tokenizer_kind="qwen3_5",
        roles=_QWEN_ROLES,
        control=QWEN_CONTROL,
        words=QWEN_THINKS,
        eos_tokens=_QWEN_ENDS,
    ),
    "qwen3_5_nothink": Family(
        template="qwen3_5_nothink",
        tokenizer_kind="qwen3_5",
        roles=_QWEN_ROLES,
        control=QWEN_CONTROL,
        words=QWEN_THINKS,
        eos_tokens=_QWEN_ENDS,
    ),
    "llama3_2": Family(
        template="llama3_2",
        tokenizer_kind="llama3",
        roles={
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "pad_token": "<|finetune_right_pad_id|>",
        },
        control=(
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
        ),
        eos_tokens=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "gemma3": Family(
        template="gemma3",
        tokenizer_kind="gemma",
        roles=_GEMMA_ROLES | _GEMMA3_IMAGES,
        control=("<start_of_turn>", "<end_of_turn>"),
        eos_tokens=("<eos>", "<end_of_turn>"),
    ),
    "gemma4": Family(
        template="gemma4",
        tokenizer_kind="gemma",
        roles=_GEMMA_ROLES
        | {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
        control=GEMMA4_CONTROL,
        eos_tokens=("<eos>", "<turn|>", "<|tool_response>"),
    ),
    "lfm2": Family(
        template="lfm2",
        tokenizer_kind="llama3",
        roles=_LFM2_ROLES,
        control=LFM2_CONTROL,
        eos_tokens=("<|im_end|>",),
    ),
    "phi3": Family(
        template="phi3_5",
        tokenizer_kind="mistral",
        roles={
            "bos_token": "<s>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
        },
        control=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        strips=True,
        eos_tokens=("<|end|>", "<|assistant|>", "<|endoftext|>"),
    ),
    "smollm2": Family(
        template=SMOLLM2,
        verified=False,
        tokenizer_kind="smollm2",
        roles=_SMOLLM2_ROLES,
        eos_tokens=("<|im_end|>",),
    ),
    "qwen2_5_vl": Family(
        template="qwen2_5_vl",
        tokenizer_kind="qwen2",
        roles=_QWEN_ROLES,
        control=QWEN_CONTROL,
        words=QWEN_TOOLS,
        eos_tokens=_QWEN_ENDS,
        slot_token="<|image_pad|>",
        image_token="<|image_pad|>",
        vision=True,
    ),
    "qwen3_vl": Family(
        template="qwen3_vl",
        tokenizer_kind="qwen2",
        roles=_QWEN_ROLES,
        control=QWEN_CONTROL,
        words=QWEN_THINKS,
        eos_tokens=_QWEN_ENDS,
        slot_token="<|image_pad|>",
        image_token="<|image_pad|>",
        vision=True,
    ),
    "gemma3_vl": Family(
        template="gemma3",
        tokenizer_kind="gemma",
        roles=_GEMMA_ROLES | _GEMMA3_IMAGES,
        control=("<start_of_turn>", "<end_of_turn>"),
        eos_tokens=("<eos>", "<end_of_turn>"),
        slot_token="<start_of_image>",
        image_token="<image_soft_token>",
        vision=True,
    ),
    "smolvlm": Family(
        template="smolvlm",
        tokenizer_kind="smollm2",
        roles=_SMOLLM2_ROLES
        | {
            "eos_token": "<end_of_utterance>",
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        control=tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        eos_tokens=("<end_of_utterance>",),
        slot_token="<image>",
        image_token="<image>",
        vision=True,
    ),
    # LLaVA-NeXT on Mistral
    "llava_next": Family(
        template="llava_next",
        tokenizer_kind="mistral",
        roles={
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "image_token": "<image>",
        },
        eos_tokens=("</s>",),
        slot_token="<image>",
        image_token="<image>",
        vision=True,
    ),
    "internvl": Family(
        template=INTERNVL,
        verified=False,
        tokenizer_kind="qwen2",
        roles=_QWEN_ROLES
        | {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        control=(*QWEN_CONTROL, "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"),
        words=QWEN_TOOLS,
        eos_tokens=_QWEN_ENDS,
        slot_token="<IMG_CONTEXT>",
        image_token="<IMG_CONTEXT>",
        vision=True,
    ),
    "lfm2_vl": Family(
        template="lfm2_2_5_vl",
        tokenizer_kind="llama3",
        roles=_LFM2_ROLES
        | {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        control=(
            *LFM2_CONTROL,
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
        ),
        eos_tokens=("<|im_end|>",),
        slot_token="<image>",
        image_token="<image>",
        vision=True,
    ),
}

# its own template comes with the model's files
FAMILIES["llava_onevision"] = replace(
    FAMILIES["internvl"],
    template=INTERNVL.replace("<IMG_CONTEXT>", "<image>"),
    roles=_QWEN_ROLES | {"image_token": "<image>", "video_token": "<video>"},
    control=QWEN_CONTROL,
    slot_token="<image>",
    image_token="<image>",
)
FAMILIES["qwen3_5_vl"] = replace(
    FAMILIES["qwen3_5"], slot_token="<|image_pad|>", image_token="<|image_pad|>", vision=True
)
# the template as Google corrected it after the release
FAMILIES["gemma4_vl"] = replace(
    FAMILIES["gemma4"],
    template="gemma4_v5",
    roles=FAMILIES["gemma4"].roles
    | {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
    slot_token="<|image|>",
    image_token="<|image|>",
    vision=True,
)
