"""Ends connections on which the head of a request takes too long to arrive, or whose answer is not read.

An application hears of a request once its head is complete, and of an answer until it is handed over. uvicorn waits for
the rest without a limit, also when it stops. So the class of uvicorn's connections gets limits when the lifespan
begins, which is before the server listens.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive

from .answers import abort
from .problems import PROBLEM_JSON, Problem
from .settings import HttpSettings


def limit_connections(receive: Receive, settings: HttpSettings) -> None:
    """Limit the connections of the server whose lifespan `receive` belongs to.

    ASGI has no message for this: the configuration behind uvicorn's `receive` has the class. With another server, or in
    an application that mounts this one, the server's own limits remain.
    """
    config: Any = getattr(getattr(receive, "__self__", None), "config", None)
    usual = getattr(config, "http_protocol_class", None)
    if isinstance(usual, type) and not issubclass(usual, LimitedConnection):
        config.http_protocol_class = type(usual.__name__, (LimitedConnection, usual), {"settings": settings})


class LimitedConnection(asyncio.Protocol):
    """Mixed into a class of connections of uvicorn: each head has so many seconds, the first one since the client has
    connected, others since their first byte. Between two requests uvicorn's own limit applies."""

    settings: HttpSettings
    transport: Any
    connections: Any
    _timer: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _began = False

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A part of a head or of a body has arrived."""
        super().data_received(data)
        self._began = True
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        super().connection_lost(exc)
        self._watch()

    def on_response_complete(self, *args: Any) -> None:
        """An answer is complete, but for what the client must read first."""
        super().on_response_complete(*args)  # type: ignore[misc]  # of uvicorn's class
        if self._reading is None and self.transport.get_write_buffer_size():
            self._look_again(None)

    def _look_again(self, unread: int | None) -> None:
        loop = asyncio.get_running_loop()
        self._reading = loop.call_later(self.settings.slow_reader, self._look, unread)

    def _look(self, before: int | None) -> None:
        """Look whether the client has read since there were so many bytes."""
        self._reading = None
        unread = self.transport.get_write_buffer_size() if self in self.connections else 0
        if not unread:
            return
        # Of the first look: uvloop sends what is written a moment later, so that nobody knew what stays.
        if before is None or unread < before:
            self._look_again(unread)
        else:
            abort(self.transport)

    @property
    def _waits(self) -> bool:
        """Whether no request is under way. Connections that uvicorn has let go of, and those of other protocols, do not
        count."""
        cycle: Any = getattr(self, "cycle", self)
        return self in self.connections and (cycle is None or getattr(cycle, "response_complete", False))

    def _watch(self) -> None:
        if self._waits:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self.settings.head_seconds, self._end)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        if not self._waits:
            return
        if self.transport.get_write_buffer_size():
            # It does not read the last answer either.
            abort(self.transport)
            return
        if self._began:
            problem = Problem(
                408, f"the head of the request took longer than {self.settings.head_seconds:g} s to arrive"
            )
            body = msgspec.json.encode(problem.document())
            head = f"content-type: {PROBLEM_JSON.decode()}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\n" + head.encode() + body)
        self.transport.close()
