"""Grammar of small functions: one to a few steps on a number, a list or a text, with words and reference programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

Value = int | list[int] | str
_LETTERS = "abcde"
_MAX_NUMBER = 9
# draws of a function until it is worth testing
_DRAWS = 200


class Kind(StrEnum):
    """Kind of a value."""

    NUMBER = "number"
    LIST = "list"
    TEXT = "text"


class Step(NamedTuple):
    """Step of a function. `words` and `code` may contain a number `{k}`; `code` is an expression of `x`."""

    takes: Kind
    gives: Kind
    words: str
    code: str
    apply: Callable[[Any, int], Any]


STEPS = (
    Step(Kind.NUMBER, Kind.NUMBER, "add {k}", "x + {k}", lambda x, k: x + k),
    Step(Kind.NUMBER, Kind.NUMBER, "subtract {k}", "x - {k}", lambda x, k: x - k),
    Step(Kind.NUMBER, Kind.NUMBER, "multiply by {k}", "x * {k}", lambda x, k: x * k),
    Step(Kind.NUMBER, Kind.NUMBER, "divide by {k}", "x // {k}", lambda x, k: x // k),
    Step(Kind.NUMBER, Kind.NUMBER, "remainder by {k}", "x % {k}", lambda x, k: x % k),
    Step(Kind.NUMBER, Kind.NUMBER, "at least {k}", "max(x, {k})", lambda x, k: max(x, k)),
    Step(Kind.NUMBER, Kind.NUMBER, "at most {k}", "min(x, {k})", lambda x, k: min(x, k)),
    Step(Kind.NUMBER, Kind.NUMBER, "square", "x * x", lambda x, k: x * x),
    Step(Kind.NUMBER, Kind.NUMBER, "negate", "-x", lambda x, k: -x),
    Step(Kind.NUMBER, Kind.NUMBER, "absolute", "abs(x)", lambda x, k: abs(x)),
    Step(Kind.LIST, Kind.LIST, "sort", "sorted(x)", lambda x, k: sorted(x)),
    Step(Kind.LIST, Kind.LIST, "reverse", "x[::-1]", lambda x, k: x[::-1]),
    Step(Kind.LIST, Kind.LIST, "drop {k}", "x[{k}:]", lambda x, k: x[k:]),
    Step(Kind.LIST, Kind.LIST, "keep {k}", "x[:{k}]", lambda x, k: x[:k]),
    Step(Kind.LIST, Kind.LIST, "add {k} to each", "[n + {k} for n in x]", lambda x, k: [n + k for n in x]),
    Step(Kind.LIST, Kind.LIST, "keep even", "[n for n in x if n % 2 == 0]", lambda x, k: [n for n in x if n % 2 == 0]),
    Step(Kind.LIST, Kind.NUMBER, "sum", "sum(x)", lambda x, k: sum(x)),
    Step(Kind.LIST, Kind.NUMBER, "count", "len(x)", lambda x, k: len(x)),
    Step(Kind.LIST, Kind.NUMBER, "largest or 0", "max(x, default=0)", lambda x, k: max(x, default=0)),
    Step(Kind.TEXT, Kind.TEXT, "upper case", "x.upper()", lambda x, k: x.upper()),
    Step(Kind.TEXT, Kind.TEXT, "reverse", "x[::-1]", lambda x, k: x[::-1]),
    Step(Kind.TEXT, Kind.TEXT, "repeat {k} times", "x * {k}", lambda x, k: x * k),
    Step(Kind.TEXT, Kind.TEXT, "drop {k}", "x[{k}:]", lambda x, k: x[k:]),
    Step(Kind.TEXT, Kind.TEXT, "sort", '"".join(sorted(x))', lambda x, k: "".join(sorted(x))),
    Step(Kind.TEXT, Kind.NUMBER, "count", "len(x)", lambda x, k: len(x)),
)  # fmt: skip
# numbers {k}; a list or a text is cut by few
_NUMBERS, _CUTS = range(2, 10), range(1, 4)


@dataclass(frozen=True, slots=True)
class Specification:
    """A function as steps, by index in `STEPS`, each with its number."""

    steps: tuple[tuple[int, int], ...]

    @property
    def takes(self) -> Kind:
        """Kind of the argument."""
        return STEPS[self.steps[0][0]].takes

    def apply(self, value: Value) -> Value:
        """Return the function's value."""
        for index, number in self.steps:
            value = STEPS[index].apply(value, number)
        return value

    def words(self) -> str:
        """Return the steps in words."""
        return ", then ".join(STEPS[index].words.format(k=number) for index, number in self.steps)

    def program(self) -> str:
        """Return the reference program."""
        lines = [f" x = {STEPS[index].code.format(k=number)}" for index, number in self.steps]
        return "\n".join(["def f(x):", *lines, " return x"])


def draw_specification(rng: np.random.Generator, *, steps: int, kinds: list[Kind]) -> Specification:
    """Draw a function of `steps` steps that takes one of `kinds`."""
    kind, chosen = kinds[int(rng.integers(len(kinds)))], []
    for _ in range(steps):
        possible = [index for index, step in enumerate(STEPS) if step.takes is kind]
        index = possible[int(rng.integers(len(possible)))]
        numbers = _NUMBERS if STEPS[index].takes is Kind.NUMBER else _CUTS
        chosen.append((index, int(rng.choice(numbers)) if "{k}" in STEPS[index].words else 0))
        kind = STEPS[index].gives
    return Specification(tuple(chosen))


def draw_task(
    rng: np.random.Generator, *, steps: int, kinds: list[Kind], examples: int, tests: int
) -> tuple[Specification, list[Value]]:
    """Draw a function and different inputs, the examples first.

    Neither a constant nor the argument itself agrees with half of the results or more.
    """
    for _ in range(_DRAWS):
        specification = draw_specification(rng, steps=steps, kinds=kinds)
        inputs: list[Value] = []
        while len(inputs) < examples + tests:
            value = draw_value(rng, specification.takes)
            if value not in inputs:
                inputs.append(value)
        # An empty example shows little.
        inputs.sort(key=lambda value: value in ([], ""))
        results = [specification.apply(value) for value in inputs]
        commonest = max(results.count(result) for result in results)
        same = sum(result == value for result, value in zip(results, inputs, strict=True))
        if 2 * max(commonest, same) < len(inputs):
            return specification, inputs
    raise RuntimeError(f"found no function of {steps} steps in {_DRAWS} draws")


def draw_value(rng: np.random.Generator, kind: Kind) -> Value:
    """Draw an argument."""
    if kind is Kind.NUMBER:
        return int(rng.integers(-_MAX_NUMBER, 3 * _MAX_NUMBER))
    length = int(rng.integers(0, 7))
    if kind is Kind.LIST:
        return [int(number) for number in rng.integers(-_MAX_NUMBER, _MAX_NUMBER + 1, length)]
    return "".join(_LETTERS[index] for index in rng.integers(len(_LETTERS), size=length))
