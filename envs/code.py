"""Code: write a Python function for a short specification; hidden tests run it in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from gymnasium import spaces

from .base import (
    PRINTABLE,
    Count,
    Environment,
    Observation,
    Probability,
    Reward,
    checked_arguments,
)
from .sandbox.client import ENDINGS, SANDBOX, check_sandbox
from .specifications import Kind, Specification, Value, draw_specification, draw_task

_FENCED = re.compile(r"\s*```(?:python)?\n(.*?)```\s*", re.DOTALL)
# of a result that is shown
_SHOWN = 60


class Code(Environment):
    """Write a function `f(x)`. The program runs without files, network, processes or much time (`envs.sandbox`).

    ## Rewards
    `tests`: 1 if the program passes all tests, visible and hidden, else 0: a constant passes some. `attempts`: minus
    `attempt_cost` for each program that fails.

    ## Observations
    The steps in words with visible examples; after an attempt the first example that fails. Of the hidden tests a
    player hears only that one fails, or that the program ended or took too long there. Their results never enter the
    process of the program, and their inputs after the results of the examples have left it.

    ## Trivial Policies
    A program that is the same for every function has success at most 0.1 and return at most -0.2 with the shipped
    settings, and an answer without a program less.

    ## Episode End
    Terminated when a program passes all tests, and after `attempts` programs.

    ## Arguments
    - `steps`: largest number of steps of the function, from 1 to 4; the number is drawn.
    - `kinds`: kinds of the argument: number, list, text.
    - `examples`, `tests`: number of visible and of hidden tests.
    - `attempts`, `attempt_cost`: see Episode End and Rewards.
    - `described_fraction`: fraction of functions described in words; others have to be found from the examples.
    """

    needs_trust = ()

    instructions = (
        "You write a Python function f(x) of one argument. You are told what it does with x, step by step, and see "
        "examples. Divide rounds down, at least and at most give the larger and the smaller of two numbers, keep "
        "and drop refer to the first items. Where no steps are told, find them from the examples. Your answer is "
        "the program alone, such as:\ndef f(x):\n return x + 1\nHidden tests run it too. After a program that fails "
        "you see one example that it fails and can write another. Files, network, processes and most modules are "
        "out of reach."
    )

    frequent_words = (
        "def f(x):", "\n x = ", "\n return x", ", then", "steps", "step", "number", "list", "text", "add", "subtract",
        "multiply by", "divide by", "remainder by", "at least", "at most", "square", "negate", "absolute", "sorted(x)",
        "sort", "reverse", "drop", "keep even", "keep", "to each", "sum(x)", "sum", "count", "largest or 0",
        "upper case", "repeat", "times", "max(x, ", "min(x, ", "abs(x)", "x * x", "x[::-1]", "[n + ", " for n in x]",
        "[n for n in x if n % 2 == 0]", "len(x)", "max(x, default=0)", "x.upper()", '"".join(sorted(x))',
        "a hidden test fails", "error",
    )  # fmt: skip

    @checked_arguments
    def __init__(
        self,
        *,
        steps: Annotated[int, Interval(ge=1, le=4)] = 2,
        kinds: tuple[Kind, ...] = tuple(Kind),
        examples: Annotated[int, Interval(ge=1, le=8)] = 2,
        tests: Annotated[int, Interval(ge=4, le=20)] = 8,
        attempts: Count = 3,
        attempt_cost: Reward = 0.1,
        described_fraction: Probability = 1.0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.kinds = [Kind(kind) for kind in kinds]
        if not self.kinds:
            raise ValueError("kinds: found none, expected one or more of number, list, text")
        check_sandbox()
        self.max_steps, self.example_count, self.test_count = steps, examples, tests
        self.attempts, self.attempt_cost = attempts, attempt_cost
        self.described_fraction = described_fraction
        self.action_space = spaces.Text(2000, charset=PRINTABLE)
        self.observation_space = spaces.Text(1000, charset=PRINTABLE)
        self.specification = Specification(())
        self.inputs: list[Value] = []
        self.described, self.used, self._failed = True, 0, ""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a function and its tests."""
        self._begin(seed=seed, options=options)
        self.specification, self.inputs = draw_task(
            self.np_random,
            steps=int(self.np_random.integers(1, self.max_steps + 1)),
            kinds=self.kinds,
            examples=self.example_count,
            tests=self.test_count,
        )
        self.described = bool(self.np_random.random() < self.described_fraction)
        self.used, self._failed = 0, ""
        examples = ", ".join(map(self.example, self.inputs[: self.example_count]))
        steps = f"{self.specification.words()}. " if self.described else ""
        return f"{self.specification.takes}: {steps}{examples}", {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run a program against all tests."""
        text = self._take_text(action)
        fenced = _FENCED.fullmatch(text)
        program = fenced.group(1) if fenced else text
        self.used += 1
        valid, self._failed = self._judge(program)
        passes = not self._failed
        self._over = passes or self.used >= self.attempts
        parts = {"tests": float(passes), "attempts": -self.attempt_cost * (not passes)}
        info = {
            "success": passes,
            "action_is_valid": valid,
            "action_is_effective": True,
            "reward_parts": parts,
        }
        return self._failed or "all tests pass", sum(parts.values()), self._over, False, info

    def render(self) -> str:
        """Return a description of the present state (`render_mode="ansi"`)."""
        return self.describe()

    def describe(self) -> str:
        """Describe the function: what its argument is, and how many steps are left to find."""
        count = len(self.specification.steps)
        return f"{self.specification.takes} {count} step{'s' if count > 1 else ''}"

    def state_key(self) -> str:
        """Return the function and the number of programs. Other tests of it do not make another state."""
        return f"{self.specification.takes} {self.specification.steps} {self.described} {self.used}"

    def difficulty(self) -> int:
        """Return the number of steps."""
        return len(self.specification.steps)

    def optimal_action(self, rng: np.random.Generator) -> str:
        """Return the reference program."""
        return self.specification.program()

    def random_action(self, rng: np.random.Generator) -> str:
        """Return the reference program of another function of the grammar."""
        steps = int(rng.integers(1, self.max_steps + 1))
        return draw_specification(rng, steps=steps, kinds=self.kinds).program()

    def _judge(self, program: str) -> tuple[bool, str]:
        """Return whether a text is a program that defines `f`, and the failures in words."""
        shown = self.example_count
        examples, tests = self.inputs[:shown], self.inputs[shown:]
        run = SANDBOX.run(program, name="f", inputs=examples, hidden=tests)
        if run.error:
            return run.starts, f"error: {_printable(run.error)}"
        assert run.hidden is not None
        if run.hidden.error in ENDINGS:
            return True, f"error: {run.hidden.error}"
        for value, call in zip(examples, run.calls, strict=True):
            if not self._passes(value, call):
                given = _shown(call["value"]) if "value" in call else str(call.get("error"))
                return True, f"{self.example(value)}, not {_printable(given)}"
        passes = not run.hidden.error and all(map(self._passes, tests, run.hidden.calls))
        return True, "" if passes else "a hidden test fails"

    def _passes(self, value: Value, call: Mapping[str, Any]) -> bool:
        return "value" in call and _same(call["value"], self.specification.apply(value))

    def example(self, value: Value) -> str:
        """Return the text of an example: an input and the value expected of it."""
        return f"f({json.dumps(value)}) = {json.dumps(self.specification.apply(value))}"


def _same(value: object, expected: Value) -> bool:
    """Tell whether a result is the expected one, of the same type: True is not 1."""
    if type(value) is not type(expected):
        return False
    if isinstance(expected, list) and isinstance(value, list):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(type(v) is int and v == e for v, e in pairs)
    return bool(value == expected)


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except (RecursionError, ValueError):
        return "something else"


def _printable(text: str) -> str:
    """Return the beginning of a text in one line of ASCII characters."""
    return text[:_SHOWN].encode("unicode_escape").decode("ascii")
