"""Jobs that commit with the user's data: stored in a transaction of his, or completed in one of the store's.

The SQL stores can do so, beyond the port; each offers it as `Transactions`. What is decided here is the same for all of
them: who may take part, and that a run has one transaction, which ends with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ..errors import FairlaneError, NotSupported, Stale
from ..model.job import MOST_JOBS_PER_CALL, Enqueued, Held, NewJob
from ..model.states import Transition
from .instrumented import InstrumentedStore
from .port import Store

T = TypeVar("T")


class OpenTransaction(Protocol):
    """A transaction of the store's that a body writes in."""

    @property
    def connection(self) -> Any:
        """Inside the transaction; what kind of connection it is depends on the store."""

    @property
    def broken(self) -> FairlaneError | None:
        """Why it cannot be committed any more, when the store itself had to end it."""

    async def commit(self, session: str, transition: Transition, progress: bytes | None) -> bool:
        """Write how the job ends, fenced, and commit both together. False: the claim was lost, all is rolled back.

        `progress` is what the body reported last: once the job has ended, no report is taken any more. Whatever this
        raises, the transaction is over; after `StoreUnavailable` nobody knows how.
        """

    async def roll_back(self) -> None:
        """Undo everything. Never raises."""


class Transactions(Protocol):
    """What a store has beyond the port when jobs can commit with a user's rows."""

    async def prepare(self, jobs: Sequence[NewJob]) -> None:
        """Do, on connections of the store's own, what must be there before these jobs can be stored."""

    async def enqueue_on(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store up to 1,000 jobs in the transaction that is open on a connection for asynchronous code.

        Raises `InvalidInput` for a connection that is not supported, belongs to the other kind of code, or has no open
        transaction.
        """

    def enqueue_here(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """The same on a connection for plain code, in this thread."""

    async def begin(self) -> OpenTransaction:
        """Begin a transaction on a connection of the store's own."""


def transactions_of(store: Store) -> Transactions:
    """What a store offers beyond the port. Raises `NotSupported` when it does not."""
    while isinstance(store, InstrumentedStore):
        store = store.inner
    found: Transactions | None = getattr(store, "transactions", None)
    if found is None:
        raise NotSupported(
            "jobs can commit with rows of yours only where both are in one database: in a store on PostgreSQL or SQLite"
        )
    return found


class Joining:
    """Jobs on their way into a user's transaction, a thousand at a time; all of them commit with it, or none."""

    def __init__(self, transactions: Transactions, jobs: Sequence[NewJob]) -> None:
        self._transactions = transactions
        self._parts = [jobs[start : start + MOST_JOBS_PER_CALL] for start in range(0, len(jobs), MOST_JOBS_PER_CALL)]

    async def enqueue_on(self, connection: object) -> list[Enqueued]:
        """Store them on a connection for asynchronous code."""
        return [answer for part in self._parts for answer in await self._transactions.enqueue_on(connection, part)]

    def enqueue_here(self, connection: object) -> list[Enqueued]:
        """Store them on a connection for plain code, in this thread."""
        return [answer for part in self._parts for answer in self._transactions.enqueue_here(connection, part)]


class RunTransaction:
    """The one transaction of a run: begun when the body first asks for it, ended with the run."""

    def __init__(self, store: Callable[[], Awaitable[Store]], session: str, held: Held) -> None:
        self._store = store
        self._session = session
        self._held = held
        self._beginning: asyncio.Task[OpenTransaction] | None = None
        self._over = False
        self.progress: bytes | None = None
        """What the body reported last."""

    async def connection(self) -> Any:
        """The connection, the same for everybody who asks in this run."""
        if self._over:
            raise FairlaneError(f"job {self._held.id} has ended, and its transaction with it")
        if self._beginning is None:
            self._beginning = asyncio.get_running_loop().create_task(self._begin())
        beginning = self._beginning
        try:
            # Whoever gives up waiting takes it from nobody else.
            return (await asyncio.shield(beginning)).connection
        except Exception:
            if self._beginning is beginning:
                self._beginning = None
            raise

    async def _begin(self) -> OpenTransaction:
        return await transactions_of(await self._store()).begin()

    async def commit(self, transition: Transition) -> bool:
        """Complete the job and commit, or undo everything and raise. False: it was never begun, nothing is written."""
        opened = await self._end()
        if opened is None:
            return False
        if not await _to_its_end(opened.commit(self._session, transition, self.progress)):
            raise Stale(f"job {self._held.id} belongs to another run by now; what this one wrote is rolled back")
        return True

    async def roll_back(self) -> FairlaneError | None:
        """Undo everything. Answers with the reason when it was the store that had to end it."""
        opened = await self._end()
        if opened is None:
            return None
        await _to_its_end(opened.roll_back())
        return opened.broken

    async def _end(self) -> OpenTransaction | None:
        """The transaction, if it was ever begun."""
        self._over = True
        if self._beginning is None:
            return None
        with contextlib.suppress(Exception):
            return await _to_its_end(_awaited(self._beginning))
        return None


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for `work`, whoever cancels the caller meanwhile: what becomes of it must be known."""
    task = asyncio.get_running_loop().create_task(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    return task.result()
