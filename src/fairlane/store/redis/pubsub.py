"""The two connections of the wake-ups: one that listens, and can do nothing else, and one that publishes.

Each is made when it is needed first. Both go to one server, so when one is lost, both are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from ..shared.notifier import COMMAND_SECONDS, CONNECT_SECONDS
from .address import Address
from .connection import Line, dial
from .sentinels import Sentinels

Dial = Callable[[], Awaitable[Line]]
"""Makes a line to the server, which has answered on it, in the running event loop. A forked child may call it too."""
Hear = Callable[[bytes, bytes], None]
"""Is told a channel, and what was published there."""


def dialling(address: Address) -> Dial:
    """How lines to an address are made."""
    if address.service is not None:
        return Sentinels(address).dial
    return partial(dial, address, address.places[0])


class Pair:
    """Both connections, used by one task alone. `lost` is called when the one that listens has ended by itself."""

    def __init__(self, dial: Dial, hear: Hear, lost: Callable[[], None]) -> None:
        self._dial = dial
        self._hear = hear
        self._lost = lost
        self._listening: Line | None = None
        self._broken: Exception | None = None
        self._answer: asyncio.Future[None] | None = None
        self._publishing: Line | None = None

    async def open(self, *, listen: bool) -> None:
        """Make the connection that is needed first, so that it is known whether the server is there."""
        if not listen:
            self._publishing = await self._connected()
            return
        self._listening = await self._connected()
        # By a call, not by a task that reads: somebody waits for what is heard.
        self._listening.listen(self._take)

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
            self._publishing = await self._connected()
        await _call(self._publishing, [("PUBLISH", *each) for each in told])

    async def look(self) -> None:
        """See whether the server is there, and let it see that we are."""
        if self._publishing is not None:
            await _call(self._publishing, [("PING",)])
        if self._listening is not None:
            await self._ask("PING")

    def check(self) -> None:
        """Raise why the connection that listens was lost, if it was."""
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        """End both, without waiting for the server."""
        for line in (self._listening, self._publishing):
            if line is not None:
                line.close()

    async def _connected(self) -> Line:
        async with asyncio.timeout(CONNECT_SECONDS):
            return await self._dial()

    async def _ask(self, *command: str) -> None:
        """Send a command that the connection knows while it listens, and wait for the answer."""
        assert self._listening is not None
        self.check()
        self._answer = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(COMMAND_SECONDS):
            self._listening.tell(*command)
            await self._answer
        self.check()

    def _take(self, said: Any) -> None:
        if isinstance(said, list) and said[0] == b"message":
            self._hear(said[1], said[2])
            return
        if isinstance(said, Exception) and self._broken is None:
            # What is refused is of no use any more either.
            self._broken = said
            self._lost()
        if self._answer is not None and not self._answer.done():
            # One thing is asked at a time, so whatever is no message is the answer to it.
            self._answer.set_result(None)


async def _call(line: Line, commands: Sequence[tuple[str | bytes, ...]]) -> None:
    async with asyncio.timeout(COMMAND_SECONDS):
        for command in commands:
            line.tell(*command)
        for _ in commands:
            await line.hear()
