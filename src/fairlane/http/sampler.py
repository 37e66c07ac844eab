"""One look at the queues a second for everybody who listens to the whole system. Nobody listens: nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec

from ..documents import queue_record
from ..errors import FairlaneError
from ..model.reading import QueueReading

if TYPE_CHECKING:
    from .service import Service

logger = logging.getLogger("fairlane.http")


class Sample(msgspec.Struct, frozen=True):
    """What one look saw."""

    number: int
    data: bytes
    """The JSON document that is sent, the same for every listener."""


class Sampler:
    """Looks while somebody listens, and keeps the latest look alone: a slow listener misses some of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._latest: Sample | None = None
        self._news = asyncio.Event()
        self._ended: dict[str, tuple[float, int, int]] = {}

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Sampler]:
        """Keep looking inside the block."""
        self._listeners += 1
        if self._task is None or self._task.done():
            self._latest, self._ended = None, {}
            self._task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            self._listeners -= 1
            if not self._listeners and self._task is not None:
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
                    queues = await self._service.app.client.queues()
            except (FairlaneError, TimeoutError) as exc:
                if not away:
                    logger.warning("the store cannot be read for /events: %s", type(exc).__name__)
                away = True
                document: dict[str, Any] = {"store": "away", "queues": []}
            else:
                away = False
                document = {"store": "up", "queues": [self._record(queue) for queue in queues]}
            told = msgspec.json.encode(document)
            if told != last:
                last = told
                number += 1
                self._latest = Sample(number, told)
                # A new event each time: a waiter for the old one wakes once.
                news, self._news = self._news, asyncio.Event()
                news.set()
            await asyncio.sleep(self._service.settings.sample)

    def _record(self, queue: QueueReading) -> dict[str, Any]:
        """A queue with the jobs that started waiting and that ended per second since the last look."""
        now, counts = time.monotonic(), queue.counts
        ended = counts.completed + counts.failed + counts.cancelled
        seen = ended + counts.pending + counts.scheduled + counts.running
        before = self._ended.get(queue.name)
        self._ended[queue.name] = (now, ended, seen)
        rates: dict[str, float | None] = {"arrived_per_second": None, "ended_per_second": None}
        if before is not None and now > before[0]:
            took = now - before[0]
            rates = {
                "arrived_per_second": round((seen - before[2]) / took, 1),
                "ended_per_second": round((ended - before[1]) / took, 1),
            }
        # The age of the oldest job moves all the time; whole seconds keep an idle system silent for longer.
        record = queue_record(queue)
        waited = record["oldest_wait"]
        return record | {"oldest_wait": None if waited is None else float(int(waited))} | rates
