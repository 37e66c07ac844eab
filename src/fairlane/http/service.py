"""The state of one HTTP service: application, settings, access, open streams, and lifespan."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..app import Fairlane
from ..doctor import diagnose
from ..model.reading import QueueReading
from ..store.diagnosis import Level
from ..task import Task
from .access import Access, Caller
from .history import Cached, History, SharedAnswers
from .problems import Problem
from .settings import HttpSettings
from .signals import before_server
from .topics import Topics

if TYPE_CHECKING:
    from .exposition import Exposition

T = TypeVar("T")
Lifespan = Callable[[], AbstractAsyncContextManager[Any]]
DIAGNOSED_FOR = 10.0
"""Seconds for which a diagnosis is used."""
WORST_FIRST = (Level.ERROR, Level.WARN, Level.OK)
Unready = Callable[[], str | None]


class Service:
    """The state that all operations of a service share."""

    prefix = "/api/v1"

    def __init__(self, app: Fairlane, settings: HttpSettings) -> None:
        self.app = app
        self.settings = settings
        self.access = Access(settings, app.client.tokens)
        self.topics = Topics()
        """What the open streams of events show."""
        self.history = History(self)
        """What ended in the last hour."""
        self.diagnosis = Cached(self._diagnose, DIAGNOSED_FOR)
        """What the doctor finds."""
        self.shared = SharedAnswers(settings.store_seconds)
        """Answers of costly reads that many may ask for."""
        self.queues = Cached(
            self._read_queues, settings.sample / 2, oldest=settings.sample / 2, limit=settings.store_seconds
        )
        """The counts of the queues for the live views, which read them once an interval together."""
        self.features: list[str] = []
        """The subjects of extra operations. The dashboard has pages for some of them."""
        self.lifespans: list[Lifespan] = []
        """Entered in order on startup, exited in reverse on shutdown; an embedded worker, for example."""
        self.unready: list[Unready] = []
        """Each returns the reason why a part of the service is not ready, or None; for ``/readyz``."""
        self.on_stop: list[Callable[[], None]] = []
        """Called in the event loop when shutdown begins, before the server waits for open connections."""
        self.exposition = _exposition(self)
        """The metrics, if they are enabled and prometheus-client is installed."""
        self._open: Counter[str] = Counter()
        self._stopping = asyncio.Event()

    async def _read_queues(self) -> list[QueueReading]:
        return await self.app.client.queues()

    async def _diagnose(self) -> dict[str, Any]:
        found = await diagnose(self.app.connection)
        found.sort(key=lambda finding: WORST_FIRST.index(finding.level))
        return {"at": time.time(), "findings": [msgspec.to_builtins(finding) for finding in found]}

    # -- tasks ---------------------------------------------------------------------------------------------------

    def task(self, name: str) -> Task[..., Any]:
        """Find a task of the application by name."""
        task = self.app.registry.get(name)
        if task is None:
            self.app.load_tasks()
            task = self.app.registry.get(name)
        if task is None:
            raise Problem(422, f"is not a task of this application; see GET {self.prefix}/tasks", field="task")
        return task

    # -- deadlines -----------------------------------------------------------------------------------------------

    async def timed(self, work: Awaitable[T]) -> T:
        """Await a call of the store. Raises `TimeoutError` if it takes too long."""
        async with asyncio.timeout(self.settings.store_seconds):
            return await work

    # -- streams -------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether the service is shutting down."""
        return self._stopping.is_set()

    async def stopped(self) -> None:
        """Wait until the service shuts down."""
        await self._stopping.wait()

    def stop(self) -> None:
        """End all streams and long polls. The lifespan calls this; call it yourself in a mounted service whose lifespan
        does not run."""
        if not self._stopping.is_set():
            self._stopping.set()
            for call in self.on_stop:
                call()

    @property
    def open_streams(self) -> int:
        """The number of open streams and long polls."""
        return self._open.total()

    @contextmanager
    def stream(self, caller: Caller) -> Iterator[None]:
        """Count a stream of a caller. Raises a 429 problem beyond the limit."""
        if self._open[caller.id] >= self.settings.streams_per_caller or self._open.total() >= self.settings.streams:
            raise Problem(429, "too many open streams; close some, or try again later", retry_after=5)
        self._open[caller.id] += 1
        try:
            yield
        finally:
            self._open[caller.id] -= 1
            if not self._open[caller.id]:
                del self._open[caller.id]

    # -- lifespan ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Start and stop the service. If it is mounted, enter this in the lifespan of the host application."""
        self._stopping.clear()
        self.app.load_tasks()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.app.close)
            stack.callback(self.stop)
            if self.settings.signals:
                stack.enter_context(before_server(self.stop))
            await stack.enter_async_context(self.history.recording())
            for enter in self.lifespans:
                await stack.enter_async_context(enter())
            yield
            self.stop()


def _exposition(service: Service) -> Exposition | None:
    if not service.settings.metrics:
        return None
    try:
        from .exposition import Exposition
    except ModuleNotFoundError:
        return None
    return Exposition(service)
