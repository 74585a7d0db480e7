"""Exact values of arithmetic expressions, for judging answers without running them as programs."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

_FORM = re.compile(r"[0-9+\-*/() ]{1,200}")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression and the whole numbers in it.

    Raises:
        ValueError: It is not an expression of whole numbers with + - * / and brackets, or divides by zero.

    >>> evaluate("(5 - 4)/2 + 7")
    (Fraction(15, 2), [2, 4, 5, 7])
    """
    if not _FORM.fullmatch(text):
        raise ValueError("no arithmetic expression")
    numbers: list[int] = []
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, numbers)
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise ValueError(f"no arithmetic expression: {error}") from None
    return value, sorted(numbers)


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError(f"{type(node).__name__} is not allowed")
