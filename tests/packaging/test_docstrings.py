"""Entries of docstrings begin with a capital letter, a number, a code name or the name of a library."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = {"Args:", "Attributes:", "Raises:"}
ENTRY = re.compile(r"\*{0,2}[\w.`\[\]]+(?: ?\([^)]*\))?(?:, \*{0,2}\w+)*:\s+(\S+)")
LIBRARIES = {"torch", "transformers", "timm", "peft", "numpy", "gymnasium", "pytest"}


def entries(docstring: str) -> Iterator[str]:
    """Yield the first word of each entry of the sections that list names."""
    section, first = None, None
    for line in docstring.splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if text in SECTIONS:
            section, first = indent, None
        elif section is not None and text:
            if indent <= section:
                section = None
                continue
            first = indent if first is None else first
            if indent == first and (found := ENTRY.match(text)):
                yield found[1]


def is_sentence(word: str) -> bool:
    """Whether a word may begin an entry."""
    is_code = re.search(r"[_@=\d]|\w\(|\.\w|[A-Z]", word)
    return (
        not (word[0].isascii() and word[0].islower())
        or bool(is_code)
        or word.rstrip(",.;:") in LIBRARIES
    )


@pytest.mark.parametrize("folder", ["ragen_pl", "envs", "visual_envs", "benchmarks", "examples"])
def test_entries_begin_with_a_capital_letter(folder: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {word}"
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for word in entries(ast.get_docstring(node) or "")
        if not is_sentence(word)
    ]
    assert wrong == []


def test_a_small_letter_is_found() -> None:
    docstring = "Add.\n\nArgs:\n    first: the one\n    second: The other.\n      and more: of it\n"
    assert [word for word in entries(docstring) if not is_sentence(word)] == ["the"]
