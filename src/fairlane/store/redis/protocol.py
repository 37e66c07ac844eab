"""What the server says on a connection, put together as it comes.

In place of the driver's streams: a call through those takes half as much processor time again (measured), because what
was received is handed on in steps, each of which wakes the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from .driver import ProtocolError, Reader
from .driver_errors import Refusal

_NOTHING: Final = object()


class Conversation(asyncio.Protocol):
    """Takes over a connection that nobody has asked anything on which is not answered yet."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._reader = Reader(protocolError=ProtocolError, replyError=Refusal, notEnoughData=_NOTHING)
        self._waiting: asyncio.Future[Any] | None = None
        self._hear: Callable[[Any], None] | None = None
        self._lost: Exception | None = None
        transport.set_protocol(self)

    async def next(self) -> Any:
        """The next answer or message; one at a time may wait for it. Raises when the connection has broken."""
        answer = self._reader.gets()
        if answer is not _NOTHING:
            return answer
        if self._lost is not None:
            raise self._lost
        self._waiting = asyncio.get_running_loop().create_future()
        return await self._waiting

    def listen(self, hear: Callable[[Any], None]) -> None:
        """From now on, whatever comes goes there at once, refusals too, and at last why the connection has broken."""
        self._hear = hear
        self.data_received(b"")
        if self._lost is not None:
            hear(self._lost)

    def has_more(self) -> bool:
        """Whether something has come that nobody waited for."""
        return self._lost is not None or self._reader.has_data()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._hear is not None:
            self._tell_all(self._hear)
            return
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        try:
            answer = self._reader.gets()
        except ProtocolError as exc:
            self._fail(exc)
            return
        if answer is not _NOTHING:
            self._waiting = None
            waiting.set_result(answer)

    def _tell_all(self, hear: Callable[[Any], None]) -> None:
        try:
            while (said := self._reader.gets()) is not _NOTHING:
                hear(said)
        except ProtocolError as exc:
            self._fail(exc)

    def eof_received(self) -> None:
        self._fail(ConnectionResetError("the server has closed it"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("it was closed"))

    def _fail(self, exc: Exception) -> None:
        if self._lost is None:
            self._lost = exc
            if self._hear is not None:
                self._hear(exc)
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(self._lost)
