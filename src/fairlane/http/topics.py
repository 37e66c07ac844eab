"""Live topics: what streams of events show, read once per interval for all listeners of a topic together, and only
while there are any.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import FairlaneError

if TYPE_CHECKING:
    from .service import Service

Document = dict[str, Any]
Read = Callable[[], Awaitable[Document]]
logger = logging.getLogger("fairlane.http")


class Sample(msgspec.Struct, frozen=True):
    """The result of one read."""

    number: int
    data: bytes
    """The JSON document to send, the same for every listener."""


class Topic:
    """Reads while there are listeners, and keeps only the latest sample: a slow listener skips some."""

    def __init__(self, service: Service, kind: str, read: Read, *, empty: Document) -> None:
        self.kind = kind
        """The kind of its events."""
        self._service = service
        self._read = read
        self._empty = empty
        self._task: asyncio.Task[None] | None = None
        self._latest: Sample | None = None
        self._news = asyncio.Event()
        self.listeners = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Topic]:
        """Keep reading inside the block."""
        self.listeners += 1
        if self._task is None or self._task.done():
            self._latest = None
            self._task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            self.listeners -= 1
            if not self.listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    async def after(self, number: int) -> Sample:
        """The latest sample that is newer than `number`."""
        while self._latest is None or self._latest.number <= number:
            await self._news.wait()
        return self._latest

    async def _run(self) -> None:
        number, last = 0, b""
        away = False
        while True:
            try:
                async with asyncio.timeout(self._service.settings.store_seconds):
                    document = {"store": "up"} | await self._read()
                away = False
            except Exception as exc:
                # Whatever it is: a topic that ended would leave its listeners with what they have, and heartbeats.
                if not away and isinstance(exc, (FairlaneError, TimeoutError)):
                    logger.warning("cannot read the store for %s events: %s", self.kind, type(exc).__name__)
                elif not away:
                    logger.exception("cannot make %s events", self.kind)
                away = True
                document = {"store": "away"} | self._empty
            data = msgspec.json.encode(document)
            if data != last:
                last = data
                number += 1
                self._latest = Sample(number, data)
                # A new event each time, so that each waiter wakes exactly once.
                news, self._news = self._news, asyncio.Event()
                news.set()
            await asyncio.sleep(self._service.settings.sample)


class Topics:
    """The topics of a service by name. A topic exists while it has listeners."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, ...], Topic] = {}

    @contextlib.asynccontextmanager
    async def listening(self, name: tuple[str | None, ...], make: Callable[[], Topic]) -> AsyncIterator[Topic]:
        """Listen to a topic inside the block. Listeners with the same name share it."""
        topic = self._known.get(name)
        if topic is None:
            topic = self._known[name] = make()
        try:
            async with topic.listening():
                yield topic
        finally:
            if not topic.listeners:
                self._known.pop(name, None)


async def merged(*topics: Topic) -> AsyncGenerator[tuple[Topic, Sample], None]:
    """The samples of several topics as they come, the first of each in their order."""
    numbers = [0] * len(topics)
    waiting: dict[int, asyncio.Task[Sample]] = {}
    try:
        for index, topic in enumerate(topics):
            sample = await topic.after(0)
            numbers[index] = sample.number
            yield topic, sample
        while True:
            for index, topic in enumerate(topics):
                if index not in waiting:
                    waiting[index] = asyncio.ensure_future(topic.after(numbers[index]))
            await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
            for index in [index for index, task in waiting.items() if task.done()]:
                sample = waiting.pop(index).result()
                numbers[index] = sample.number
                yield topics[index], sample
    finally:
        for task in waiting.values():
            task.cancel()
        await asyncio.gather(*waiting.values(), return_exceptions=True)
