"""Who may ask a server of this package: one rule of host, origin and key for all that listen.

    right key ──► anybody
    without keys ──► programs that name this machine (Host), and pages of this machine (Origin, Sec-Fetch-Site)

A name that somebody has pointed at the loopback address (DNS rebinding) is another host.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import urllib.parse
from collections.abc import Sequence
from typing import Protocol

_BEARER = re.compile(r"bearer\s+", re.IGNORECASE)


class Headers(Protocol):
    """Headers of a request, such as aiohttp's."""

    def getall(self, key: str, default: Sequence[str], /) -> Sequence[str]:
        """Return all values of a header."""
        ...


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_loopback(place: str) -> bool:
    """Return whether a host with a port, or the address of an origin, names this machine."""
    try:
        parts = urllib.parse.urlsplit(place if "//" in place else f"//{place}")
    except ValueError:
        return False
    host = parts.hostname
    return host is not None and is_loopback(host) and "@" not in parts.netloc


def bearer_key(headers: Headers) -> str:
    """Return the key that a request sends as a bearer token, empty without one."""
    header = next(iter(headers.getall("Authorization", ())), "")
    return _BEARER.sub("", header.strip(), count=1)


def key_digest(key: str) -> str:
    """Return the digest of a key, so that no comparison tells how much of it is right; of any bytes of a header."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def refusal(headers: Headers, *, same_origin: bool = False, is_link: bool = False) -> str | None:
    """Return why a request without a key is not answered, None if it is.

    Args:
        headers: Its headers.
        same_origin: Whether pages of this machine have to be the server's own.
        is_link: Whether it may be a link that a person has followed from another page.
    """
    hosts = headers.getall("Host", ())
    origins = headers.getall("Origin", ())
    if len(hosts) != 1 or not names_loopback(hosts[0]):
        found = ", ".join(hosts)[:100]
        return f"without keys only 127.0.0.1 and localhost are served; found the host {found!r}"
    own = f"http://{hosts[0]}"
    others = [one for one in origins if one != own and (same_origin or not names_loopback(one))]
    known = ("none", "same-origin") if same_origin else ("none", "same-origin", "same-site")
    sites = [one for one in headers.getall("Sec-Fetch-Site", ()) if one not in known]
    if others or (sites and not is_link):
        return f"asked for by another origin; found {', '.join([*others, *sites])[:100]!r}"
    return None
