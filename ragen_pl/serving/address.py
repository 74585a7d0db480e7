"""Addresses that the endpoint listens on."""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_loopback(place: str) -> bool:
    """Return whether a host with a port, or the address of an origin, names this machine."""
    try:
        host = urllib.parse.urlsplit(place if "//" in place else f"//{place}").hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        OSError: the address is taken, or not one of this machine.
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
