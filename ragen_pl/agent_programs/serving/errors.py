"""Errors that a client of the endpoint gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from ragen_pl.base.typed_json import TypeFault, shown, typed

T = TypeVar("T")
UNSUPPORTED = "unsupported_value"

_LONGEST = 2000


class RequestError(Exception):
    """Answer with an error status, as OpenAI's API gives it.

    A fault of the client is never a status of 500 or more: SDKs send such a request again.

    Args:
        status: HTTP status.
        message: One line with what was found and what to do; far too long values in it are cut.
        code: Code of the error.
        retry: Whether an SDK may send the request again.

    Attributes:
        is_noted: Whether its session has counted it among the refused requests.
    """

    def __init__(
        self, status: int, message: str, *, code: str = "invalid_request", retry: bool = False
    ) -> None:
        half = _LONGEST // 2
        short = message if len(message) <= _LONGEST else f"{message[:half]} … {message[-half:]}"
        super().__init__(short)
        self.status, self.code, self.retry = status, code, retry
        self.is_noted = False

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
    return RequestError(400, f"{name}={shown(value)} is not supported; {remedy}", code=UNSUPPORTED)


def only(*accepted: object, remedy: str) -> AfterValidator:
    """Return the metadata of a parameter that can be honoured for some values only; without any, for empty ones."""

    def check(value: object) -> object:
        # true and 1.0 equal 1
        is_accepted = any(type(value) is type(one) and value == one for one in accepted)
        if not is_accepted if accepted else value:
            raise PydanticCustomError(UNSUPPORTED, "{remedy}", {"remedy": remedy})
        return value

    return AfterValidator(check)


def read_as(kind: type[T], body: Mapping[str, Any]) -> tuple[dict[str, Any], T]:
    """Return the parameters of a request that are not null, as they are and with the types of their fields.

    Args:
        kind: A typed dictionary that has all parameters.
        body: JSON of the request.

    Raises:
        RequestError: One is not known or has another type; with the place, the value and what was expected.
    """
    given = {name: value for name, value in body.items() if value is not None}
    if unknown := given.keys() - kind.__annotations__.keys():
        raise unsupported(min(unknown), given[min(unknown)], "leave it out")
    try:
        return given, typed(kind, given)
    except TypeFault as fault:
        if fault.kind == UNSUPPORTED:
            raise unsupported(fault.place, fault.found, fault.expected) from None
        is_unsupported = fault.kind in ("literal_error", "union_tag_invalid")
        code = UNSUPPORTED if is_unsupported else "invalid_request"
        raise RequestError(400, str(fault), code=code) from None
