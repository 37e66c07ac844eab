"""Jobs that commit with rows of the user's in the same file: `fairlane.transactions.Transactions` for this store.

While such a transaction is open nobody else writes the file, in no process: not even a lease is renewed. So those of
the store's own are open for a bounded time and then rolled back, whoever holds them up. That also helps a body which
waits for a call of the store that waits for the lock which the body holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

from ...clock import Clock
from ...errors import FairlaneError, InvalidInput, StoreUnavailable
from ...job import Enqueued, NewJob
from ...states import Transition
from . import database
from .steps import admission, report
from .steps.catalog import Catalog
from .steps.step import Step

T = TypeVar("T")
LONGEST_SECONDS = 5.0
"""How long a body's transaction may be open: well below the lease of a worker."""
SUPPORTED = "a store on SQLite takes part in the transaction of a sqlite3.Connection to its own file"


class SqliteTransactions:
    """What the embedded store has beyond the port."""

    def __init__(self, path: Path, clock: Clock, publish: Callable[[Iterable[str]], None]) -> None:
        self._path = path
        self._clock = clock
        self._publish = publish
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

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
            return admission.insert_arriving(Step(connection, Catalog(), self._clock), jobs)

    async def begin(self) -> BodyTransaction:
        """Begin a transaction on a connection of the store's own, once nobody else writes."""
        loop = asyncio.get_running_loop()
        # One of this event loop at a time: the others would only be threads that wait.
        turn = self._turns.setdefault(loop, asyncio.Semaphore())
        await turn.acquire()
        beginning = _in_thread(self._begin, BodyTransaction.end)
        try:
            opened = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(lambda begun: _abandon(begun, turn))
            raise
        except BaseException:
            turn.release()
            raise
        opened.begin(loop, turn)
        return opened

    def _begin(self) -> BodyTransaction:
        lock = database.FileLock(self._path.with_name(self._path.name + "-lock"))
        try:
            lock.__enter__()
            connection = database.open_for_writing(self._path)
        except BaseException:
            lock.close()
            raise
        opened = BodyTransaction(self._path, lock, connection, self._clock, self._publish)
        try:
            with database.translated(self._path):
                connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            opened.end()
            raise
        return opened


class BodyTransaction:
    """A transaction in which a body writes, and in which its job is completed."""

    def __init__(
        self,
        path: Path,
        lock: database.FileLock,
        connection: sqlite3.Connection,
        clock: Clock,
        publish: Callable[[Iterable[str]], None],
    ) -> None:
        self._path = path
        self._lock = lock
        self._clock = clock
        self._publish = publish
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Semaphore | None = None
        self._ended = False
        self.connection = connection
        self.broken: FairlaneError | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, turn: asyncio.Semaphore) -> None:
        """From now on it is the body's, until its time is over; `turn` is passed on at the end."""
        self._turn = turn
        self._timer = loop.call_later(LONGEST_SECONDS, self._expire)

    async def commit(self, session: str, transition: Transition, progress: bytes | None) -> bool:
        """Write how the job ends, and commit; False when the claim was lost."""
        self._stop_watch()
        if self.broken is not None:
            raise self.broken
        try:
            return await _in_thread(lambda: self._commit(session, transition, progress))
        finally:
            self._pass_on()

    def _commit(self, session: str, transition: Transition, progress: bytes | None) -> bool:
        connection = self.connection
        try:
            with database.translated(self._path):
                if not connection.in_transaction:
                    raise FairlaneError(
                        "the transaction of the job was ended inside its body: do not commit or roll back there; it is "
                        "committed when the body returns, and rolled back when it raises"
                    )
                with _usual_forms(connection):
                    step = Step(connection, Catalog(), self._clock)
                    if progress is not None:
                        report.progress(step, session, [(transition.held, progress)])
                    [verdict] = report.finish(step, session, [transition])
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
        self._pass_on()

    def end(self) -> None:
        """Let go of the connection, which rolls back what is not committed, and then of the lock."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(sqlite3.Error):
            self.connection.interrupt()
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
        with contextlib.suppress(sqlite3.Error):
            self.connection.close()
        self._lock.close()

    def _stop_watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _pass_on(self) -> None:
        """Let the next of this event loop begin."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.release()

    def _expire(self) -> None:
        self.broken = StoreUnavailable(
            f"the transaction of the job was open for more than {LONGEST_SECONDS:g} s and was rolled back, because "
            "nobody else can write the file meanwhile. Ask for it last, and call nothing of the store before the body "
            "returns: such a call waits for the transaction. Store jobs in it, with app.enqueue_on(connection, …)."
        )
        self.end()
        self._pass_on()


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


def _abandon(begun: asyncio.Future[BodyTransaction], turn: asyncio.Semaphore) -> None:
    """Nobody waits for it any more."""
    if not begun.cancelled() and begun.exception() is None:
        begun.result().end()
    turn.release()


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
