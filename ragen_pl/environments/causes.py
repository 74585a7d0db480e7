"""Causes of the errors of environments: infrastructure (worth a retry) or data (would fail again)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import Protocol, runtime_checkable

from ragen_pl.trajectory import FailureCause

_BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_CONNECTIONS = (ConnectionError, TimeoutError, socket.gaierror)


class InfrastructureError(ConnectionError):
    """Cause of an error that another process blames on infrastructure, or of the end of that process."""


@runtime_checkable
class _HasStatus(Protocol):
    """Error of aiohttp or urllib, with the status of an answer by HTTP."""

    status: int


@runtime_checkable
class _HasStatusCode(Protocol):
    """Error or answer with the status of HTTP under the name that httpx and requests give it."""

    status_code: int


@runtime_checkable
class _HasResponse(Protocol):
    """Error of httpx or requests, with the answer by HTTP."""

    response: object


def cause_of(error: BaseException) -> FailureCause:
    """Return the cause of an error of an environment, by it and the errors that led to it.

    >>> str(cause_of(ConnectionResetError())), str(cause_of(KeyError("door")))
    ('infrastructure', 'data')
    """
    try:
        is_infrastructure = any(
            isinstance(one, _CONNECTIONS) or _is_busy(one) for one in _chain(error)
        )
    except Exception:  # of an attribute of a user's error
        return FailureCause.DATA
    return FailureCause.INFRASTRUCTURE if is_infrastructure else FailureCause.DATA


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it, as a traceback shows them."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _is_busy(error: BaseException) -> bool:
    """Return whether a service has answered that it is busy or broken."""
    holders = [error, *([error.response] if isinstance(error, _HasResponse) else [])]
    statuses = [one.status for one in holders if isinstance(one, _HasStatus)]
    statuses += [one.status_code for one in holders if isinstance(one, _HasStatusCode)]
    return any(isinstance(one, int) and (one in _BUSY or one // 100 == 5) for one in statuses)
