"""Reads the queues once a second for all listeners of the system events together, and only while there are any."""

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
    """The result of one read."""

    number: int
    data: bytes
    """The JSON document to send, the same for every listener."""


class Sampler:
    """Reads while there are listeners, and keeps only the latest sample: a slow listener skips some."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._latest: Sample | None = None
        self._news = asyncio.Event()
        self._ended: dict[str, tuple[float, int, int]] = {}

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Sampler]:
        """Keep sampling inside the block."""
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
                    logger.warning("cannot read the store for /events: %s", type(exc).__name__)
                away = True
                document: dict[str, Any] = {"store": "away", "queues": []}
            else:
                away = False
                document = {"store": "up", "queues": [self._record(queue) for queue in queues]}
            data = msgspec.json.encode(document)
            if data != last:
                last = data
                number += 1
                self._latest = Sample(number, data)
                # A new event each time, so that each waiter wakes exactly once.
                news, self._news = self._news, asyncio.Event()
                news.set()
            await asyncio.sleep(self._service.settings.sample)

    def _record(self, queue: QueueReading) -> dict[str, Any]:
        """A queue with the jobs that arrived and ended per second since the last sample."""
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
        # The oldest wait changes all the time; whole seconds avoid an event for every fraction.
        record = queue_record(queue)
        waited = record["oldest_wait"]
        return record | {"oldest_wait": None if waited is None else float(int(waited))} | rates
