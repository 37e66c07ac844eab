"""The two connections of the wake-ups: one that listens, and can do nothing else, and one that publishes.

Each is made when it is needed first. Both go to one server, so when one is lost, both are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from redis.asyncio.connection import AbstractConnection, Connection

from ..notifier import COMMAND_SECONDS, CONNECT_SECONDS

Connect = Callable[[], Awaitable[AbstractConnection]]
"""Makes a connection to the server, in the running event loop: connected, of protocol 2, decoding nothing, without
retries and without `socket_timeout`, for who listens may hear nothing for hours. It may be called in a forked child."""
Hear = Callable[[bytes, bytes], None]
"""Is told a channel, and what was published there."""


async def connect(host: str, port: int) -> AbstractConnection:
    """A connection as `Connect` says."""
    made = Connection(host=host, port=port, protocol=2, socket_timeout=None, client_name="fairlane-wakeups")
    await made.connect()  # type: ignore[no-untyped-call]  # the driver gives it no types
    return made


class Pair:
    """Both connections, used by one task alone. `lost` is called when the one that listens has ended by itself."""

    def __init__(self, connect: Connect, hear: Hear, lost: Callable[[], None]) -> None:
        self._connect = connect
        self._hear = hear
        self._lost = lost
        self._listening: AbstractConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answer: asyncio.Future[None] | None = None
        self._publishing: AbstractConnection | None = None

    async def open(self, *, listen: bool) -> None:
        """Make the connection that is needed first, so that it is known whether the server is there."""
        if not listen:
            self._publishing = await self._dial()
            return
        self._listening = await self._dial()
        self._reading = asyncio.create_task(self._read(self._listening))
        self._reading.add_done_callback(lambda _: self._lost())

    async def subscribe(self, channel: str) -> None:
        """Hear a channel; the server listens when this returns."""
        if self._listening is None:
            await self.open(listen=True)
        await self._ask("SUBSCRIBE", channel)

    async def unsubscribe(self, channel: str) -> None:
        """Hear a channel no more."""
        await self._ask("UNSUBSCRIBE", channel)

    async def publish(self, told: Sequence[tuple[str, bytes]]) -> None:
        """Publish these, each a channel and a payload, in one round trip."""
        if self._publishing is None:
            self._publishing = await self._dial()
        await _call(self._publishing, [("PUBLISH", *each) for each in told])

    async def look(self) -> None:
        """See whether the server is there, and let it see that we are."""
        if self._publishing is not None:
            await _call(self._publishing, [("PING",)])
        if self._listening is not None:
            await self._ask("PING")

    def check(self) -> None:
        """Raise why the connection that listens was lost, if it was."""
        if self._reading is not None and self._reading.done():
            self._reading.result()

    async def close(self) -> None:
        """End both, without waiting for the server."""
        if self._reading is not None:
            self._reading.cancel()
            # Why it ended is told by `check`; here it is over in any case.
            await asyncio.wait([self._reading])
            if not self._reading.cancelled():
                self._reading.exception()
        for connection in (self._listening, self._publishing):
            if connection is not None:
                with contextlib.suppress(Exception):
                    await connection.disconnect(nowait=True)

    async def _dial(self) -> AbstractConnection:
        """A new connection to a server that answers; one that is frozen accepts connections all the same."""
        async with asyncio.timeout(CONNECT_SECONDS):
            made = await self._connect()
        await _call(made, [("PING",)])
        return made

    async def _ask(self, *command: str) -> None:
        """Send a command that the connection knows while it listens, and wait for the answer."""
        assert self._listening is not None
        assert self._reading is not None
        self._answer = answer = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(COMMAND_SECONDS):
            await self._listening.send_command(*command, check_health=False)
            await asyncio.wait([answer, self._reading], return_when=asyncio.FIRST_COMPLETED)
        self.check()

    async def _read(self, connection: AbstractConnection) -> None:
        while True:
            said = await connection.read_response()
            if isinstance(said, list) and said[0] == b"message":
                self._hear(said[1], said[2])
            elif self._answer is not None and not self._answer.done():
                # One thing is asked at a time, so whatever is no message is the answer to it.
                self._answer.set_result(None)


async def _call(connection: AbstractConnection, commands: Sequence[tuple[str | bytes, ...]]) -> None:
    async with asyncio.timeout(COMMAND_SECONDS):
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        for _ in commands:
            await connection.read_response()
