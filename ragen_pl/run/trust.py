"""Which files of settings are taken at their word. The command line is; a run's or a model's own file need not be.

Settings name classes and functions, which are then called with the rest of the settings: somebody else's file could
name any code. It is read under this rule:

    written by this account ──► as it is
    another ──► names of code, and addresses, count only where a shipped configuration or the command line has them
    trust=true on the command line ──► as it is

A file that this account wrote ends with a signature, by a key that only the account can read (`key_file`).
"""

from __future__ import annotations

import functools
import hmac
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ragen_pl.config.errors import ConfigError
from ragen_pl.config.paths import config_dir
from ragen_pl.former_names import current

_SIGNATURE = "# signature of ragen_pl: "
# settings whose texts are for a model
_TEXTS = "context."
# groups whose options name what a checkpoint is used with; other engines take arguments that name code
_SHIPPED = (
    *("env/*", "model/*", "validation/baselines/*", "warm_start/demonstrator/*"),
    "rollout/engine/transformers",
)
# keys whose value is always a name; the last one is LoRA's
_NAMED = ("_target_", "env.target", "megatron_core")
# keys that have code of a model's repository run
_RUNS_CODE = "trust_remote_code"
# package.module.Class, module:id, scheme://place
_NAME = re.compile(r"\s*([^\W\d]\w*(\.[^\W\d]\w*)+\s*|[\w.+-]+:.+)", re.DOTALL)


def key_file() -> Path:
    """Return the file of this account's key."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "ragen_pl" / "key"


def write_settings(file: Path, text: str) -> None:
    """Write settings with this account's signature; without one where the account can keep no key."""
    key = _key(make=True)
    line = f"{_SIGNATURE}{_signature(key, text)}\n" if key else ""
    file.write_text(text + line, encoding="utf-8")


def is_own(file: Path) -> bool:
    """Return whether this account wrote a file of settings, and nobody has changed it since."""
    try:
        text, found, signature = file.read_bytes().rpartition(_SIGNATURE.encode())
    except OSError:
        return False
    key = _key(make=False) if found else b""
    expected = _signature(key, text).encode() if key else b""
    return bool(key) and hmac.compare_digest(expected, signature.strip())


def _signature(key: bytes, text: str | bytes) -> str:
    return hmac.digest(key, text if isinstance(text, bytes) else text.encode(), "sha256").hex()


def _key(*, make: bool) -> bytes:
    """Return this account's key, empty where there is none and none can be made."""
    file = key_file()
    with suppress(OSError, RuntimeError):
        if make and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
            descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(32))
            # another process may have been first
            with suppress(FileExistsError):
                os.link(new, file)
            new.unlink()
        return file.read_bytes()
    return b""


def check_settings(
    settings: Mapping[str, Any],
    *,
    file: Path,
    named: Collection[str] | None,
    keys: Collection[str] = (),
    shipped: tuple[str, ...] = _SHIPPED,
) -> None:
    """Check settings of a file that somebody else may have written.

    Args:
        settings: those that are taken from it.
        file: the file, for error messages.
        named: values on the command line; None for a command that does not take such settings.
        keys: keys on the command line.
        shipped: patterns of the shipped configurations whose names count.

    Raises:
        ConfigError: they name code or an address that neither a shipped configuration nor the command line has, run
            code of a model's repository, or refer to other values.
    """
    for key, setting in _leaves(settings):
        value = setting if isinstance(setting, str) else ""
        if key.endswith(_RUNS_CODE) and setting and key not in keys:
            repeat = "" if named is None else f"repeat {key}=true on the command line, or "
            raise ConfigError(
                f"{file}: {key}=true runs Python files of a model's repository, and nothing shows that this account "
                f"wrote the file; if you trust its author, {repeat}set trust=true"
            )
        if "${" in value:
            raise ConfigError(
                f"{file}: {key}={value}: refers to another value, which settings of a file that this account did not "
                "write must not; set trust=true if you trust its author"
            )
        is_name = key.endswith(_NAMED) or (_NAME.fullmatch(value) and not key.startswith(_TEXTS))
        is_shipped = current(value) in _shipped_names(shipped)
        if is_name and value not in (named or ()) and not is_shipped:
            repeat = "" if named is None else f"repeat {key}={value} on the command line, or "
            raise ConfigError(
                f"{file}: {key}={value} names code or an address, and nothing shows that this account wrote the file; "
                f"if you trust its author, {repeat}set trust=true"
            )


def _leaves(value: Any, *, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full key and the value of all settings."""
    if isinstance(value, Mapping):
        for name, child in value.items():
            place = f"{key}.{name}".removeprefix(".")
            yield place, child
            yield from _leaves(child, key=place)
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield f"{key}.{number}", child
            yield from _leaves(child, key=f"{key}.{number}")


@functools.cache
def _shipped_names(places: tuple[str, ...]) -> frozenset[str]:
    """Return the names of code in shipped configurations."""
    files = [file for place in places for file in config_dir().glob(f"{place}.yaml")]
    names = (re.findall(r"^ *_?target_?: (\S+)", file.read_text("utf-8"), re.M) for file in files)
    return frozenset(name for found in names for name in found)
