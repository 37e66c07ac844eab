"""Errors as ``application/problem+json`` (RFC 9457): type, title, status, a detail that helps to fix the request, and
the invalid field if there is one. No detail contains an argument, a password or a token.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from ..errors import (
    Busy,
    Conflict,
    FairlaneError,
    IndexTaken,
    InvalidInput,
    NotFound,
    NotSupported,
    QueueFull,
    Stale,
    StoreError,
    StoreFull,
    StoreUnavailable,
    WouldDeadlock,
)
from ..model.decoder_messages import hide_values
from .answers import Answer, Headers

PROBLEM_JSON = b"application/problem+json"
RETRY_STORE = 1
"""Seconds after which a client should repeat the request while the store is unreachable."""

TITLES = {
    400: ("malformed", "The request is malformed"),
    401: ("unauthorized", "A token is required"),
    403: ("forbidden", "Not allowed"),
    404: ("not-found", "Not found"),
    405: ("method-not-allowed", "This path does not support this method"),
    406: ("not-acceptable", "This representation is not available"),
    408: ("too-slow", "The request arrived too slowly"),
    409: ("conflict", "The request conflicts with stored data"),
    413: ("too-large", "The body is too large"),
    414: ("too-long", "The path or query is too long"),
    415: ("content-type", "The content type is not supported"),
    421: ("host", "This host name is not allowed"),
    422: ("invalid-input", "A value is invalid"),
    429: ("too-many", "Too many jobs or streams"),
    431: ("headers-too-large", "The headers are too large"),
    500: ("error", "Internal error"),
    501: ("not-supported", "Not supported"),
    503: ("unavailable", "The store is unavailable"),
    507: ("store-full", "The store is full"),
}


class Problem(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        field: str | None = None,
        retry_after: float | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.field = field
        self.retry_after = retry_after
        self.headers = headers

    def document(self) -> dict[str, Any]:
        """The body of the response."""
        kind, title = TITLES.get(self.status, ("error", "The request failed"))
        found: dict[str, Any] = {
            "type": f"urn:fairlane:problem:{kind}",
            "title": title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.field is not None:
            found["field"] = self.field
        if self.retry_after is not None:
            found["retry_after"] = self.retry_after
        return found

    def answer(self) -> Answer:
        """The response with its headers."""
        headers = [*self.headers]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="fairlane"'))
        return Answer(msgspec.json.encode(self.document()), self.status, headers, content_type=PROBLEM_JSON)


_PATH = re.compile(r" - at `(?:key in )?\$([^`]*)`")
_FIELD = re.compile(r"field `([^`]*)`")


def problem_of(exc: Exception) -> Problem | None:
    """Map an error to a problem; None for an unexpected error."""
    match exc:
        case Problem():
            return exc
        case InvalidInput():
            return Problem(422, exc.problem, field=exc.field)
        case msgspec.ValidationError():
            return invalid_value(exc)
        case msgspec.DecodeError() | UnicodeDecodeError():
            return Problem(400, f"the body is not JSON: {exc}" if isinstance(exc, msgspec.DecodeError) else NOT_UTF8)
        case RecursionError():
            return Problem(400, "the body is nested too deeply")
        case NotFound():
            return Problem(404, str(exc))
        case QueueFull():
            return Problem(429, str(exc), retry_after=1.0 if exc.retry_after is None else exc.retry_after)
        case Conflict() | IndexTaken() | Stale() | WouldDeadlock():
            return Problem(409, str(exc))
        case Busy():
            return Problem(503, str(exc), retry_after=RETRY_STORE)
        case NotSupported():
            return Problem(501, str(exc))
        case StoreFull():
            return Problem(507, "the store is full; nothing was stored")
        case StoreUnavailable():
            return Problem(503, "the store is unavailable; repeat the request", retry_after=RETRY_STORE)
        case TimeoutError():
            return Problem(503, "the store did not respond in time; repeat the request", retry_after=RETRY_STORE)
        case StoreError():
            return Problem(503, f"the store cannot be used ({type(exc).__name__})", retry_after=RETRY_STORE)
        case FairlaneError():
            return Problem(409, str(exc))
    return None


NOT_UTF8 = "the body is not UTF-8"


def invalid_value(exc: msgspec.ValidationError, type_: Any = None) -> Problem:
    """The problem of a value with a wrong type, or of a missing or unknown field. It names the field, and with the type
    that was decoded the allowed values of an enum.
    """
    text = hide_values(str(exc), type_)
    path, name = _PATH.search(text), _FIELD.search(text)
    parts = [path[1].lstrip(".") if path else "", name[1] if name else ""]
    return Problem(422, _PATH.sub("", text), field=".".join(filter(None, parts)) or None)
