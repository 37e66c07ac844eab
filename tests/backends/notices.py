"""What travels by NOTIFY, seen from outside, and what the tests of PostgreSQL's wake-ups do with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any

from fairlane.backends.ears import Ear
from fairlane.backends.postgresql.address import driver
from fairlane.backends.postgresql.channels import Channels
from fairlane.backends.postgresql.wakeups import NotifyWakeups

Open = Callable[..., NotifyWakeups]
numbers = count()


def new_schema() -> str:
    """A schema of which nobody has heard yet; wake-ups need no more of it than its name."""
    return f"wake_{next(numbers)}"


@contextmanager
def opening(database: str, schema: str) -> Iterator[Open]:
    """Opens wake-ups, of the schema if no other is named, and closes them at the end."""
    made: list[NotifyWakeups] = []

    def open_one(name: str = schema, *, listen: bool = True) -> NotifyWakeups:
        made.append(NotifyWakeups(database, name, listen=listen))
        return made[-1]

    try:
        yield open_one
    finally:
        for each in made:
            each.close()
    assert not threads()


def threads() -> list[str]:
    """The threads of all wake-ups that are open."""
    return [thread.name for thread in threading.enumerate() if thread.name == "fairlane-wakeups"]


class Tap:
    """A connection that hears what really travels, and may send anything."""

    def __init__(self, connection: Any, channels: Channels) -> None:
        self.connection = connection
        self.channels = channels
        self.heard: list[tuple[str, str]] = []
        """Channel and topic, or sign."""
        self.messages = 0
        self.news = asyncio.Event()

    def hear(self, _: object, pid: int, channel: str, payload: str) -> None:
        self.messages += 1
        self.heard += [("jobs" if channel == self.channels.jobs else "others", line) for line in payload.split("\n")]
        self.news.set()

    async def send(self, channel: str, payload: str) -> None:
        await self.connection.execute("SELECT pg_notify($1, $2)", channel, payload)

    async def until(self, channel: str, topic: str, timeout: float = 5.0) -> None:
        async with asyncio.timeout(timeout):
            while (channel, topic) not in self.heard:
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def tapping(database: str, schema: str) -> AsyncIterator[Tap]:
    """Hear all that travels between the processes of a schema."""
    connection = await driver().connect(database)
    tapped = Tap(connection, Channels.of(schema))
    for channel in tapped.channels:
        await connection.add_listener(channel, tapped.hear)
    try:
        yield tapped
    finally:
        await connection.close()


async def until(ear: Ear, *topics: str) -> frozenset[str]:
    """Wait until all `topics` were heard, and tell everything that was."""
    heard: frozenset[str] = frozenset()
    while not heard.issuperset(topics):
        news = await ear.wait(5)
        assert news, f"waited in vain for {set(topics) - heard}"
        heard |= news
    return heard


async def listened_to(ear: Ear) -> None:
    """Wait until the server listens for an ear, and take what it was told because that took long."""
    assert ear._notifier is not None
    async with asyncio.timeout(10):
        while ear.late or not ear._notifier.listens(jobs=ear.jobs, others=ear.others):
            await asyncio.sleep(0.01)
    await ear.wait(0.0)
