"""Causes of the errors of environments: infrastructure (worth a retry) or data (would fail again)."""

from __future__ import annotations

import socket
from http import HTTPStatus
from typing import Protocol, runtime_checkable

from ragen_pl.base.error_text import error_chain
from ragen_pl.base.instances import instances
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
        chain = error_chain(error, shown=True)
        is_infrastructure = any(isinstance(one, _CONNECTIONS) or _is_busy(one) for one in chain)
    except Exception:  # of an attribute of a user's error
        return FailureCause.DATA
    return FailureCause.INFRASTRUCTURE if is_infrastructure else FailureCause.DATA


def _is_busy(error: BaseException) -> bool:
    """Return whether a service has answered that it is busy or broken."""
    holders = [error, *([error.response] if isinstance(error, _HasResponse) else [])]
    statuses = [one.status for one in instances(holders, _HasStatus)]
    statuses += [one.status_code for one in instances(holders, _HasStatusCode)]
    return any(one in _BUSY or one // 100 == 5 for one in instances(statuses, int))
