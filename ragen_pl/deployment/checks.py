"""Checks of `ragen_pl.serve` before heavy packages are imported: weights, address and keys."""

from __future__ import annotations

import os
import socket

from omegaconf import DictConfig

from ragen_pl.agent_programs.serving.address import listening_socket
from ragen_pl.base.access import is_loopback
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.settings import read_settings
from ragen_pl.deployment.settings import ServeSettings
from ragen_pl.evaluation.checks import check_source

_MIN_KEY = 16


def check_serve(cfg: DictConfig) -> None:
    """Check weights, address and keys.

    Raises:
        ConfigError: With the first thing that is wrong.
    """
    check_source(cfg)
    settings = read_settings(ServeSettings, cfg)
    client_keys(settings)
    open_socket(settings).close()


def open_socket(settings: ServeSettings) -> socket.socket:
    """Return a socket that is bound to the address.

    Raises:
        ConfigError: It is taken, or not one of this machine.
    """
    try:
        return listening_socket(settings.host, settings.port)
    except OSError as error:
        raise ConfigError(
            f"host={settings.host} port={settings.port}: {error.strerror}; set another one, port=0 for any free one"
        ) from error


def client_keys(settings: ServeSettings) -> list[str]:
    """Return the keys that clients may send; empty where any may be sent, and none.

    Raises:
        ConfigError: There is none although other machines reach the address, or one is missing or too short.
    """
    if not settings.keys and not is_loopback(settings.host):
        raise ConfigError(
            f"host={settings.host}: other machines reach it, so clients need a key; set an environment variable to "
            "one, and keys=[NAME]"
        )
    keys = []
    for name in settings.keys:
        key = os.environ.get(name, "").strip()
        if len(key) < _MIN_KEY:
            found = f"a key of {len(key)} characters" if key else "no such environment variable"
            raise ConfigError(
                f"keys=[{name}]: {found}; set it to {_MIN_KEY} characters or more, such as those of: openssl rand -hex "
                "32"
            )
        keys.append(key)
    return keys
