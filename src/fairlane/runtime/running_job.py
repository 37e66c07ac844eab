"""The job a body runs for, found through a context variable: no context parameter, also in threads and children."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from ..errors import FairlaneError, NotSupported
from ..model import codec
from ..model.job import Claimed, Held, Priority
from ..model.names import ERROR_BYTES
from ..store.transactions import RunTransaction

Report = Callable[[Held, bytes], None]
"""Takes the latest progress of a job; called from whatever thread the body runs in."""
Lane = tuple[str, str]
"""A queue and a lane of it."""
_held_places: ContextVar[tuple[HeldPlace, ...]] = ContextVar("fairlane_held_places", default=())


class HeldPlace:
    """Marks a place of a lane as held by the code inside a ``with`` block and whatever it starts.

    A task that outlives the block has inherited the mark, so the mark itself says when it is over.
    """

    __slots__ = ("held", "lane")

    def __init__(self, queue: str, lane: str) -> None:
        self.lane = (queue, lane)
        self.held = False

    def __enter__(self) -> None:
        self.held = True
        _held_places.set((*(place for place in _held_places.get() if place.held), self))

    def __exit__(self, *_: object) -> None:
        self.held = False


class RunningJob:
    """The job whose body is running: what it may know about itself, and how it reports."""

    __slots__ = (
        *("_cancel_requested", "_claimed", "_deadline", "_error", "_place", "_report", "_told", "_transact"),
        "_transaction",
    )

    def __init__(
        self,
        claimed: Claimed,
        report: Report,
        deadline: float | None = None,
        transact: Callable[[], RunTransaction] | None = None,
    ) -> None:
        self._claimed = claimed
        self._report = report
        self._deadline = deadline
        self._transact = transact
        self._cancel_requested = False
        self._error: Exception | None = None
        self._transaction: RunTransaction | None = None
        self._told: bytes | None = None
        self._place = None if claimed.lane is None else HeldPlace(claimed.queue, claimed.lane)

    @property
    def id(self) -> str:
        """The job's id, the same for all its attempts."""
        return self._claimed.id

    @property
    def task(self) -> str:
        """The name of the task."""
        return self._claimed.task

    @property
    def queue(self) -> str:
        """The queue it came through."""
        return self._claimed.queue

    @property
    def lane(self) -> str | None:
        """Its lane, if it has one."""
        return self._claimed.lane

    @property
    def priority(self) -> Priority:
        """Its class."""
        return self._claimed.priority

    @property
    def sticky(self) -> str | None:
        """The key that bound it to this worker, if it has one."""
        return self._claimed.sticky

    @property
    def attempt(self) -> int:
        """Which charged run this is, 1 at first."""
        return self._claimed.attempt

    @property
    def retries(self) -> int:
        """How many more attempts than the first one it may use."""
        return self._claimed.retries

    @property
    def fence(self) -> int:
        """The number of this claim: it only ever grows, so an outside system can refuse an older one."""
        return self._claimed.fence

    @property
    def idempotency_key(self) -> str:
        """A key for outside systems that is the same for every attempt of this job."""
        return self._claimed.id

    @property
    def cancel_requested(self) -> bool:
        """Whether somebody asked to cancel it. A plain function in a thread must look here; others are stopped."""
        return self._cancel_requested

    @property
    def remaining(self) -> float | None:
        """Seconds until its timeout, None when it has none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def progress(self, value: Any) -> None:
        """Tell how far it is: anything JSON can hold. Never waits; of several reports in a row the last one counts."""
        self._told = codec.encode("progress", value, ERROR_BYTES)
        # Inside a transaction it is written with the commit: on a way of its own it could come after the end.
        if self._transaction is None:
            self._report(self._claimed.held, self._told)

    def transaction(self) -> Awaitable[Any]:
        """A connection to the store's database, inside a transaction that commits together with this job.

        When the body returns, the job is completed in that transaction and both are committed; when it raises, is
        stopped or has lost the job, all is rolled back. Asking again gives the same connection: on PostgreSQL one of
        asyncpg, on SQLite one of sqlite3. Raises `NotSupported` in a plain function, and for a store that has no
        transactions.
        """
        if self._transaction is None:
            if self._transact is None:
                raise NotSupported(
                    "current_job().transaction() is for a task that is a coroutine function, while its body runs: use "
                    "`async def`, or make the body repeatable, by its job's idempotency_key"
                )
            self._transaction = self._transact()
        return self._transaction.connection()

    def request_cancel(self) -> None:
        """Called by the worker when somebody asked to cancel the job."""
        self._cancel_requested = True

    def enter(self) -> None:
        """Called where the body begins: makes it the current job of this context, and of all that it starts."""
        _current.set(self)
        if self._place is not None:
            self._place.__enter__()

    def asked(self) -> RunTransaction | None:
        """Called where the body ends: the transaction that it asked for, which ends with it."""
        # What the body has started and left behind comes too late.
        self._transact = None
        if self._transaction is not None:
            self._transaction.progress = self._told
        return self._transaction

    def failed(self, exc: Exception) -> None:
        """Called where the body has raised, for the log."""
        self._error = exc

    def take_error(self) -> Exception | None:
        """Called by the worker, once: what the body raised. It is not kept, because its traceback leads back here."""
        error, self._error = self._error, None
        return error

    def rolled_back(self) -> None:
        """Called when there was no commit that what was reported last could have been written with."""
        if self._told is not None:
            self._report(self._claimed.held, self._told)

    def leave(self) -> None:
        """Called when the body has ended: what it has started and left behind holds no place of its lane."""
        if self._place is not None:
            self._place.held = False


_current: ContextVar[RunningJob | None] = ContextVar("fairlane_job", default=None)


def current_job() -> RunningJob:
    """The job that is running here. Outside of a job this is an error."""
    job = _current.get()
    if job is None:
        raise FairlaneError(
            "current_job() is called outside of a job: only a body that a worker runs has one "
            "(in tests, that the lab of fairlane.testing runs)"
        )
    return job


def current_job_or_none() -> RunningJob | None:
    """The job that is running here, None outside of one."""
    return _current.get()


def places_held(queue: str, lane: str | None) -> int:
    """How many places of a lane the code that runs here holds already, by its job and by its turns."""
    return sum(place.held and place.lane == (queue, lane) for place in _held_places.get())
