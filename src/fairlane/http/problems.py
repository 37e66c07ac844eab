"""Every error as ``application/problem+json`` (RFC 9457): a type, a title, a status, a detail that says what to do, and
the field at fault where there is one. No detail repeats an argument, a password or a token.
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
from ..model.codec import hide_values
from .answers import Answer, Headers

PROBLEM_JSON = b"application/problem+json"
RETRY_STORE = 1
"""Seconds after which a client should try again when the store cannot be reached."""

TITLES = {
    400: ("malformed", "The request cannot be read"),
    401: ("unauthorized", "A token is required"),
    403: ("forbidden", "This is not allowed"),
    404: ("not-found", "There is no such thing"),
    405: ("method-not-allowed", "This path does not have this method"),
    406: ("not-acceptable", "No such representation"),
    408: ("too-slow", "The request took too long to arrive"),
    409: ("conflict", "The request conflicts with what is stored"),
    413: ("too-large", "The body is too large"),
    414: ("too-long", "The path is too long"),
    415: ("content-type", "The content type is not supported"),
    421: ("host", "This host name is not served here"),
    422: ("invalid-input", "A value was refused"),
    429: ("too-many", "There is no room at present"),
    431: ("headers-too-large", "The headers are too large"),
    500: ("error", "The service failed"),
    501: ("not-supported", "This is not supported here"),
    503: ("unavailable", "The store cannot be reached"),
    507: ("store-full", "The store has no room left"),
}


class Problem(Exception):
    """An error answer."""

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
        """The body of the answer."""
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
        """The answer with its headers."""
        headers = [*self.headers]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="fairlane"'))
        return Answer(msgspec.json.encode(self.document()), self.status, headers, content_type=PROBLEM_JSON)


_PATH = re.compile(r" - at `(?:key in )?\$([^`]*)`")
_FIELD = re.compile(r"field `([^`]*)`")


def problem_of(exc: Exception) -> Problem | None:
    """The problem that an error is for a client; None for an error that nobody expected."""
    match exc:
        case Problem():
            return exc
        case InvalidInput():
            return Problem(422, exc.problem, field=exc.field)
        case msgspec.ValidationError():
            return _misshapen(exc)
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
            return Problem(507, "the store has no room left; nothing was stored")
        case StoreUnavailable():
            return Problem(503, "the store cannot be reached; repeat the request", retry_after=RETRY_STORE)
        case TimeoutError():
            return Problem(503, "the store did not answer in time; repeat the request", retry_after=RETRY_STORE)
        case StoreError():
            return Problem(503, f"the store cannot be used ({type(exc).__name__})", retry_after=RETRY_STORE)
        case FairlaneError():
            return Problem(409, str(exc))
    return None


NOT_UTF8 = "the body is not UTF-8"


def _misshapen(exc: msgspec.ValidationError) -> Problem:
    """A value of the wrong type, or one that is missing or unknown: the message names the field."""
    text = hide_values(str(exc))
    path, name = _PATH.search(text), _FIELD.search(text)
    parts = [path[1].lstrip(".") if path else "", name[1] if name else ""]
    return Problem(422, _PATH.sub("", text), field=".".join(filter(None, parts)) or None)
