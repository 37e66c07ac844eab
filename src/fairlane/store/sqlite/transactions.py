"""Jobs that commit with the user's rows in the same file: `fairlane.store.transactions.Transactions` for this store.

While such a transaction is open no other process or thread can write the file, not even to renew a lease. So
transactions that the store opens have a time limit, after which a thread that no event loop can block rolls them back.
This also ends the deadlock of a job that, inside its transaction, awaits a store call that needs the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ...errors import FairlaneError, InvalidInput, StoreUnavailable
from ...model.job import Enqueued, NewJob
from ...model.states import Transition
from ..clock import Clock
from ..transactions import OtherDatabase
from . import database, enqueue, finish
from .alarms import ALARMS, Alarm
from .file_lock import FileLock, Late
from .guarded_connection import GuardedConnection
from .records import QueueCache
from .step import Step

T = TypeVar("T")
LONGEST_SECONDS = 5.0
"""How long the transaction of a job may be open: well below the lease of a worker."""
POLL_SECONDS = 1.0
SUPPORTED = "a store on SQLite takes part in the transaction of a sqlite3.Connection or of Django, to its own file"
DJANGO = {("django", "BaseDatabaseWrapper"), ("django", "ConnectionProxy")}
"""The classes of Django's connections, by package and name."""


class SqliteTransactions:
    """The transactions of a SQLite store."""

    def __init__(self, path: Path, clock: Clock, publish: Callable[[Iterable[str]], None]) -> None:
        self._path = path
        self._clock = clock
        self._publish = publish
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, TransactionQueue] = WeakKeyDictionary()

    async def prepare(self, jobs: Sequence[NewJob]) -> None:
        """Do nothing: a new queue is created in the user's transaction, which blocks all other writers anyway."""

    async def enqueue_on(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs on a user's connection. There is no asynchronous kind of connection, so this does not await."""
        return self.enqueue_here(connection, jobs)

    def enqueue_here(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs in the open transaction of a user's connection."""
        with _unwrapped(connection) as own:
            if not own.in_transaction:
                raise InvalidInput("connection", "has no open transaction; begin one, or use enqueue")
            with _default_factories(own):
                [file] = [file for _, name, file in own.execute("PRAGMA database_list") if name == "main"]
            if not file or Path(file).resolve() != self._path.resolve():
                raise OtherDatabase("connection", f"is open on another file than the store's, {self._path}")
            with _default_factories(own), _all_or_none(own):
                return enqueue.insert_arriving(Step(own, QueueCache(), self._clock), jobs)

    async def begin(self) -> BodyTransaction:
        """Begin a transaction on a connection of the store, once the file lock is free."""
        loop = asyncio.get_running_loop()
        # One at a time for each event loop: the others would only be waiting threads.
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues[loop] = TransactionQueue(loop)
        await queue.acquire()
        late: asyncio.Future[Any] = loop.create_future()
        beginning = _in_thread(lambda: self._begin(queue, partial(queue.report_late, late)), BodyTransaction.end)
        try:
            await asyncio.wait([beginning, late], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            beginning.add_done_callback(partial(_abandon, queue))
            raise
        if not beginning.done():
            beginning.add_done_callback(partial(_abandon, queue))
            raise late.result()
        try:
            return beginning.result()
        except BaseException:
            queue.release()
            raise

    def _begin(self, queue: TransactionQueue, late: Late) -> BodyTransaction:
        lock = FileLock.of(self._path)
        try:
            lock.acquire(late)
        except BaseException:
            lock.close()
            raise
        try:
            connection = database.open_for_writing(self._path, GuardedConnection)
        except BaseException:
            lock.release()
            lock.close()
            raise
        assert isinstance(connection, GuardedConnection)
        opened = BodyTransaction(self._path, lock, connection, self._clock, self._publish, queue)
        try:
            with database.translated(self._path):
                connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            opened.end()
            raise
        # Not in the event loop, which may already be blocked.
        opened.watch()
        return opened


class TransactionQueue:
    """Runs the transactions of the jobs of one event loop one after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free = asyncio.Semaphore()
        self._late: StoreUnavailable | None = None
        """The error of the transaction that is first in the queue, while it waits for the lock for too long."""

    async def acquire(self) -> None:
        """Wait to be first. Raises `StoreUnavailable` if the present first waits for the lock for too long."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._free.acquire()
                    return
            if self._late is not None:
                raise self._late

    def release(self) -> None:
        """Let the next transaction begin."""
        self._late = None
        self._free.release()

    def report_late(self, late: asyncio.Future[Any], error: StoreUnavailable) -> None:
        """Report that the lock is not free in time. Called in another thread."""
        self.call_in_loop(partial(self._set_late, late, error))

    def _set_late(self, late: asyncio.Future[Any], error: StoreUnavailable) -> None:
        self._late = error
        if not late.done():
            late.set_result(error)

    def call_in_loop(self, call: Callable[[], None]) -> None:
        """Call a function in the event loop. May be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits in it
            self._loop.call_soon_threadsafe(call)


class BodyTransaction:
    """A transaction in which a task function writes and its job is completed."""

    def __init__(
        self,
        path: Path,
        lock: FileLock,
        connection: GuardedConnection,
        clock: Clock,
        publish: Callable[[Iterable[str]], None],
        queue: TransactionQueue,
    ) -> None:
        self._path = path
        self._lock = lock
        self._clock = clock
        self._publish = publish
        self._alarm: Alarm | None = None
        self._queue: TransactionQueue | None = queue
        self._ended = False
        self._pid = os.getpid()
        self.connection = connection
        self.broken: FairlaneError | None = None

    def watch(self) -> None:
        """Start the time limit, when the transaction is handed to the task function."""
        self._alarm = ALARMS.set(LONGEST_SECONDS, self._time_is_over)

    async def commit(self, session: str, transition: Transition, progress: bytes | None) -> bool:
        """Write the result of the job and commit; False if the claim was lost."""
        self._stop_watch()
        try:
            return await _in_thread(lambda: self._commit(session, transition, progress))
        finally:
            self.leave_queue()

    def _commit(self, session: str, transition: Transition, progress: bytes | None) -> bool:
        connection = self.connection
        try:
            with connection.alone(), database.translated(self._path):
                if self.broken is not None:
                    raise self.broken
                if not connection.in_transaction:
                    raise FairlaneError(
                        "the transaction of the job was ended inside its task function: do not commit or roll back "
                        "there; it is committed when the function returns, and rolled back when it raises"
                    )
                with _default_factories(connection):
                    step = Step(connection, QueueCache(), self._clock)
                    if progress is not None:
                        finish.progress(step, session, [(transition.held, progress)])
                    [verdict] = finish.finish(step, session, [transition])
                    if not verdict.accepted:
                        return False
                    step.flush()
                connection.execute("COMMIT")
        finally:
            self.end()
        self._publish(step.topics)
        return True

    async def roll_back(self) -> None:
        """Roll back."""
        self._stop_watch()
        await _in_thread(self.end)
        self.leave_queue()

    def end(self) -> None:
        """Close the connection, which rolls back what is not committed, and release the lock."""
        if self._pid != os.getpid():
            return  # in the child of a fork: the transaction belongs to the parent
        self._stop_watch()
        with self.connection.alone():
            if self._ended:
                return
            self._ended = True
            with contextlib.suppress(sqlite3.Error):
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
            self.connection.refuse(self.broken or FairlaneError("the transaction of the job has ended"))
            with contextlib.suppress(sqlite3.Error):
                self.connection.close()
        self._lock.release()
        self._lock.close()

    def _stop_watch(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def leave_queue(self) -> None:
        """Let the next transaction of this event loop begin. Called in the event loop."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.release()

    def _time_is_over(self) -> None:
        # In its own thread: a statement that cannot be interrupted would delay other alarms.
        threading.Thread(target=self._expire, name="fairlane-transaction", daemon=True).start()

    def _expire(self) -> None:
        with self.connection.alone():
            if self._ended:
                return
            self.broken = StoreUnavailable(
                f"the transaction of the job was open for more than {LONGEST_SECONDS:g} s and was rolled back, because "
                "it blocks all other writers of the file. Request it as late as possible, and do not call the store "
                "before the function returns: such a call waits for the transaction. Store jobs inside it with "
                "app.enqueue_on(connection, …)."
            )
            self.end()
        queue = self._queue
        if queue is not None:
            queue.call_in_loop(self.leave_queue)


@contextmanager
def _unwrapped(connection: Any) -> Iterator[sqlite3.Connection]:
    """The sqlite3 connection of what the user has: that itself, or Django's, which is recognised by its names."""
    if isinstance(connection, sqlite3.Connection):
        yield connection
        return
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(connection).__mro__}
    if not kinds & DJANGO or connection.vendor != "sqlite":
        kind = type(connection)
        raise OtherDatabase("connection", f"is a {kind.__module__}.{kind.__qualname__}; {SUPPORTED}")
    connection.validate_no_broken_transaction()
    # Django connects when a cursor is requested, checks there that this is its thread, and raises errors as its own.
    with connection.wrap_database_errors, connection.cursor() as cursor:
        yield cursor.connection


@contextmanager
def _default_factories(connection: sqlite3.Connection) -> Iterator[None]:
    """Use the default row and text factories: the user may have set others on the connection."""
    chosen = connection.row_factory, connection.text_factory
    connection.row_factory, connection.text_factory = None, str
    try:
        yield
    finally:
        connection.row_factory, connection.text_factory = chosen


@contextmanager
def _all_or_none(connection: sqlite3.Connection) -> Iterator[None]:
    """Leave the user's transaction unchanged if the jobs are rejected."""
    connection.execute("SAVEPOINT fairlane_arriving")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK TO fairlane_arriving")
        raise
    finally:
        connection.execute("RELEASE fairlane_arriving")


def _abandon(queue: TransactionQueue, begun: asyncio.Future[BodyTransaction]) -> None:
    """End a transaction whose caller was cancelled or timed out."""
    if begun.cancelled() or begun.exception() is not None:
        queue.release()
    else:
        begun.result().end()
        begun.result().leave_queue()


def _in_thread(work: Callable[[], T], unclaimed: Callable[[T], object] = lambda _: None) -> asyncio.Future[T]:
    """Run `work` in its own thread: in a pool it could wait behind work that waits for it.

    `unclaimed` gets the result if the event loop is closed by then.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(call: Callable[[], None]) -> None:
        if not future.done():
            call()

    def run() -> None:
        try:
            answer = work()
        except BaseException as exc:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve, partial(future.set_exception, exc))
            return
        try:
            loop.call_soon_threadsafe(resolve, partial(future.set_result, answer))
        except RuntimeError:
            unclaimed(answer)

    threading.Thread(target=run, name="fairlane-transaction", daemon=True).start()
    return future
