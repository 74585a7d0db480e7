"""The small model's tokenizer: byte-level BPE, trained once from the project's own words.

`python -m ragen_pl.models.small_vlm.tokenizer` trains it again, to the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ASSETS = Path(__file__).parent / "assets"
PAD, END, IMAGE = "<|pad|>", "<|end|>", "<|image|>"
CONTROL = (PAD, END, "<|user|>", "<|assistant|>", "<|system|>", IMAGE)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
MERGES = 190  # what the words below need; further merges would be of chance neighbours

CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- '<|image|>' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

# Words that observations, reasoning and answers are made of: one token each, with and without a blank before.
WORDS = (
    "Up", "Down", "Left", "Right", "me", "goal", "avoid", "holes", "box", "target", "walls", "reach", "the",
    "push", "boxes", "onto", "targets", "turn", "of", "last", "so", "far", "none", "arms", "first", "second",
    "Red", "Blue", "Green", "Yellow", "paid", "try", "best", "safe", "risky",
)  # fmt: skip
INSTRUCTIONS = (
    "You walk on a frozen lake. Reach the goal without stepping into a hole.",
    "Push the box onto the target. Walking into a box pushes it one cell further.",
    "Choose the arm that pays more on average. Answer with its name.",
)


def corpus() -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on."""
    for _ in range(200):
        yield from WORDS
        yield from (f" {word}" for word in WORDS)
        yield from (f"{digit} {digit}" for digit in range(10))
    yield from INSTRUCTIONS


def train() -> Tokenizer:
    """Train the tokenizer; the same corpus gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(CONTROL) + len(alphabet) + MERGES,
        special_tokens=list(CONTROL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Return the shipped tokenizer with its chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(ASSETS / "tokenizer.json"),
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[token for token in CONTROL if token not in (PAD, END)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    train().save(str(ASSETS / "tokenizer.json"))
