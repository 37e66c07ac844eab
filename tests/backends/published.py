"""What travels by PUBLISH, seen from outside, and what the tests of the Redis store's wake-ups do with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import redis.asyncio as driver

from fairlane.backends.redis.address import parse
from fairlane.backends.redis.pair import dialling
from fairlane.backends.redis.wakeups import RedisWakeups

from .notices import threads

Open = Callable[..., RedisWakeups]


@contextmanager
def opening(port: int, prefix: str) -> Iterator[Open]:
    """Opens wake-ups, of the namespace if no other is named, and closes them at the end."""
    made: list[RedisWakeups] = []

    def open_one(name: str = prefix) -> RedisWakeups:
        made.append(RedisWakeups(dialling(parse(f"redis://127.0.0.1:{port}")), name))
        return made[-1]

    try:
        yield open_one
    finally:
        for each in made:
            each.close()
    assert not threads()


class Tap:
    """Hears what really travels on the two channels of a namespace, and may publish anything."""

    def __init__(self, client: driver.Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self.heard: list[tuple[str, list[str]]] = []
        """Channel and lines of each message."""
        self._news = asyncio.Event()

    async def send(self, channel: str, payload: str) -> None:
        """Publish a payload as it is."""
        await self._client.publish(self._prefix + channel, payload)

    async def until(self, channel: str, line: str, timeout: float = 5.0) -> None:
        """Wait until a line was heard."""
        async with asyncio.timeout(timeout):
            while not any(where == channel and line in lines for where, lines in self.heard):
                self._news.clear()
                await self._news.wait()

    async def listen(self, ready: asyncio.Event) -> None:
        """Hear, until the task is cancelled."""
        async with self._client.pubsub() as ear:
            await ear.subscribe(self._prefix + "jobs", self._prefix + "topics")
            async for message in ear.listen():
                if message["type"] == "message":
                    channel = message["channel"].decode().removeprefix(self._prefix)
                    self.heard.append((channel, message["data"].decode().split("\n")))
                    self._news.set()
                else:
                    ready.set()


@asynccontextmanager
async def tapping(port: int, prefix: str) -> AsyncIterator[Tap]:
    """Hear all that travels in a namespace."""
    async with driver.Redis(host="127.0.0.1", port=port, protocol=2) as client:
        tapped, ready = Tap(client, prefix), asyncio.Event()
        listening = asyncio.create_task(tapped.listen(ready))
        await ready.wait()
        try:
            yield tapped
        finally:
            listening.cancel()
            await asyncio.wait([listening])


async def connected(client: driver.Redis) -> int:
    """How many connections of wake-ups the server has."""
    return sum(each["name"].startswith("fairlane:") for each in await client.client_list())
