"""Files of settings that this account wrote: each ends with a signature, by a key that only the account can read.

The signature is of the file's text, in which the folder is named too: a copy counts for its settings, and not for what
it lies beside. What others wrote is read under the rule of `ragen_pl.config.trust`.
"""

from __future__ import annotations

import hmac
import io
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ragen_pl.base.foreign_files import settings_text
from ragen_pl.config.errors import ConfigError

_SIGNATURE, _FOLDER = "# signature of ragen_pl: ", "# folder: "
# of a file that may be signed
_MAX_BYTES = 1 << 26


def key_file() -> Path:
    """Return the file of this account's key."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "ragen_pl" / "key"


def write_settings(file: Path, text: str, *, folder: Path | None = None) -> None:
    """Write settings with this account's signature; without one where the account can keep no key.

    Args:
        file: The file.
        text: The settings.
        folder: Folder that the file is moved into; None for the one that it is written into.
    """
    place = f"{_FOLDER}{json.dumps(str((folder or file.parent).resolve()))}\n"
    signature = signed(text + place)
    lines = f"{place}{_SIGNATURE}{signature}\n" if signature else ""
    file.write_text(text + lines, encoding="utf-8")


def is_own(file: Path) -> bool:
    """Return whether this account wrote a file of settings, and nobody has changed it since.

    It may be a copy in somebody else's folder, see `is_own_folder`.
    """
    return bool(_own_text(file))


def is_own_folder(file: Path) -> bool:
    """Return whether this account wrote a file of settings into the folder that it is in."""
    _, found, folder = _own_text(file).rpartition(_FOLDER.encode())
    return bool(found) and folder.strip() == json.dumps(str(file.parent.resolve())).encode()


def _own_text(file: Path) -> bytes:
    """Return the text of a file of settings that this account wrote; empty for another one."""
    try:
        if not file.is_file() or file.stat().st_size > _MAX_BYTES:
            return b""
        text, found, signature = file.read_bytes().rpartition(_SIGNATURE.encode())
    except OSError:
        return b""
    return text if found and is_signed(text, signature.strip()) else b""


def signed(text: str) -> str:
    """Return this account's signature of a text; empty where the account can keep no key."""
    key = _key(make=True)
    return _signature(key, text) if key else ""


def is_signed(text: str | bytes, signature: bytes) -> bool:
    """Return whether a signature of a text is this account's."""
    key = _key(make=False)
    return bool(key) and hmac.compare_digest(_signature(key, text).encode(), signature)


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


def run_settings(file: Path) -> dict[str, Any]:
    """Return the settings in a file; one of somebody else is read within limits.

    Raises:
        ConfigError: It cannot be read, or holds none.
    """
    try:
        # OmegaConf copies what an alias stands for
        source = file if is_own(file) else io.StringIO(settings_text(file))
        settings = OmegaConf.to_container(OmegaConf.load(source))
    except Exception as error:
        # YAML errors have no common base class that omegaconf exports
        raise ConfigError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: expected settings, found {type(settings).__name__}")
    return {str(key): value for key, value in settings.items()}
