"""An environment that other machines play over the network."""

from __future__ import annotations

import os
import socket

from aiohttp import web
from omegaconf import DictConfig

from ragen_pl.base.access import is_loopback
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import plain
from ragen_pl.config.settings import read_settings
from ragen_pl.environments.calls import check_made
from ragen_pl.environments.classes import environment_maker
from ragen_pl.environments.serving import KEY, EnvironmentServer, ServerSettings

# seconds for steps that are under way at the end
_SHUTDOWN_S = 5.0


def serve(cfg: DictConfig) -> None:
    """Start the server, print its address, and answer until SIGTERM or Ctrl-C.

    Args:
        cfg: Config of `ragen_pl.serve_environment`.

    Raises:
        ConfigError: Nobody may play without a key at this address, or it cannot be opened.
    """
    settings, env = read_settings(ServerSettings, cfg.server), cfg.env
    key = os.environ.get(KEY) or None
    if key is None and not is_loopback(settings.host):
        raise ConfigError(
            f"server.host={settings.host}: everybody who reaches this machine could play; set {KEY} here and where the "
            "environment is used, or server.host=127.0.0.1"
        )
    check_made(env)
    named = plain(env.get("kwargs"))
    make = environment_maker(
        env.target, process=bool(env.get("process")), memory_mb=env.get("memory_mb")
    )
    server = EnvironmentServer(
        lambda: make(**named),
        name=str(env.name),
        target=str(env.target),
        timeout_s=env.get("timeout_s"),
        settings=settings,
        key=key,
    )
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        opened = socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        raise ConfigError(
            f"server.port={settings.port}: cannot be opened at {settings.host} ({error.strerror}); set another one"
        ) from error
    server.prepare()

    address = f"http://{settings.host}:{opened.getsockname()[1]}"
    print(
        f"{env.name} at {address} for {settings.sessions} sessions; SIGTERM or Ctrl-C ends it",
        flush=True,
    )
    web.run_app(
        server.app(), sock=opened, print=None, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
