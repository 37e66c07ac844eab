"""The state of one HTTP service: application, settings, access, open streams, and lifespan."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from ..app import Fairlane
from ..task import Task
from .access import Access, Caller
from .problems import Problem
from .sampler import Sampler
from .settings import HttpSettings

if TYPE_CHECKING:
    from .exposition import Exposition

T = TypeVar("T")
Lifespan = Callable[[], AbstractAsyncContextManager[Any]]
Unready = Callable[[], str | None]


class Service:
    """The state that all operations of a service share."""

    prefix = "/api/v1"

    def __init__(self, app: Fairlane, settings: HttpSettings) -> None:
        self.app = app
        self.settings = settings
        self.access = Access(settings, app.client.tokens)
        self.sampler = Sampler(self)
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

    # -- tasks ---------------------------------------------------------------------------------------------------

    def task(self, name: str) -> Task[..., Any]:
        """Find a task of the application by name."""
        task = self.app.registry.get(name)
        if task is None:
            self.app.load_tasks()
            task = self.app.registry.get(name)
        if task is None:
            raise Problem(422, "is not a task of this application; see GET /tasks", field="task")
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
            stack.enter_context(self._signals())
            for enter in self.lifespans:
                await stack.enter_async_context(enter())
            yield
            self.stop()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """End streams on the signal that stops the server, which waits for connections before the lifespan ends."""
        if not self.settings.signals or threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        found: dict[signal.Signals, Any] = {}

        def chain(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.stop)
            previous = found[signal.Signals(number)]
            if callable(previous):
                previous(number, frame)

        for each in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(each)
            if callable(handler) and handler is not signal.default_int_handler:
                found[each] = handler
                signal.signal(each, chain)
        try:
            yield
        finally:
            for each, handler in found.items():
                if signal.getsignal(each) is chain:
                    signal.signal(each, handler)


def _exposition(service: Service) -> Exposition | None:
    if not service.settings.metrics:
        return None
    try:
        from .exposition import Exposition
    except ModuleNotFoundError:
        return None
    return Exposition(service)
