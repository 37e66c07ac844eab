"""What happens in this process, as it happens: typed records, and the listeners that receive them.

`fairlane.store.instrumented` emits them, once for every call at the port and for what its answer contains; metrics,
traces and streams subscribe here. Events are news, not the truth: they report what *this* process did, none is stored,
and a call whose answer was lost emits nothing but its `Called`. They carry names and numbers, never a payload, a result
or the text of an error. Everything here may be used from any thread, except that a stream is read in the event loop it
was made in.
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
    """Anything that happened. Encoded as JSON, `type` names which of the classes below it is."""


class Called(Event, frozen=True, gc=False):
    """A verb of the store was called, and answered or raised."""

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
    """Seconds for which it had waited, of the first start of a job only."""


class Finished(Event, frozen=True, gc=False):
    """The store accepted how a run of a job ended. The job itself is over only if `state` is final."""

    id: str
    task: str | None
    """None, as `queue` and `seconds` are, when nobody listened as it started; for turns always."""
    queue: str | None
    fence: int
    session: str
    state: JobState
    outcome: Move
    seconds: float | None
    """From the answer to the claim until the answer to this write."""
    reason: Reason | None
    error_group: str | None


class Refused(Event, frozen=True, gc=False):
    """A session wrote about a job that it had lost; nothing was changed."""

    id: str
    fence: int
    session: str
    verb: str


class CancelRequested(Event, frozen=True, gc=False):
    """Somebody asked to cancel a job, which is in `state` by it."""

    id: str
    state: JobState


class Released(Event, frozen=True, gc=False):
    """Somebody asked to release a sticky key."""

    pool: str
    key: str
    answer: Release


class Passed(Event, frozen=True):
    """A pass of the leader's came to its end, having done what `answer` counts; mostly that is nothing."""

    verb: str
    answer: Promoted | Admitted | Rescued | Pruned


class SessionRegistered(Event, frozen=True, gc=False):
    """A session of this process is known to the store."""

    session: str
    kind: SessionKind
    worker: str | None
    """``pool/index``; None for whoever is not a worker."""


class SessionLeft(Event, frozen=True, gc=False):
    """A session ended in good order."""

    session: str


class Led(Event, frozen=True, gc=False):
    """A session of this process was elected."""

    session: str
    term: int


class Resigned(Event, frozen=True, gc=False):
    """A leader gave its term up."""

    term: int


class Lost(Event, frozen=True, gc=False):
    """A reader of a stream was too slow: this many events before the next one are gone."""

    count: int


Listener = Callable[[Event], None]


class _Subscriber:
    """A listener, and whether it has been complained about."""

    __slots__ = ("failed", "listener")

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.failed = False


class Events:
    """Brings what happens to whoever listens. `active` tells whether anybody does: nobody, and nothing is made."""

    __slots__ = ("_lock", "_subscribers", "active")

    def __init__(self) -> None:
        self.active = False
        self._lock = threading.Lock()
        # Replaced, never changed: whoever emits goes through it without the lock.
        self._subscribers: tuple[_Subscriber, ...] = ()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every event from now on, in the thread where it happens; answers how to stop that.

        It is called inside the call that it hears of, so it must be quick and must not wait. If it raises, that is
        logged the first time and disturbs nobody.
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
        """Tell everybody who listens."""
        for subscriber in self._subscribers:
            try:
                subscriber.listener(event)
            except Exception:
                if not subscriber.failed:
                    subscriber.failed = True
                    log.exception(
                        "a listener raised at %s; it will be called again, and further errors of it stay silent: %r",
                        type(event).__name__,
                        subscriber.listener,
                    )

    def stream(self, kept: int = KEPT_FOR_A_READER) -> EventStream:
        """The events from now on, for ``async with events.stream() as stream: async for event in stream``.

        At most `kept` wait for the reader: a slow one loses the oldest, and a `Lost` in their place says how many.
        """
        return EventStream(self, kept)


class EventStream:
    """The events since it was entered, for one reader. It ends when it is left."""

    def __init__(self, events: Events, kept: int) -> None:
        self._events = events
        self._kept = max(1, kept)
        self._lock = threading.Lock()
        self._waiting: deque[Event] = deque()
        self._lost = 0
        self._open = False
        # Whether the reader waits to be woken: waking the loop for every event would cost more than the event.
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
                # The loop was closed under its reader: nobody is left to be woken, and whoever emits must not suffer.
                self._unsubscribe()


class Tracer(Protocol):
    """Follows jobs from the process that enqueues them to the one that runs them.

    `fairlane.integrations.opentelemetry` provides one.
    """

    def headers(self, task: str, queue: str) -> AbstractContextManager[dict[str, str] | None]:
        """Stands around an enqueue. What it yields belongs into the job's `headers`, as JSON; None adds nothing."""

    def run(self, claimed: Claimed) -> AbstractContextManager[Callable[[Transition], None]]:
        """Stands around one run of a job, entered and left in one task. It yields what to call with the decision
        that the run came to: a worker turns exceptions, timeouts and crashes into one before they could pass here.
        """
