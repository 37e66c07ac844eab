"""Ends connections whose client still sends when its request is answered.

A server reads and discards the rest of such a body, for ever if it never ends. Closing at once would be no better: data
in transit would reset the connection, and the client might lose the answer. So the answer says that the connection
closes, the rest is read for a moment, and then it is closed.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER = 1.0
"""Seconds for which the rest of a body is read after the answer."""
CLOSE = (b"connection", b"close")
BODY_HEADERS = frozenset({b"content-length", b"transfer-encoding"})


class UnreadBodies:
    """Middleware for requests with a body."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        """Bytes of the rest that are read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Only there do connections and requests end together.
        if scope["type"] == "http" and scope["http_version"] in ("1.0", "1.1"):
            for name, value in scope["headers"]:
                if name in BODY_HEADERS and value != b"0":
                    incoming = _Incoming(receive, send, self._most)
                    await self._app(scope, incoming.receive, incoming.send)
                    return
        await self._app(scope, receive, send)


class _Incoming:
    """One request whose body is on its way."""

    def __init__(self, receive: Receive, send: Send, most: int) -> None:
        self._receive = receive
        self._send = send
        self._most = most
        self._whole = self._closing = False

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self._whole = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self._whole:
            self._closing = True
            message = {**message, "headers": [*message.get("headers", ()), CLOSE]}
        elif self._closing and not self._whole and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._read_rest()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _read_rest(self) -> None:
        taken = 0
        try:
            async with asyncio.timeout(LINGER):
                while not self._whole and taken < self._most:
                    taken += len((await self.receive()).get("body", b""))
        except TimeoutError:
            pass
