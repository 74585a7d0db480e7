"""`python -m ragen_pl.watch`: show runs in a browser while they train."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from omegaconf import DictConfig

from ragen_pl.config import hydra_main
from ragen_pl.config.errors import ConfigError


@hydra_main("watch")
def main(cfg: DictConfig) -> None:
    """Start the server, print its address, and answer until Ctrl-C."""
    from ragen_pl.viewing.watch import HOST, RunWatch, listen, serve

    shown = cfg.runs or cfg.run or cfg.paths.root
    named = [shown] if isinstance(shown, str) else shown
    places = [Path(place).expanduser().absolute() for place in named]
    try:
        server = listen(cfg.port)
    except OSError as error:
        raise ConfigError(
            f"port={cfg.port}: no port from it on can be opened ({error.strerror}); set port=0 for any free one"
        ) from error
    port = server.getsockname()[1]
    if cfg.port not in (0, port):
        print(f"port {cfg.port} is taken")
    address = f"http://{HOST}:{port}"
    print(f"{address} shows {', '.join(map(str, places))}; Ctrl-C ends it", flush=True)
    if cfg.open and sys.stdout.isatty() and _has_display():
        webbrowser.open(address)
    serve(RunWatch(places, episodes=cfg.episodes), server)


def _has_display() -> bool:
    """Return whether there are windows: in a terminal without them a text browser would open."""
    shown = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    return sys.platform in ("darwin", "win32") or bool(shown)


if __name__ == "__main__":
    main()
