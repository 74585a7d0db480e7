"""Small tokenizers that split text as those of real families do, on a few hundred ids."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen3_5Tokenizer,
)

# pieces of more than one character
PIECES = (
    "\n\n", "\n\n\n", "\n\n\n\n", "  ", "   ", ">\n", ">\n\n", ".\n", ".\n\n", "):\n",
    "think", "answer", "Up", "Left", "user", "assistant", "system", "model", "Assist", "see", "You", "are",
    " the", " see", " think", " Up", " goal", " is", " [", " answer", "User", "INST", "é", "€",
)  # fmt: skip


def _merges(pieces: list[str]) -> list[tuple[str, str]]:
    """Return the merges that join each piece from the left, a space before a word last."""
    merges: list[tuple[str, str]] = []
    for piece in pieces:
        spaced = piece[0] in "Ġ▁" and piece[1] != piece[0]
        word = piece[1:] if spaced else piece
        merges += [(word[:end], word[end]) for end in range(1, len(word))]
        merges += [(piece[0], word)] if spaced else []
    return list(dict.fromkeys(merges))


def _vocabulary(
    alphabet: list[str], pieces: list[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    merges = _merges(pieces)
    words = dict.fromkeys([*alphabet, *("".join(pair) for pair in merges)])
    return {word: number for number, word in enumerate(words)}, merges


def _byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges over bytes."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [split.pre_tokenize_str(piece)[0][0] for piece in PIECES]
    return _vocabulary(sorted(pre_tokenizers.ByteLevel.alphabet()), pieces)


def _with_byte_fallback(control: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges over characters, with tokens of bytes for all others."""
    letters = ["▁", "\n", *map(chr, range(33, 127))]
    pieces = [piece.replace(" ", "▁") for piece in PIECES]
    letters += sorted({letter for piece in pieces for letter in piece} - set(letters))
    return _vocabulary([*control, *(f"<0x{byte:02X}>" for byte in range(256)), *letters], pieces)


def _qwen2(**tokens: object) -> PreTrainedTokenizerFast:
    vocabulary, merges = _byte_level()
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, **tokens)


def _qwen3_5(**tokens: object) -> PreTrainedTokenizerFast:
    vocabulary, merges = _byte_level()
    return Qwen3_5Tokenizer(vocab=vocabulary, merges=merges, **tokens)


def _gemma(**tokens: object) -> PreTrainedTokenizerFast:
    vocabulary, merges = _with_byte_fallback(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"))
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, **tokens)


def _mistral(**tokens: object) -> PreTrainedTokenizerFast:
    vocabulary, merges = _with_byte_fallback(("<unk>", "<s>", "</s>"))
    return LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, **tokens)


def _of_bytes(
    pre_tokenizer: pre_tokenizers.PreTokenizer, **tokens: object
) -> PreTrainedTokenizerFast:
    vocabulary, merges = _byte_level()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


def _llama3(**tokens: object) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits as Llama 3 and LFM2 do."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _of_bytes(pre_tokenizers.Sequence([split, byte_level]), **tokens)


def _smollm2(**tokens: object) -> PreTrainedTokenizerFast:
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return _of_bytes(pre_tokenizers.Sequence([digits, byte_level]), **tokens)


TOKENIZERS = {
    "gemma": _gemma,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3_5": _qwen3_5,
    "smollm2": _smollm2,
}
