"""The small model's tokenizer: byte-level BPE, trained once and shipped. Any text round-trips.

`python -m ragen_pl.models.small_vlm.tokenizer` trains it again, to the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragen_pl.base.prompt_formats import PromptFormat, both_tags
from ragen_pl.models.small_vlm.corpus import texts

ASSET = Path(__file__).parent / "assets" / "tokenizer.json"
PAD, END, IMAGE = "<|pad|>", "<|end|>", "<|image|>"
CONTROL = (PAD, END, "<|user|>", "<|assistant|>", "<|system|>", IMAGE)
# those of other prompt formats follow all other tokens, whose ids stay the same
TAGS = tuple(tag for name in PromptFormat.FREE_THINK.tags for tag in both_tags(name))
# 6 control tokens, 4 tags, 256 bytes and merges of the corpus
VOCAB_SIZE = 512

# keeps its prefix: the rendering of a turn starts with that of the turns before, and nothing is trimmed or added
CHAT_TEMPLATE = (
    # the model learns its tools from demonstrations: their names are enough
    "{%- if tools -%}{{- '<|system|>' -}}"
    "{%- for tool in tools -%}{{- tool['function']['name'] + '\\n' -}}{%- endfor -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' -}}"
    "{%- if message['reasoning_content'] -%}"
    "{{- '<think>' + message['reasoning_content'] + '</think>' -}}{%- endif -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- '<|image|>' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' -}}{%- endfor -%}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train() -> Tokenizer:
    """Train the tokenizer; the same corpus gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS),
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    # not special: a response that is decoded without control tokens keeps its tags
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def load_tokenizer(
    *, prompt_format: PromptFormat = PromptFormat.FREE_THINK, words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Return the shipped tokenizer with its chat template, the tags of the prompt format and tokens for more words."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(ASSET),
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[token for token in CONTROL if token not in (PAD, END)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tags = [tag for name in prompt_format.token_names for tag in both_tags(name)]
    spaced = [form for word in words for form in (f" {word}", word)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*tags, *spaced)])
    return tokenizer


if __name__ == "__main__":
    train().save(str(ASSET))
