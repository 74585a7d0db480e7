"""Exact values of arithmetic expressions, and texts that are none."""

from __future__ import annotations

import doctest
from fractions import Fraction

import pytest

import envs.adapters.expressions
from envs.adapters.expressions import evaluate


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7 - 4 - 2", 1, [2, 4, 7]),
        ("8/(3 - 8/3)", 24, [3, 3, 8, 8]),
        ("-(2 + 3)*4", -20, [2, 3, 4]),
        (" 1/3 ", Fraction(1, 3), [1, 3]),
    ],
)
def test_value_is_exact(text: str, value: Fraction, numbers: list[int]) -> None:
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    ["", "+", "9**9**9", "7//2", "1/0", "2(3)", "1, 2", "01", "1.5", "x", "(" * 150, "-" * 199 + "1x",
     "__import__('os')", "1\n+2", "١+٢", "1" * 201],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        evaluate(text)


def test_doctest() -> None:
    assert doctest.testmod(envs.adapters.expressions) == (0, 1)
