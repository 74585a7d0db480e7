"""Answers that no environment may fail on: huge, nested, half-closed, in other languages, of random characters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

LIMIT = 2_000
_ALPHABETS = (
    "abc XYZ 0123456789",
    "\x00\x01\x07\x08\x1b\x7f\r\n\t\u200b\u202e\ufeff",
    "{}[]\",:'\\`<>/&;|()*%$#@!?=+-_~^.",
    "äöüßéñçøłžş",
    "日本語한국어中文العربيةहिन्दीעברית",
    "🙂🧪🏳\ufe0f\u200d🌈𝔘𝕟\U0010ffff",
)
_PIECES = (
    "<answer>", "</answer>", "<think>", "||", "```python", "```", "<|end|>", "{{", "}}", "${jndi:x}",
    "../../etc/passwd",
    "'; DROP TABLE orders; --", "__import__('os')", "NaN", "-Infinity", "1e999", "null", "true", "%s%n", "\\u0000",
    "<![CDATA[", "<!-- ", "<?xml version='1.0'?>", "&amp;", "&#0;", "<svg>", "</svg>", "<rect", "{\"name\":", "}",
)  # fmt: skip
_FIXED = (
    "",
    " ",
    "\n",
    "\x00",
    "a" * LIMIT,
    "9" * LIMIT,
    "[" * LIMIT,
    '{"a":' * (LIMIT // 5),
    "(" * LIMIT,
    '{"name": "x", "arguments": ' + "[" * 900 + "]" * 900 + "}",
    '{"name": 1, "arguments": []}',
    '{"name": null}',
    '{"name": "__class__", "arguments": {}}',
    '{"name": "step", "arguments": {"action": "x"}}',
    '{"arguments": {}}',
    "[]",
    '"text"',
    "NaN",
    '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;&b;">]><a>&c;</a>',
    "<g>" * 400 + "</g>" * 400,
    "<think><answer>",
    "</answer><answer>Up</answer>",
)


def hostile_answers(rng: np.random.Generator, count: int) -> Iterator[str]:
    """Yield adversarial answers of at most `LIMIT` characters; the fixed ones come first."""
    yield from _FIXED[:count]
    makers: tuple[Callable[[np.random.Generator], str], ...] = (_characters, _pieces, _repeated)
    for number in range(count - len(_FIXED)):
        yield makers[number % len(makers)](rng)[:LIMIT]


def mutated(text: str, rng: np.random.Generator) -> str:
    """Return a good answer with a part of it cut, doubled, or replaced."""
    start, stop = sorted(int(place) for place in rng.integers(len(text) + 1, size=2))
    middle = ("", text[start:stop] * 2, _characters(rng)[:9], _pieces(rng)[:40])
    return text[:start] + middle[int(rng.integers(len(middle)))] + text[stop:]


def _characters(rng: np.random.Generator) -> str:
    alphabet = _ALPHABETS[int(rng.integers(len(_ALPHABETS)))]
    length = int(rng.integers(1, 10 ** int(rng.integers(1, 4))))
    return "".join(alphabet[index] for index in rng.integers(len(alphabet), size=length))


def _pieces(rng: np.random.Generator) -> str:
    chosen = rng.integers(len(_PIECES), size=int(rng.integers(1, 12)))
    return "".join(
        _PIECES[index] + (_characters(rng)[:5] if rng.random() < 0.3 else "") for index in chosen
    )


def _repeated(rng: np.random.Generator) -> str:
    return _PIECES[int(rng.integers(len(_PIECES)))] * int(rng.integers(1, 200))
