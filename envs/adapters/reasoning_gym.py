"""Questions of the library reasoning-gym as an environment: one question an episode, answered in free text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from ..adapters.expressions import evaluate
from ..adapters.optional import optional_import
from ..base import Count, Environment, Observation, Probability, checked_arguments

_DATA_SEED = 0
# Their scorers run the answer as a program. Only an answer equal to the known one is right.
RUN_BY_SCORER = frozenset(
    {
        "binary_matrix",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
# A scorer that tries all values of the names in an answer, known or not.
_TRIES_VALUES, _MAX_NAMES = "propositional_logic", 8
# Their scorers make a move as often as its number says, or compute a power of ten: with larger numbers for hours.
_ENDLESS = {
    "rubiks_cube": re.compile(r"\d{3}"),
    "rush_hour": re.compile(r"\d{3}"),
    "coin_flip": re.compile(r"e[-+]?\d{4}", re.IGNORECASE),
}
# A scorer that takes one of these as right does not read the answer.
_NONSENSE = ("", "?", "no answer")
# keys of the metadata that hold an answer where the item itself has none
_EXAMPLES = ("example_correct_answer", "possible_answer", "example_answer")
_DRAWS = 20


class ReasoningGym(Environment):
    """Answer a question of a reasoning-gym data set.

    ## Description
    An episode is one item of a data set. A right answer ends it; after a wrong one it goes on while tries are left.
    Only a right answer is rewarded, not one that the library's scorer finds partly right. Countdown and the game
    of 24 are checked exactly: right numbers, right value.

    ## Action Space
    `Text(max_answer_length)`: the answer.

    ## Observation Space
    `Text`: the question, then `wrong, 2 tries left`, or `right`.

    ## Starting State
    The item is uniform over the first `items` of the data set.

    ## Rewards
    `retry_discount ** n` for a right answer after n wrong ones, 0 otherwise.

    ## Trivial Policies
    In `env=countdown`, an expression of the same form for all questions has success at most 0.25, and the product of
    two numbers plus or minus the third, if that reaches the target, has success at most 0.55. In `env=arithmetic` the
    same number for all questions, or a number of the question, has success at most 0.25, and the sum of all numbers,
    whatever the signs say, has success at most 0.55: of two numbers half are added. In `env=word_problem` a number of
    the question has success at most 0.10. In `env=mini_sudoku` rows filled without a look at columns and blocks have
    success at most 0.15: six to eight cells are empty. The least number that neither row nor column has, cell after
    cell, is right in 0.62 of the puzzles, and in 0.73 with a look at the blocks too.

    ## Episode End
    Terminated by a right answer or after `tries` answers.

    ## Information
    `success`: the answer was right. `action_is_valid`: it has the required form. An invalid answer is a wrong one.

    ## Arguments
    - `dataset`: name of the data set, such as `countdown`. `settings`: its own settings. `items`: number of its items;
      a data set that makes them all in advance is slow with many.
    - `tries`: answers to a question.
    - `question`: text with fields of the item's metadata, such as `{target}`; null for the library's own text.
    - `form`: regular expression of a valid answer; null where any text is.
    - `rules`: instructions in full sentences; null for general ones.
    - `working`: whether `describe()`, and with it the think block of demonstrations, shows the working; known for
      `chain_sum`, its running totals, and for `gsm_symbolic`, the equations of the library's solution.
    - `difficulty_key`: number or list in the metadata that says how hard an item is; null for difficulty 1.
    """

    needs_trust = ("settings", "question", "form")

    @checked_arguments
    def __init__(
        self,
        *,
        dataset: str,
        settings: Mapping[str, Any] | None = None,
        items: Count = 10_000,
        tries: Count = 1,
        retry_discount: Probability = 0.5,
        question: str | None = None,
        form: str | None = None,
        rules: str | None = None,
        working: bool = False,
        difficulty_key: str | None = None,
        max_answer_length: Count = 1000,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.dataset, self.items, self.tries = dataset, items, tries
        if working and dataset not in _WORKINGS:
            raise ValueError(f"working: dataset={dataset} has none, only {', '.join(_WORKINGS)}")
        self.retry_discount, self.question, self.working = retry_discount, question, working
        self.difficulty_key = difficulty_key
        self._form = re.compile(form) if form is not None else None
        self._data = _dataset(dataset, json.dumps(dict(settings or {}), sort_keys=True), items)
        self.action_space = spaces.Text(max_answer_length)
        self.observation_space = spaces.Text(100_000)
        general = "Answer the question. Give the answer alone, without any other text, in the form that is asked for."
        again = f" You have {tries} tries; each wrong answer is called wrong." if tries > 1 else ""
        self.instructions = (rules or general) + again
        self.reward_range = (0.0, 1.0)
        self.item: Mapping[str, Any] = {}
        self._used, self._lenient = 0, False
        self._observation = ""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a question."""
        self._begin(seed=seed, options=options)
        self.item = _item(self._data, int(self.np_random.integers(self.items)))
        self._used = 0
        self._lenient = any(self._score(text) == 1 for text in _NONSENSE)
        self._observation = self._question()
        return self._observation, {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Judge an answer."""
        text = self._take_text(action).strip()
        valid = self._form is None or self._form.fullmatch(text) is not None
        right = valid and self._is_right(text)
        reward = float(right) * self.retry_discount**self._used
        self._used += 1
        left = self.tries - self._used
        self._over = right or not left
        tries = f", {left} {'try' if left == 1 else 'tries'} left" if left else ""
        self._observation = "right" if right else f"wrong{tries}"
        info = {"success": right, "action_is_valid": valid, "action_is_effective": True}
        return self._observation, reward, self._over, False, info

    def state_key(self) -> str:
        """Return the question and the number of answers; the order of numbers to calculate with makes no difference."""
        if self.dataset in _JUDGES:
            metadata = self.item["metadata"]
            return f"{self._used} {metadata.get('target')} of {sorted(metadata['numbers'])}"
        # as it is shown: the library words a question in several ways
        return f"{self._used} {self._question()}"

    def describe(self) -> str:
        """Return the number of this try, `try 1 of 3`, or the working."""
        if self.working:
            return _WORKINGS[self.dataset](self.item["metadata"])
        return f"try {min(self._used + 1, self.tries)} of {self.tries}"

    def difficulty(self) -> int:
        """Return the number named by `difficulty_key`, or the length of the list."""
        if self.difficulty_key is None:
            return 1
        value = self.item["metadata"][self.difficulty_key]
        return len(value) if isinstance(value, list | tuple) else int(value)

    def optimal_action(self, rng: np.random.Generator) -> str:
        """Return the known answer.

        Raises:
            NotImplementedError: The library gives none, as in `rush_hour`.
        """
        answer = _known_answer(self.item)
        if answer is None:
            raise NotImplementedError(f"dataset={self.dataset}: the library gives no answers")
        return answer

    def random_action(self, rng: np.random.Generator) -> str:
        """Return a random expression of the numbers, or the answer to another question."""
        if self.dataset in _JUDGES:
            return _random_expression(self.item["metadata"]["numbers"], rng)
        for _ in range(_DRAWS):
            answer = _known_answer(_item(self._data, int(rng.integers(self.items))))
            if answer is not None:
                return answer
        return "0"

    def render(self) -> str:
        """Return the current observation (`render_mode="ansi"`)."""
        return self._observation

    def _question(self) -> str:
        if self.question is None:
            return str(self.item["question"]).strip()
        fields = {name: _plain(value) for name, value in self.item["metadata"].items()}
        return self.question.format(**fields)

    def _is_right(self, text: str) -> bool:
        if self.dataset in _JUDGES:
            return _JUDGES[self.dataset](text, self.item["metadata"])
        if self.dataset in RUN_BY_SCORER or self._lenient:
            return text == str(self.item["answer"]).strip()
        return self._score(text) == 1

    def _score(self, text: str) -> float:
        """Return the library's score; its scorers raise on texts that they cannot read."""
        if self.dataset in RUN_BY_SCORER or self.dataset in _JUDGES:
            return 0.0
        if self.dataset == _TRIES_VALUES and len(set(re.findall(r"\w+", text))) > _MAX_NAMES:
            return 0.0
        endless = _ENDLESS.get(self.dataset)
        # signs between digits are left out by the scorers, or by Python
        if endless is not None and endless.search(re.sub("[_,]", "", text)):
            return 0.0
        try:
            return float(self._data.score_answer(text, self.item))
        except Exception:
            return 0.0


@functools.cache
def _dataset(name: str, settings: str, items: int) -> Any:
    """Return a data set, which all environments of the process share: it does not change.

    Raises:
        ValueError: There is no such data set, or it does not take the settings.
    """
    library = optional_import("reasoning_gym", extra="reasoning")
    names = sorted(set(library.factory.DATASETS) - {"composite"})
    if name not in names:
        raise ValueError(f"dataset: found {name!r}, expected one of {', '.join(names)}")
    try:
        return library.create_dataset(name, size=items, seed=_DATA_SEED, **json.loads(settings))
    except (TypeError, AssertionError) as error:
        raise ValueError(f"settings of {name}: {error}") from error


@functools.lru_cache(maxsize=10_000)
def _item(data: Any, number: int) -> Mapping[str, Any]:
    """Return an item of a data set. It is read only; some, such as those of countdown, take a millisecond to make."""
    item: Mapping[str, Any] = data[number]
    return item


def _known_answer(item: Mapping[str, Any]) -> str | None:
    if item["answer"] is not None:
        return str(item["answer"]).strip()
    examples = [item["metadata"][key] for key in _EXAMPLES if key in item["metadata"]]
    if not examples:
        return None
    return examples[0] if isinstance(examples[0], str) else json.dumps(examples[0])


def _solves_countdown(text: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether an expression of all the numbers, each once, has the target as its value."""
    return _has_value(text, numbers=metadata["numbers"], value=metadata["target"])


def _solves_24(text: str, metadata: Mapping[str, Any]) -> bool:
    return _has_value(text, numbers=metadata["numbers"], value=24)


def _has_value(text: str, *, numbers: list[int], value: int) -> bool:
    try:
        found, used = evaluate(text)
    except ValueError:
        return False
    return found == value and used == sorted(numbers)


_JUDGES: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "countdown": _solves_countdown,
    "puzzle24": _solves_24,
}


def _running_totals(metadata: Mapping[str, Any]) -> str:
    """Return the totals of a sum from left to right: `5 + 8 = 13, 13 - 2 = 11`."""
    first, *rest = metadata["expression"].split()
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total} {sign} {term} = {result}")
        total = result
    return ", ".join(steps)


_NUMBER = r"[£$€]?\s?[0-9][0-9,]*(?:[.][0-9]+)?%?"
_UNIT = r"(?:\s+(?!x\b)[^\W\d]+(?:[/-][^\W\d]+)*|(?:/[^\W\d]+)+)*"
_OPERATION = rf"\s*[-+*/x\u00d7\u00f7]\s*[(]?{_NUMBER}{_UNIT}[)]?"
_EQUATION = re.compile(rf"[(]?{_NUMBER}{_UNIT}[)]?(?:{_OPERATION})+\s*=\s*{_NUMBER}")
# how equations in sentences become plain ones, one after the other
_PLAIN_EQUATION = (
    (r"[£$€,]", ""),
    (r"\bx\b|\u00d7", "*"),
    (r"\u00f7", "/"),
    (r"/?[^\W\d_]+(?:[/-][^\W\d_]+)*", ""),
    (r"\s*([-+*/=])\s*", r" \1 "),
    (r"\s+", " "),
)


def _equations(metadata: Mapping[str, Any]) -> str:
    """Return the equations in the sentences of a solution, without units: `6 * 2 = 12, 195 * 12 = 2340`."""
    equations = []
    for found in _EQUATION.findall(metadata["answer_cot"]):
        equation = found
        for pattern, plain in _PLAIN_EQUATION:
            equation = re.sub(pattern, plain, equation)
        equations.append(equation.strip())
    return ", ".join(equations) or "no equation"


_WORKINGS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "chain_sum": _running_totals,
    "gsm_symbolic": _equations,
}


def _random_expression(numbers: list[int], rng: np.random.Generator) -> str:
    shuffled = [int(number) for number in rng.permutation(numbers)]
    signs = [str(sign) for sign in rng.choice(list("+-*/"), size=len(numbers) - 1)]
    return str(shuffled[0]) + "".join(
        f" {sign} {number}" for sign, number in zip(signs, shuffled[1:], strict=True)
    )


def _plain(value: Any) -> Any:
    """Return a list as text, a list of lists line by line."""
    if not isinstance(value, list | tuple):
        return value
    nested = any(isinstance(element, list | tuple) for element in value)
    return ("\n" if nested else " ").join(str(_plain(element)) for element in value)
