"""Descriptions of arguments in docstrings: sections `Args:` and `Attributes:`, and lists below `## Arguments`."""

from __future__ import annotations

import re

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?: {4}.*)?\n)*)", re.M)
# a name at the section's indentation, and its text with deeper lines
_ARGUMENT = re.compile(r"^ {4}(\w+): *((?:.*)(?:\n {5,}.*)*)", re.M)
_LIST = re.compile(r"^## Arguments\n(.*?)(?=^##|\Z)", re.M | re.S)
_ITEM = re.compile(r"^- ((?:`\w+`(?:, )?)+): *((?:.*)(?:\n +.*)*)", re.M)


def described_names(docstring: str) -> dict[str, str]:
    r"""Return the description of each argument by its name.

    Args:
        docstring: the docstring without its indentation.

    >>> described_names("Keep.\n\nArgs:\n    low: least value,\n        kept.\n")
    {'low': 'least value, kept.'}
    """
    text = docstring + "\n"
    described = {
        name: " ".join(words.split())
        for section in _SECTION.findall(text)
        for name, words in _ARGUMENT.findall(section)
    }
    for section in _LIST.findall(text):
        for names, words in _ITEM.findall(section):
            described |= dict.fromkeys(re.findall(r"\w+", names), " ".join(words.split()))
    return described


def first_sentence(docstring: str) -> str:
    r"""Return the first sentence of a docstring.

    >>> first_sentence("Keep a part.\n\nMore.")
    'Keep a part.'
    """
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", paragraph)[0]
