"""The job that is running, found through a context variable, also in threads and child processes."""

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
"""Records the latest progress of a job; called in the thread that runs the job."""
Lane = tuple[str, str]
"""A queue and a lane of it."""
_held_places: ContextVar[tuple[HeldPlace, ...]] = ContextVar("fairlane_held_places", default=())


class HeldPlace:
    """Marks a place of a lane as held by the code inside a ``with`` block, including asyncio tasks that it starts.

    A task that outlives the block has inherited the object, so the object itself records the end.
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
    """The running job: its own properties, its progress and its transaction."""

    __slots__ = (
        *("_cancel_requested", "_claimed", "_deadline", "_error", "_place", "_progress", "_report", "_transact"),
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
        self._progress: bytes | None = None
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
        """Its queue."""
        return self._claimed.queue

    @property
    def lane(self) -> str | None:
        """Its lane, if it has one."""
        return self._claimed.lane

    @property
    def priority(self) -> Priority:
        """Its priority."""
        return self._claimed.priority

    @property
    def sticky(self) -> str | None:
        """The key that bound it to this worker, if it has one."""
        return self._claimed.sticky

    @property
    def attempt(self) -> int:
        """The number of this attempt, starting at 1."""
        return self._claimed.attempt

    @property
    def retries(self) -> int:
        """How many attempts it may use after the first one."""
        return self._claimed.retries

    @property
    def fence(self) -> int:
        """The number of this claim. It only grows, so an outside system can reject an older one."""
        return self._claimed.fence

    @property
    def idempotency_key(self) -> str:
        """A key for outside systems that is the same for every attempt of this job."""
        return self._claimed.id

    @property
    def cancel_requested(self) -> bool:
        """Whether the job was cancelled. A plain function in a thread must check this; other functions are stopped."""
        return self._cancel_requested

    @property
    def remaining(self) -> float | None:
        """Seconds until its timeout, None when it has none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def progress(self, value: Any) -> None:
        """Report progress: any JSON value. Never waits; of several reports in a row, only the last one is stored."""
        self._progress = codec.encode("progress", value, ERROR_BYTES)
        # In a transaction it is written with the commit: written separately, it could arrive after the job's end.
        if self._transaction is None:
            self._report(self._claimed.held, self._progress)

    def transaction(self) -> Awaitable[Any]:
        """A connection to the store's database, inside a transaction that commits together with this job.

        When the function returns, the job is completed in that transaction, which is then committed; when it raises, is
        stopped or has lost the job, everything is rolled back. Another call returns the same connection: on PostgreSQL
        one of asyncpg, on SQLite one of sqlite3. Raises `NotSupported` in a plain function, and for a store that has no
        transactions.
        """
        if self._transaction is None:
            if self._transact is None:
                raise NotSupported(
                    "current_job().transaction() is for coroutine functions, while they run: use `async def`, or make "
                    "the function repeatable, with the job's idempotency_key"
                )
            self._transaction = self._transact()
        return self._transaction.connection()

    def request_cancel(self) -> None:
        """Called by the worker when the job was cancelled."""
        self._cancel_requested = True

    def enter(self) -> None:
        """Called when the function begins: makes this the current job of its context and of the tasks it starts."""
        _current.set(self)
        if self._place is not None:
            self._place.__enter__()

    def asked(self) -> RunTransaction | None:
        """Called when the function ends: the transaction that it opened, which ends with it."""
        # Asyncio tasks that the function has left behind cannot open one any more.
        self._transact = None
        if self._transaction is not None:
            self._transaction.progress = self._progress
        return self._transaction

    def failed(self, exc: Exception) -> None:
        """Called when the function has raised; the exception is for the log."""
        self._error = exc

    def take_error(self) -> Exception | None:
        """Called by the worker, once: what the function raised. It is not kept: its traceback refers to this object."""
        error, self._error = self._error, None
        return error

    def rolled_back(self) -> None:
        """Called after a rollback: reports the last progress, which a commit would have written."""
        if self._progress is not None:
            self._report(self._claimed.held, self._progress)

    def leave(self) -> None:
        """Called when the function has ended: tasks that it has left behind hold no place of its lane."""
        if self._place is not None:
            self._place.held = False


_current: ContextVar[RunningJob | None] = ContextVar("fairlane_job", default=None)


def current_job() -> RunningJob:
    """The job that is running here. Raises `FairlaneError` outside of a job."""
    job = _current.get()
    if job is None:
        raise FairlaneError(
            "current_job() was called outside of a job: it works in task functions that a worker runs "
            "(in tests, that the lab of fairlane.testing runs)"
        )
    return job


def current_job_or_none() -> RunningJob | None:
    """The job that is running here, None outside of a job."""
    return _current.get()


def places_held(queue: str, lane: str | None) -> int:
    """How many places of a lane the code that runs here holds already, by its job and by its turns."""
    return sum(place.held and place.lane == (queue, lane) for place in _held_places.get())
