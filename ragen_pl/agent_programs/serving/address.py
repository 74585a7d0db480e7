"""Addresses that the endpoint listens on."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        OSError: The address is taken, or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError:
        listening.close()
        raise
    return listening
