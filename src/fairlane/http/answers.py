"""Answers as plain ASGI messages. A body is bytes already: no framework encodes it again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

Headers = Iterable[tuple[bytes, bytes]]
JSON = b"application/json"
NDJSON = b"application/x-ndjson"
COMMON: tuple[tuple[bytes, bytes], ...] = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_encoder = msgspec.json.Encoder()


class Answer:
    """A whole answer."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(self, body: bytes, status: int = 200, headers: Headers = (), *, content_type: bytes = JSON) -> None:
        self.body = body
        self.status = status
        self.headers = headers
        self.content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [*COMMON, *self.headers, (b"content-length", str(len(self.body)).encode())]
        if self.status != 204:
            headers.append((b"content-type", self.content_type))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_answer(document: Any, status: int = 200, headers: Headers = ()) -> Answer:
    """A document as JSON."""
    return Answer(_encoder.encode(document), status, headers)
