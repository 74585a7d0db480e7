"""Texts of errors of any code, which may raise where it is asked for them."""

from __future__ import annotations


def error_text(error: BaseException) -> str:
    """Return the text of an error as UTF-8 can hold it, also where `__str__` raises or returns something else.

    >>> error_text(ValueError("no door"))
    'no door'
    """
    try:
        text = str(error)
    except Exception as other:  # of `__str__`, which may be a user's
        text = f"(no text: its __str__ raised {type(other).__name__})"
    return text.encode(errors="replace").decode()


def named_error(error: BaseException) -> str:
    """Return the class and the text of an error.

    >>> named_error(KeyError("door"))
    "KeyError: 'door'"
    """
    return f"{type(error).__name__}: {error_text(error)}"


def shortened(text: str, *, longest: int) -> str:
    r"""Return a text in one line, with its begin and its end where it is longer: last lines have the reason.

    >>> shortened("one\ntwo", longest=10), shortened("a" * 20 + "reason", longest=10)
    ('one two', 'aaa … areason')
    """
    text, end = " ".join(text.split()), longest * 7 // 10
    return text if len(text) <= longest else f"{text[: longest - end]} … {text[-end:]}"
