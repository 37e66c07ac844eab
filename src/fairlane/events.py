"""Events of this process: typed records, and the listeners that receive them.

`fairlane.store.instrumented` emits them, once for every call of the store and for what its result contains; metrics,
traces and streams subscribe here. Events are not a log of record: they report what *this* process did, they are not
stored, and a call whose reply was lost emits only its `Called`. They contain names and numbers, never a payload, a
result or the text of an error. Everything here is thread-safe, except that a stream is read in the event loop it was
created in.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import msgspec

from .model.binding import Release
from .model.job import Claimed, JobState, Priority, Reason
from .model.maintenance import Admitted, Promoted, Pruned, Rescued
from .model.session import SessionKind
from .model.states import Move, Transition

log = logging.getLogger(__name__)

KEPT_FOR_A_READER = 1_000


class Event(msgspec.Struct, frozen=True, tag=True):
    """The base class of all events. Encoded as JSON, `type` names the class."""


class Called(Event, frozen=True, gc=False):
    """A verb of the store was called and returned or raised."""

    verb: str
    seconds: float
    error: str | None
    """The name of the exception's class."""


class Enqueued(Event, frozen=True, gc=False):
    """A request for a job was accepted. `created` is False when the job existed already."""

    id: str
    task: str
    queue: str
    lane: str | None
    priority: Priority
    created: bool


class Started(Event, frozen=True, gc=False):
    """A session claimed a job."""

    id: str
    task: str
    queue: str
    lane: str | None
    priority: Priority
    attempt: int
    fence: int
    session: str
    waited: float | None = None
    """Seconds for which it had waited; only for the first start of a job."""


class Finished(Event, frozen=True, gc=False):
    """The store accepted the end of a run. The job itself has ended only if `state` is final."""

    id: str
    task: str | None
    """None, like `queue` and `seconds`, if there was no listener when it started; always None for turns."""
    queue: str | None
    fence: int
    session: str
    state: JobState
    outcome: Move
    seconds: float | None
    """From the reply to the claim until the reply to this write."""
    reason: Reason | None
    error_group: str | None


class Refused(Event, frozen=True, gc=False):
    """A write of a session was stale: it had lost the job. Nothing was changed."""

    id: str
    fence: int
    session: str
    verb: str


class CancelRequested(Event, frozen=True, gc=False):
    """A cancel of a job was requested; the job is in `state` after it."""

    id: str
    state: JobState


class Released(Event, frozen=True, gc=False):
    """The release of a sticky key was requested."""

    pool: str
    key: str
    answer: Release


class Passed(Event, frozen=True):
    """A pass of the leader ended; `answer` counts what it did, which is often nothing."""

    verb: str
    answer: Promoted | Admitted | Rescued | Pruned


class SessionRegistered(Event, frozen=True, gc=False):
    """A session of this process was registered."""

    session: str
    kind: SessionKind
    worker: str | None
    """``pool/index``; None for a session that is not a worker."""


class SessionLeft(Event, frozen=True, gc=False):
    """A session of this process ended normally."""

    session: str


class Led(Event, frozen=True, gc=False):
    """A session of this process was elected."""

    session: str
    term: int


class Resigned(Event, frozen=True, gc=False):
    """A leader resigned."""

    term: int


class Lost(Event, frozen=True, gc=False):
    """The reader of a stream was too slow: this many events before the next one were dropped."""

    count: int


Listener = Callable[[Event], None]


class _Subscriber:
    """A listener, and whether an error of it was logged."""

    __slots__ = ("failed", "listener")

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.failed = False


class Events:
    """Delivers events to listeners. `active` is False while there are none: then no events are created."""

    __slots__ = ("_lock", "_subscribers", "active")

    def __init__(self) -> None:
        self.active = False
        self._lock = threading.Lock()
        # Replaced, never mutated: `emit` iterates over it without the lock.
        self._subscribers: tuple[_Subscriber, ...] = ()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every event from now on, in the thread that emits it. Returns a function to unsubscribe.

        It is called inside the call that emits the event, so it must be fast and must not block. If it raises, the
        error is logged the first time and does not affect the call.
        """
        subscriber = _Subscriber(listener)
        with self._lock:
            self._subscribers = (*self._subscribers, subscriber)
            self.active = True

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)
                self.active = bool(self._subscribers)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Deliver an event to all listeners."""
        for subscriber in self._subscribers:
            try:
                subscriber.listener(event)
            except Exception:
                if not subscriber.failed:
                    subscriber.failed = True
                    log.exception(
                        "an event listener raised on %s; it stays subscribed, but further errors are not logged: %r",
                        type(event).__name__,
                        subscriber.listener,
                    )

    def stream(self, kept: int = KEPT_FOR_A_READER) -> EventStream:
        """The events from now on, for ``async with events.stream() as stream: async for event in stream``.

        At most `kept` events are buffered: for a slow reader the oldest are dropped, and a `Lost` in their place counts
        them.
        """
        return EventStream(self, kept)


class EventStream:
    """The events since it was entered, for one reader. It ends when it is exited."""

    def __init__(self, events: Events, kept: int) -> None:
        self._events = events
        self._kept = max(1, kept)
        self._lock = threading.Lock()
        self._waiting: deque[Event] = deque()
        self._lost = 0
        self._open = False
        # Whether the reader is waiting: waking the loop for every event would cost more than the event.
        self._asleep = False
        self._news = asyncio.Event()

    async def __aenter__(self) -> EventStream:
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._unsubscribe = self._events.subscribe(self._take)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._unsubscribe()
        with self._lock:
            self._open = False
        self._news.set()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._lock:
                if not self._open:
                    raise StopAsyncIteration
                if self._lost:
                    count, self._lost = self._lost, 0
                    return Lost(count)
                if self._waiting:
                    return self._waiting.popleft()
                self._news.clear()
                self._asleep = True
            await self._news.wait()

    def _take(self, event: Event) -> None:
        with self._lock:
            if len(self._waiting) == self._kept:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(event)
            wake, self._asleep = self._asleep, False
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._news.set)
            except RuntimeError:
                # The reader's loop is closed: there is no reader left, and the emitting call must not fail.
                self._unsubscribe()


class Tracer(Protocol):
    """Follows jobs from the process that enqueues them to the one that runs them.

    `fairlane.integrations.opentelemetry` provides one.
    """

    def headers(self, task: str, queue: str) -> AbstractContextManager[dict[str, str] | None]:
        """Wraps an enqueue. The value it yields is stored as JSON in the job's `headers`; None adds nothing."""

    def run(self, claimed: Claimed) -> AbstractContextManager[Callable[[Transition], None]]:
        """Wraps one run of a job, entered and exited in one task. It yields a function to call with the transition that
        ends the run: the worker turns exceptions, timeouts and crashes into transitions before they reach this.
        """
