"""Jobs that commit with rows of the user's in the same file: `fairlane.store.transactions.Transactions` for this store.

While such a transaction is open nobody else writes the file, in no process: not even a lease is renewed. So those of
the store's own are open for a bounded time and then rolled back, by a thread that no event loop can hold up. That also
helps a body which waits for a call of the store that waits for the lock which the body holds.
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
from . import database, enqueue, finish
from .alarms import ALARMS, Alarm
from .file_lock import FileLock, Late
from .guarded_connection import GuardedConnection
from .queue_cache import Catalog
from .step import Step

T = TypeVar("T")
LONGEST_SECONDS = 5.0
"""How long a body's transaction may be open: well below the lease of a worker."""
LOOK_SECONDS = 1.0
SUPPORTED = "a store on SQLite takes part in the transaction of a sqlite3.Connection to its own file"


class SqliteTransactions:
    """What the embedded store has beyond the port."""

    def __init__(self, path: Path, clock: Clock, publish: Callable[[Iterable[str]], None]) -> None:
        self._path = path
        self._clock = clock
        self._publish = publish
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turn] = WeakKeyDictionary()

    async def prepare(self, jobs: Sequence[NewJob]) -> None:
        """Nothing: a queue that is new is made in the user's transaction, which keeps all others waiting anyway."""

    async def enqueue_on(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs on a connection of the user's. There is only the one kind, so asynchronous code uses it too."""
        return self.enqueue_here(connection, jobs)

    def enqueue_here(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs on a connection of the user's, in the transaction open there."""
        if not isinstance(connection, sqlite3.Connection):
            kind = type(connection)
            raise InvalidInput("connection", f"is a {kind.__module__}.{kind.__qualname__}; {SUPPORTED}")
        if not connection.in_transaction:
            raise InvalidInput("connection", "has no open transaction; begin one, or use enqueue")
        with _usual_forms(connection):
            [file] = [file for _, name, file in connection.execute("PRAGMA database_list") if name == "main"]
        if not file or Path(file).resolve() != self._path.resolve():
            raise InvalidInput("connection", f"leads to another file than the store's, {self._path}")
        with _usual_forms(connection), _all_or_none(connection):
            return enqueue.insert_arriving(Step(connection, Catalog(), self._clock), jobs)

    async def begin(self) -> BodyTransaction:
        """Begin a transaction on a connection of the store's own, once nobody else writes."""
        loop = asyncio.get_running_loop()
        # One of this event loop at a time: the others would only be threads that wait.
        turn = self._turns.get(loop)
        if turn is None:
            turn = self._turns[loop] = Turn(loop)
        await turn.take()
        late: asyncio.Future[Any] = loop.create_future()
        beginning = _in_thread(lambda: self._begin(turn, partial(turn.tell_late, late)), BodyTransaction.end)
        try:
            await asyncio.wait([beginning, late], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            beginning.add_done_callback(partial(_abandon, turn))
            raise
        if not beginning.done():
            beginning.add_done_callback(partial(_abandon, turn))
            raise late.result()
        try:
            return beginning.result()
        except BaseException:
            turn.pass_on()
            raise

    def _begin(self, turn: Turn, late: Late) -> BodyTransaction:
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
        opened = BodyTransaction(self._path, lock, connection, self._clock, self._publish, turn)
        try:
            with database.translated(self._path):
                connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            opened.end()
            raise
        # Not by the event loop, which may be blocked already.
        opened.watch()
        return opened


class Turn:
    """Lets the bodies of one event loop have their transactions one after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free = asyncio.Semaphore()
        self._late: StoreUnavailable | None = None
        """Why the one that has the turn did not get the lock in time, as long as it has not."""

    async def take(self) -> None:
        """Wait for the turn. Raises what the one before was told, when that waits for the lock for too long."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._free.acquire()
                    return
            if self._late is not None:
                raise self._late

    def pass_on(self) -> None:
        """Let the next one begin."""
        self._late = None
        self._free.release()

    def tell_late(self, told: asyncio.Future[Any], error: StoreUnavailable) -> None:
        """Called in another thread: the lock is not free in time."""
        self.on_the_loop(partial(self._set_late, told, error))

    def _set_late(self, told: asyncio.Future[Any], error: StoreUnavailable) -> None:
        self._late = error
        if not told.done():
            told.set_result(error)

    def on_the_loop(self, call: Callable[[], None]) -> None:
        """Call something in the event loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits there
            self._loop.call_soon_threadsafe(call)


class BodyTransaction:
    """A transaction in which a body writes, and in which its job is completed."""

    def __init__(
        self,
        path: Path,
        lock: FileLock,
        connection: GuardedConnection,
        clock: Clock,
        publish: Callable[[Iterable[str]], None],
        turn: Turn,
    ) -> None:
        self._path = path
        self._lock = lock
        self._clock = clock
        self._publish = publish
        self._alarm: Alarm | None = None
        self._turn: Turn | None = turn
        self._ended = False
        self._pid = os.getpid()
        self.connection = connection
        self.broken: FairlaneError | None = None

    def watch(self) -> None:
        """From now on it is the body's, until its time is over."""
        self._alarm = ALARMS.set(LONGEST_SECONDS, self._time_is_over)

    async def commit(self, session: str, transition: Transition, progress: bytes | None) -> bool:
        """Write how the job ends, and commit; False when the claim was lost."""
        self._stop_watch()
        try:
            return await _in_thread(lambda: self._commit(session, transition, progress))
        finally:
            self.pass_on()

    def _commit(self, session: str, transition: Transition, progress: bytes | None) -> bool:
        connection = self.connection
        try:
            with connection.alone(), database.translated(self._path):
                if self.broken is not None:
                    raise self.broken
                if not connection.in_transaction:
                    raise FairlaneError(
                        "the transaction of the job was ended inside its body: do not commit or roll back there; it is "
                        "committed when the body returns, and rolled back when it raises"
                    )
                with _usual_forms(connection):
                    step = Step(connection, Catalog(), self._clock)
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
        """Undo everything."""
        self._stop_watch()
        await _in_thread(self.end)
        self.pass_on()

    def end(self) -> None:
        """Let go of the connection, which rolls back what is not committed, and then of the lock."""
        if self._pid != os.getpid():
            return  # the transaction is the parent's, whatever unwinds in a fork
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

    def pass_on(self) -> None:
        """Let the next of this event loop begin. Called there."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.pass_on()

    def _time_is_over(self) -> None:
        # In a thread of its own: a statement that does not heed its interruption would hold up other alarms.
        threading.Thread(target=self._expire, name="fairlane-transaction", daemon=True).start()

    def _expire(self) -> None:
        with self.connection.alone():
            if self._ended:
                return
            self.broken = StoreUnavailable(
                f"the transaction of the job was open for more than {LONGEST_SECONDS:g} s and was rolled back, because "
                "nobody else can write the file meanwhile. Ask for it last, and call nothing of the store before the "
                "body returns: such a call waits for the transaction. Store jobs in it, with "
                "app.enqueue_on(connection, …)."
            )
            self.end()
        turn = self._turn
        if turn is not None:
            turn.on_the_loop(self.pass_on)


@contextmanager
def _usual_forms(connection: sqlite3.Connection) -> Iterator[None]:
    """Rows as we know them: the user may have chosen other forms for his own."""
    chosen = connection.row_factory, connection.text_factory
    connection.row_factory, connection.text_factory = None, str
    try:
        yield
    finally:
        connection.row_factory, connection.text_factory = chosen


@contextmanager
def _all_or_none(connection: sqlite3.Connection) -> Iterator[None]:
    """What is refused leaves the user's transaction as it was."""
    connection.execute("SAVEPOINT fairlane_arriving")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK TO fairlane_arriving")
        raise
    finally:
        connection.execute("RELEASE fairlane_arriving")


def _abandon(turn: Turn, begun: asyncio.Future[BodyTransaction]) -> None:
    """Nobody waits for it any more."""
    if begun.cancelled() or begun.exception() is not None:
        turn.pass_on()
    else:
        begun.result().end()
        begun.result().pass_on()


def _in_thread(work: Callable[[], T], unheard: Callable[[T], object] = lambda _: None) -> asyncio.Future[T]:
    """Do something in a thread of its own: in a pool it could have to wait for those who wait for it.

    `unheard` is given the answer when the event loop is closed by then, and nobody is left to be told.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(call: Callable[[], None]) -> None:
        if not future.done():
            call()

    def run() -> None:
        try:
            answer = work()
        except BaseException as exc:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, partial(future.set_exception, exc))
            return
        try:
            loop.call_soon_threadsafe(tell, partial(future.set_result, answer))
        except RuntimeError:
            unheard(answer)

    threading.Thread(target=run, name="fairlane-transaction", daemon=True).start()
    return future
