"""Environment variables of programs and verifiers, and keys that are read from the trainer's."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# of the trainer's variables, those that a program gets
_KEPT = (
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "SSL_CERT_FILE",
    "TZ",
    "VIRTUAL_ENV",
)
# a shorter value is a part of other words
_SHORTEST_SECRET = 4


def program_variables() -> dict[str, str]:
    """Return the environment variables of every program and verifier.

    Its modules may stand in the trainer's working directory.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    paths = [os.getcwd(), os.environ.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return kept


class Secrets:
    """Variables of the trainer that a program gets too, whose values must stand in nothing that is kept.

    Args:
        names: Their names.

    Attributes:
        values: Their values by name.

    Raises:
        ValueError: One is not set.
    """

    def __init__(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in os.environ:
                raise ValueError(
                    f"env.kwargs.variables_env has {name}: no such environment variable; set it, or leave it out"
                )
        self.values = {name: os.environ[name] for name in names}

    def hidden_in(self, text: str) -> str:
        """Return a text, such as the JSON of a result, with the names in place of the values."""
        written = [
            (form, name)
            for name, value in self.values.items()
            if len(value) >= _SHORTEST_SECRET
            for form in {
                value,
                *(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False)),
            }
        ]
        # a value may be a part of another one
        for form, name in sorted(written, key=lambda each: -len(each[0])):
            text = text.replace(form, f"${name}")
        return text


def upstream(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the endpoint of another model, with its key from the environment.

    Raises:
        ValueError: It has no address, or the variable of its key is not set.
    """
    if "url" not in given:
        raise ValueError(f"env.kwargs.models.{name}: it has no url")
    target = {key: value for key, value in given.items() if key != "key_env"}
    if "key_env" in given:
        if given["key_env"] not in os.environ:
            raise ValueError(
                f"env.kwargs.models.{name}.key_env={given['key_env']}: no such environment variable"
            )
        target["key"] = os.environ[given["key_env"]]
    return target
