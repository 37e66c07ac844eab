"""Responses as plain ASGI messages. A body is encoded once, here."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

Headers = Iterable[tuple[bytes, bytes]]
JSON = b"application/json"
NDJSON = b"application/x-ndjson"
COMMON: tuple[tuple[bytes, bytes], ...] = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
logger = logging.getLogger("fairlane.http")
TRANSPORT = "fairlane.transport"
"""The name in a scope of the transport that the request came by."""
_RESET = struct.pack("ii", 1, 0)
_encoder = msgspec.json.Encoder()


def note_transport(scope: Scope, receive: Receive) -> None:
    """Keep the server's transport where an answer finds it: middlewares inside the service hide its `receive`."""
    scope[TRANSPORT] = getattr(getattr(receive, "__self__", None), "transport", None)


def abort(transport: Any) -> None:
    """Close a connection whose client does not read."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        # Else the kernel keeps what it has of the answer, up to some megabytes, for minutes.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


class Disconnected(Exception):
    """The client has disconnected; the answer would not be read."""


class Answer:
    """A complete response."""

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
    """A response with a JSON document."""
    return Answer(_encoder.encode(document), status, headers)


class Parts:
    """An answer in parts to a client that has so many seconds to read each of them."""

    def __init__(self, scope: Scope, send: Send, seconds: float) -> None:
        self._transport = scope.get(TRANSPORT)
        self._send = send
        self._seconds = seconds

    async def begin(self, content_type: bytes, headers: Headers = ()) -> None:
        """Send the head of the answer."""
        head = [*COMMON, (b"content-type", content_type), *headers]
        await self._within({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, part: bytes) -> None:
        """Send a part, which waits while the client's buffers are full."""
        await self._within({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """Complete the answer."""
        await self._within({"type": "http.response.body", "body": b""})

    async def _within(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            logger.info("a client did not read its answer for %g s: disconnected", self._seconds)
            await self._disconnect()
            raise Disconnected from None

    async def _disconnect(self) -> None:
        """Close the connection without waiting until the client has read what was sent.

        ASGI has no message for this. A server that is left with an unfinished answer closes the connection once its
        buffer is empty, which is never, and until then it does not stop either. So the transport behind uvicorn's
        `receive` is aborted; with another server, or a middleware around the service, the server's own way remains.
        """
        if self._transport is not None and hasattr(self._transport, "abort"):
            abort(self._transport)
            await asyncio.sleep(0)  # the server takes note before the answer is left unfinished
