"""Texts of errors of any code, which may raise where it is asked for them."""

from __future__ import annotations

from collections.abc import Iterator


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


def error_chain(error: BaseException, *, shown: bool = False) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from, or during; if `shown`, those that a traceback shows."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if shown and one.__suppress_context__ else one.__context__)


def exit_code(error: SystemExit) -> int:
    """Return the code that Python ends with: 0 without one, 1 for a text.

    >>> exit_code(SystemExit()), exit_code(SystemExit("no door")), exit_code(SystemExit(3))
    (0, 1, 3)
    """
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def shortened(text: str, *, longest: int) -> str:
    r"""Return a text in one line, with its begin and its end where it is longer: last lines have the reason.

    >>> shortened("one\ntwo", longest=10), shortened("a" * 20 + "reason", longest=10)
    ('one two', 'aaa … areason')
    """
    text, end = " ".join(text.split()), longest * 7 // 10
    return text if len(text) <= longest else f"{text[: longest - end]} … {text[-end:]}"
