"""What happened in the last hour: jobs that ended, waiting and running jobs, and how long jobs waited for their start.

A store counts the jobs that ever ended, not when they ended. While the service runs, it reads these counts every few
seconds and keeps the differences of an hour in memory. A service that was just started knows nothing earlier, and says
since when it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from ..errors import FairlaneError
from ..model.job import Job, JobState
from ..model.reading import QueueReading

if TYPE_CHECKING:
    from .service import Service

logger = logging.getLogger("fairlane.http")
T = TypeVar("T")
INTERVAL = 10.0
"""Seconds between two reads."""
HOUR = 3_600.0
NEWEST, RUNNING = 100, 50
"""The jobs from which the time to start is measured. Both lists cost as much as they are long: completed jobs could not
be listed so where many newer jobs wait."""
FIELDS = ("completed", "failed", "cancelled", "pending", "running")


class Point(msgspec.Struct, frozen=True):
    """The counts of each queue at one moment."""

    at: float
    queues: dict[str, tuple[int, ...]]
    """The counts in the order of `FIELDS`."""


class History:
    """Reads the queues at an interval and keeps an hour."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._points: deque[Point] = deque()
        self.waits = Cached(self._read_waits, 5.0)
        """The time to start of recent jobs."""

    @contextlib.asynccontextmanager
    async def recording(self) -> AsyncIterator[None]:
        """Keep reading inside the block."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            # During an outage the chart has a gap; the streams report the outage itself.
            try:
                self.note(await self._service.timed(self._service.app.client.queues()), time.time())
            except (FairlaneError, TimeoutError):
                pass
            except Exception:
                logger.exception("cannot read the counts of the last hour")
            await asyncio.sleep(INTERVAL)

    def note(self, queues: Sequence[QueueReading], now: float) -> None:
        """Add a point, and drop those that are older than an hour."""
        counts = {
            queue.name: tuple(sum(getattr(each, field) for each in queue.classes) for field in FIELDS)
            for queue in queues
        }
        self._points.append(Point(now, counts))
        while now - self._points[0].at > HOUR:
            self._points.popleft()

    def document(self, queue: str | None) -> dict[str, Any]:
        """What ended in each interval, and what waited and ran at its end; of one queue or of all."""
        columns: dict[str, list[float]] = {field: [] for field in ("at", *FIELDS)}
        points = list(self._points)
        for before, after in pairwise(points):
            old, new = _total(before, queue), _total(after, queue)
            columns["at"].append(after.at)
            for index, field in enumerate(FIELDS):
                # A recount may lower a count; nothing has "un-ended".
                columns[field].append(new[index] if index > 2 else max(0, new[index] - old[index]))
        return {"since": points[0].at if points else None, "interval": INTERVAL, **columns}

    async def _read_waits(self) -> dict[str, Any]:
        client = self._service.app.client
        newest = (await client.find(limit=NEWEST)).jobs
        running = (await client.find(state=JobState.RUNNING, limit=RUNNING)).jobs
        found = list({job.id: job for job in (*newest, *running)}.values())
        return {
            "all": spread(found),
            **{
                label: spread([job for job in found if job.priority.label == label])
                for label in ("high", "normal", "low")
            },
        }


def _total(point: Point, queue: str | None) -> Sequence[int]:
    chosen = [counts for name, counts in point.queues.items() if queue in (None, name)]
    return [sum(each) for each in zip(*chosen, strict=True)] if chosen else [0] * len(FIELDS)


def spread(jobs: Sequence[Job]) -> dict[str, Any]:
    """The median and the 95th percentile of the seconds from due to start, of jobs that ran once."""
    waits = sorted(
        max(0.0, job.started_at - max(job.enqueued_at, job.first_due_at or 0.0))
        for job in jobs
        if job.started_at is not None and job.attempt == 1
    )
    if not waits:
        return {"p50": None, "p95": None, "jobs": 0}
    last = len(waits) - 1
    return {"p50": round(waits[last // 2], 3), "p95": round(waits[round(last * 0.95)], 3), "jobs": len(waits)}


class Cached(Generic[T]):
    """A value that many callers ask for and that takes some reads: read once for all of them.

    A value that is a little old, at most `oldest` seconds, is returned at once while a new one is read, so only the
    first caller waits.
    """

    def __init__(
        self, read: Callable[[], Awaitable[T]], seconds: float, oldest: float = 60.0, limit: float | None = None
    ) -> None:
        """`limit`: how many seconds a read may take, so that the next caller begins another."""
        self._read = read
        self._limit = limit
        self._seconds = seconds
        self._oldest = oldest
        self._value: T | None = None
        self._read_at = float("-inf")
        self._reading: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The value, at most `oldest` seconds old."""
        age = time.monotonic() - self._read_at
        if self._value is not None and age <= self._seconds:
            return self._value
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._renew())
            self._reading.add_done_callback(_retrieved)
        if self._value is not None and age <= self._oldest:
            return self._value
        return await asyncio.shield(self._reading)

    def forget(self) -> None:
        """Read again for the next caller. A read that has begun is not for it: it may have seen what was before."""
        self._read_at = float("-inf")
        self._reading = None

    async def _renew(self) -> T:
        mine = asyncio.current_task()
        async with asyncio.timeout(self._limit):
            value = await self._read()
        if self._reading is mine:
            self._value, self._read_at = value, time.monotonic()
        return value


MOST_SHARED = 100
"""Answers that are kept at once."""


FAILURES_FOR = 3.0
"""Seconds for which an answer about failures is used: it takes some thousands of rows."""


class NoQuery(msgspec.Struct, frozen=True):
    """The key of an answer to an operation that has no query."""

    operation: str


class SharedAnswers:
    """Answers of costly reads, by their query: callers that ask for the same one share a read, and an answer is used
    for a moment. So the cost does not grow with the number of open dashboards."""

    def __init__(self, limit: float) -> None:
        """`limit`: how many seconds a read may take."""
        self._limit = limit
        self._known: OrderedDict[Hashable, Cached[Any]] = OrderedDict()

    async def get(self, query: msgspec.Struct, read: Callable[[], Awaitable[T]], seconds: float = 1.0) -> T:
        """The answer to a query, at most `seconds` old."""
        key = (type(query), query)
        cached: Cached[T] | None = self._known.pop(key, None)
        if cached is None:
            cached = Cached(read, seconds, oldest=seconds, limit=self._limit)
        self._known[key] = cached
        if len(self._known) > MOST_SHARED:
            self._known.popitem(last=False)
        return await cached.get()

    def forget(self) -> None:
        """Read everything again: the caller has changed something, and wants to see it."""
        self._known.clear()


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a read, which asyncio would log if no caller waits for it."""
    if not task.cancelled():
        task.exception()
