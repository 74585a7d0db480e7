"""Answers that no environment may fail on: huge, nested, half-closed, in other languages, of random characters."""

from __future__ import annotations

import json
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
# of arguments; the last one removes
_VALUES = (
    None,
    True,
    1,
    1.0,
    10**40,
    float("nan"),
    "",
    "1",
    "\ud800",
    "a" * 400,
    [],
    [1],
    {"a": 1},
    ...,
)
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
    "[" * 990,
    '{"a":' * 190,
    '{"name": "x", "arguments": ' + "[" * 900 + "]" * 900 + "}",
    '{"name": 1, "arguments": []}',
    '{"name": null}',
    '{"name": "__class__", "arguments": {}}',
    '{"name": "step", "arguments": {"action": "x"}}',
    '{"name": "\\ud800", "arguments": {}}',
    "\ud800",
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


def random_answers(
    rng: np.random.Generator, count: int, draw: Callable[[], str]
) -> Iterator[tuple[str, bool]]:
    """Yield good answers, damaged ones, calls with other values and random characters, each with whether it is good.

    Args:
        draw: Returns a good answer for the present state.
    """
    bad: tuple[Callable[[], str], ...] = (
        lambda: mutated(draw(), rng)[:LIMIT],
        lambda: revalued(draw(), rng),
        lambda: _characters(rng),
    )
    for number in range(count):
        kind = number % (len(bad) + 1)
        yield (bad[kind - 1](), False) if kind else (draw(), True)


def revalued(text: str, rng: np.random.Generator) -> str:
    """Return a call in JSON with one value replaced, removed or added; any other text is damaged."""
    try:
        call = json.loads(text)
    except ValueError:
        return mutated(text, rng)
    if not isinstance(call, dict):
        return mutated(text, rng)
    arguments = call.get("arguments")
    inner = arguments if isinstance(arguments, dict) and rng.random() < 0.8 else call
    key = [*inner, "x"][int(rng.integers(len(inner) + 1))]
    value = _VALUES[int(rng.integers(len(_VALUES)))]
    if value is ... and key in inner:
        del inner[key]
    else:
        inner[key] = str(inner.get(key)) if value is ... else value
    return json.dumps(call)


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
