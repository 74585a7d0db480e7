"""Errors that a client of the endpoint gets."""

from __future__ import annotations

from typing import Any

_LONGEST = 2000


class RequestError(Exception):
    """Answer with an error status, as OpenAI's API gives it.

    A fault of the client is never a status of 500 or more: SDKs send such a request again.

    Args:
        status: HTTP status.
        message: one line with what was found and what to do; far too long values in it are cut.
        code: code of the error.
        retry: whether an SDK may send the request again.
    """

    def __init__(
        self, status: int, message: str, *, code: str = "invalid_request", retry: bool = False
    ) -> None:
        half = _LONGEST // 2
        short = message if len(message) <= _LONGEST else f"{message[:half]} … {message[-half:]}"
        super().__init__(short)
        self.status, self.code, self.retry = status, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """JSON of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": None, "code": self.code},
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer; OpenAI's SDKs read whether to try again."""
        return {"x-should-retry": "true" if self.retry else "false"}


def unsupported(name: str, value: object, remedy: str) -> RequestError:
    """Return the error of a parameter that cannot be honoured."""
    return RequestError(
        400, f"{name}={shown(value)} is not supported; {remedy}", code="unsupported_value"
    )


def shown(value: object) -> str:
    """Return a value of a request for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
