"""Jobs that commit with the user's data: stored in the user's transaction, or completed in one of the store.

The SQL stores support this beyond the port; each implements `Transactions`. The rules here are the same for all of
them: a run has at most one transaction, which ends with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ..errors import FairlaneError, InvalidInput, NotSupported, Stale
from ..model.job import MOST_JOBS_PER_CALL, Enqueued, Held, NewJob
from ..model.states import Transition
from .port import Store

T = TypeVar("T")


class OtherDatabase(InvalidInput):
    """A connection does not lead to the store's own database."""


class OpenTransaction(Protocol):
    """A transaction of the store that a task function writes in."""

    @property
    def connection(self) -> Any:
        """The connection inside the transaction; its type depends on the store."""

    @property
    def broken(self) -> FairlaneError | None:
        """Why it can no longer be committed, if the store itself had to end it."""

    async def commit(self, session: str, transition: Transition, progress: bytes | None) -> bool:
        """Apply the transition, fenced, and commit both together. False: the claim was lost, all is rolled back.

        `progress` is the last reported progress: once the job has ended, reports are rejected. Whatever this raises,
        the transaction has ended; after `StoreUnavailable` its outcome is unknown.
        """

    async def roll_back(self) -> None:
        """Roll everything back. Never raises."""


class Transactions(Protocol):
    """What a store offers beyond the port if jobs can commit with a user's rows."""

    async def prepare(self, jobs: Sequence[NewJob]) -> None:
        """Create, on the store's own connections, everything these jobs need before they can be stored."""

    async def enqueue_on(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store up to 1,000 jobs in the transaction that is open on a connection for asynchronous code.

        Raises `InvalidInput` for a connection that is not supported, is for synchronous code, or has no open
        transaction.
        """

    def enqueue_here(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """The same on a connection for synchronous code, in this thread."""

    async def begin(self) -> OpenTransaction:
        """Begin a transaction on one of the store's own connections."""


def transactions_of(store: Store) -> Transactions:
    """The transactions of a store. Raises `NotSupported` if it has none."""
    found: Transactions | None = getattr(store, "transactions", None)
    if found is None:
        raise NotSupported(
            "jobs can commit with your own rows only if the store is in the same PostgreSQL or SQLite database as they"
        )
    return found


class Joining:
    """Stores jobs in a user's transaction, a thousand per call; all of them commit with it, or none."""

    def __init__(self, transactions: Transactions, jobs: Sequence[NewJob]) -> None:
        self._transactions = transactions
        self._parts = [jobs[start : start + MOST_JOBS_PER_CALL] for start in range(0, len(jobs), MOST_JOBS_PER_CALL)]

    async def enqueue_on(self, connection: object) -> list[Enqueued]:
        """Store them on a connection for asynchronous code."""
        return [answer for part in self._parts for answer in await self._transactions.enqueue_on(connection, part)]

    def enqueue_here(self, connection: object) -> list[Enqueued]:
        """Store them on a connection for synchronous code, in this thread."""
        return [answer for part in self._parts for answer in self._transactions.enqueue_here(connection, part)]


class RunTransaction:
    """The transaction of a run: begun when the task function first requests it, ended with the run."""

    def __init__(self, store: Callable[[], Awaitable[Store]], session: str, held: Held) -> None:
        self._store = store
        self._session = session
        self._held = held
        self._beginning: asyncio.Task[OpenTransaction] | None = None
        self._over = False
        self.progress: bytes | None = None
        """The last reported progress."""

    async def connection(self) -> Any:
        """The connection; every call in this run returns the same."""
        if self._over:
            raise FairlaneError(f"job {self._held.id} has ended, so its transaction is closed")
        if self._beginning is None:
            self._beginning = asyncio.get_running_loop().create_task(self._begin())
        beginning = self._beginning
        try:
            # Shielded: a cancelled caller must not cancel it for the others.
            return (await asyncio.shield(beginning)).connection
        except Exception:
            if self._beginning is beginning:
                self._beginning = None
            raise

    async def _begin(self) -> OpenTransaction:
        return await transactions_of(await self._store()).begin()

    async def commit(self, transition: Transition) -> bool:
        """Complete the job and commit, or roll back and raise. False: it was never begun, and nothing is written."""
        opened = await self._end()
        if opened is None:
            return False
        if not await _uncancelled(opened.commit(self._session, transition, self.progress)):
            raise Stale(f"job {self._held.id} is now owned by another run; the writes of this run were rolled back")
        return True

    async def roll_back(self) -> FairlaneError | None:
        """Roll everything back. Returns the reason if the store had to end the transaction."""
        opened = await self._end()
        if opened is None:
            return None
        await _uncancelled(opened.roll_back())
        return opened.broken

    async def _end(self) -> OpenTransaction | None:
        """The transaction, if it was ever begun."""
        self._over = True
        if self._beginning is None:
            return None
        with contextlib.suppress(Exception):
            return await _uncancelled(_awaited(self._beginning))
        return None


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Wait for `work` even if the caller is cancelled meanwhile: its outcome must be known."""
    task = asyncio.get_running_loop().create_task(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    return task.result()
