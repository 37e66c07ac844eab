"""`fairlane.store.transactions.Transactions` on PostgreSQL: jobs that commit together with the user's own rows.

Jobs are stored by one statement on the user's connection, which takes no lock that other calls need. A job is completed
in a transaction on a connection of the store: the locks on the queue are taken right before the commit, and if the
process freezes after that, the server closes the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import msgspec

from ...errors import FairlaneError, InvalidInput, StoreUnavailable
from ...model.job import Enqueued, JobKind, NewJob, Priority, Verdict
from ...model.states import Transition
from ..codes import STATES
from ..shared.rows import encode_backoff
from ..shared.topics import EVERYTHING
from ..wakeups import queue_topic
from .database import Connection, Database
from .driver_errors import OWN_ERRORS, is_ours, translate
from .encoding import is_due
from .notifier import payloads
from .statements import placed
from .store_clock import StoreClock
from .user_connections import Statement, async_driver_of, blocking_driver_of, call_after_commit, own_error

QUEUES = """SELECT n, fairlane.queue_number(n), current_database()::text
FROM (SELECT x AS n FROM unnest($1::text[]) x ORDER BY x OFFSET 0) g"""
LAST_MOMENT = """SELECT current_setting('transaction_isolation'),
set_config('idle_in_transaction_session_timeout', '5000', true)"""
"""Run before the locks are taken that other calls wait for: the server ends a transaction that is then idle for 5 s."""
REPORT = """INSERT INTO fairlane.progress (seq, value) SELECT j.seq, $2 FROM fairlane.job j WHERE j.id = $1
ON CONFLICT (seq) DO UPDATE SET value = excluded.value"""
END_SECONDS = 3.0


class StoredJob(NamedTuple):
    """The fields of a job that are kept until the transaction that stored it has committed."""

    queue: str
    priority: Priority
    id: str


class Finishing(Protocol):
    """The part of the store that transactions use."""

    def announce(self, topics: Collection[str]) -> None:
        """Publish topics of a call that has committed."""

    def announce_stored(self, jobs: Sequence[StoredJob]) -> None:
        """Announce jobs that were stored in a user's transaction, which has committed. The next claim admits them."""

    async def finish_on(
        self, connection: Connection, session: str, transitions: Sequence[Transition]
    ) -> tuple[Sequence[Verdict], Sequence[str]]:
        """Apply transitions in the open transaction of a connection. Returns also the topics to publish afterwards."""


class PostgresqlTransactions:
    """The transactions of the store on PostgreSQL."""

    def __init__(self, store: Finishing, database: Database, clock: StoreClock, channel: str | None) -> None:
        self._store = store
        self._database = database
        self._clock = clock
        self._schema = database.address.schema
        self._statement = Statement(placed("fairlane.insert_arriving", self._schema))
        self._channel = channel
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the last caller."""
        self._numbers: dict[str, int] = {}
        """Queues that exist, with their numbers."""
        self._name = ""
        """The name of the database, read from the server."""
        # Separate connections: the store's own calls must not wait for bodies.
        self._bodies = Database(database.address)
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def close(self) -> None:
        """Close the connections that bodies used."""
        await self._bodies.close()

    # -- storing -----------------------------------------------------------------------------------------------------

    async def prepare(self, jobs: Sequence[NewJob]) -> None:
        """Create new queues. If one were created in the user's transaction, other calls would wait for its end."""
        for job in jobs:
            if job.kind is not JobKind.JOB or job.cron is not None:
                raise InvalidInput("job", "only plain jobs can be stored inside a transaction of yours")
        self._loop = asyncio.get_running_loop()
        # Renewed here, because storing uses only connections of the user.
        await self._database.renew_use()
        new = {job.queue for job in jobs} - self._numbers.keys()
        if new:
            for name, number, database in await self._database.fetch(placed(QUEUES, self._schema), sorted(new)):
                self._name = database
                self._numbers[name] = number

    async def enqueue_on(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs in the transaction that is open on a connection for asynchronous code."""
        run = async_driver_of(connection)
        with self._translated():
            answers = _answers(await run(connection, self._statement, self._request(jobs)))
        self._announce_after_commit(connection, jobs, answers)
        return answers

    def enqueue_here(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs in the transaction that is open on a connection for synchronous code."""
        run = blocking_driver_of(connection)
        with self._translated():
            answers = _answers(run(connection, self._statement, self._request(jobs)))
        self._announce_after_commit(connection, jobs, answers)
        return answers

    def _announce_after_commit(self, connection: object, jobs: Sequence[NewJob], answers: Sequence[Enqueued]) -> None:
        """Announce jobs after the commit, if the transaction sends no NOTIFY itself and its end can be detected.

        Otherwise the leader finds them.
        """
        loop = self._loop
        # Jobs for one worker wait for the leader: only its pass takes the lock of the pool, which admitting them needs.
        stored = [
            StoredJob(job.queue, job.priority, job.id)
            for job, answer in zip(jobs, answers, strict=True)
            if answer.created and job.sticky is None and job.worker is None and is_due(job)
        ]
        if self._channel is not None or loop is None or not stored:
            return

        def committed() -> None:
            # Runs in the user's thread. The loop may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._store.announce_stored, stored)

        body = _bodies.get(id(connection))
        if body is not None:
            body.after_commit.append(committed)
        else:
            call_after_commit(connection, committed)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except FairlaneError:
            raise
        except Exception as exc:
            error = own_error(exc, self._schema)
            if error is None:
                raise
            raise error from exc

    def _request(self, jobs: Sequence[NewJob]) -> str:
        hints = list(payloads(dict.fromkeys(queue_topic(job.queue) for job in jobs)))
        return _encode(
            {
                "database": self._name,
                "now": self._clock.readings()[0],
                "channel": self._channel,
                "hint": hints[0] if len(hints) == 1 else EVERYTHING,
                "jobs": [self._row(job) for job in jobs],
            }
        )

    def _row(self, job: NewJob) -> dict[str, Any]:
        row = {
            "id": job.id,
            "task": job.task,
            "queue": job.queue,
            "number": self._numbers[job.queue],
            "class": int(job.priority),
            "lane": job.lane,
            "cost": float(job.cost),
            "payload": job.payload.decode(),
            "headers": _text(job.headers),
            "delay": job.delay or None,
            "run_at": job.run_at,
            "expires": job.expires,
            "retries": job.retries,
            "backoff": _text(encode_backoff(job.backoff)),
            "timeout": job.timeout,
            "unique": job.unique,
            "unique_for": job.unique_for,
            "pool": job.pool,
            "sticky": job.sticky,
            "worker": job.worker,
            "retry_of": job.retry_of,
        }
        return {name: value for name, value in row.items() if value is not None}

    # -- completing --------------------------------------------------------------------------------------------------

    async def begin(self) -> BodyTransaction:
        """Begin a transaction on a connection of its own. Waits while all connections for bodies are in use."""
        room = self._rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._bodies.address.pool))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(room)
            connection: Any = await stack.enter_async_context(self._bodies.connection())
            # Completing the job must see what other calls committed before it got the locks.
            transaction = connection.transaction(isolation="read_committed")
            await transaction.start()
            return BodyTransaction(self._store, self._bodies, connection, transaction, stack.pop_all())
        raise AssertionError("the block returns")


class BodyTransaction:
    """A transaction in which a body writes, and in which its job is completed."""

    broken: FairlaneError | None = None
    """Always None: only the server ends such a transaction, and the next statement then raises its error."""

    def __init__(
        self, store: Finishing, database: Database, connection: Any, transaction: Any, holding: AsyncExitStack
    ) -> None:
        self._store = store
        self._database = database
        self._report = placed(REPORT, database.address.schema)
        self._transaction = transaction
        self._holding = holding
        self.connection = connection
        self.after_commit: list[Callable[[], None]] = []
        _bodies[id(connection)] = self

    async def commit(self, session: str, transition: Transition, progress: bytes | None) -> bool:
        """Apply the transition of the job and commit; False if the claim was lost."""
        topics: Sequence[str] | None = None
        try:
            topics = await self._commit(session, transition, progress)
        except Exception as exc:
            if is_ours(exc):
                error = translate(exc, self._database.address, self.connection)
                if isinstance(error, StoreUnavailable):
                    raise error from exc
            raise
        finally:
            await (self.roll_back() if topics is None else self._give_back())
        if topics is not None:
            self._store.announce(topics)
            for function in self.after_commit:
                function()
        return topics is not None

    async def _commit(self, session: str, transition: Transition, progress: bytes | None) -> Sequence[str] | None:
        connection = self.connection
        if not connection.is_in_transaction():
            raise FairlaneError(
                "the transaction of the job was ended inside its body: do not commit or roll back there; it is "
                "committed when the body returns, and rolled back when it raises"
            )
        isolation, _ = await connection.fetchrow(LAST_MOMENT)
        if isolation != "read committed":
            raise FairlaneError(f"the transaction of the job was set to {isolation}; it must stay read committed")
        [verdict], topics = await self._store.finish_on(connection, session, [transition])
        if not verdict.accepted:
            return None
        if progress is not None:
            # Only now: a report in flight locks the row of the job first, and would wait for this row: a deadlock.
            await connection.execute(self._report, transition.held.id, progress)
        await self._transaction.commit()
        return topics

    async def roll_back(self) -> None:
        """Roll back, and return the connection."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(END_SECONDS):
                await self._transaction.rollback()
        await self._give_back()

    async def _give_back(self) -> None:
        """Reset the connection and return it; if that fails, close it."""
        _bodies.pop(id(self.connection), None)
        try:
            async with asyncio.timeout(END_SECONDS):
                await self.connection.reset()
        except Exception:
            with contextlib.suppress(Exception):
                self.connection.terminate()
        with contextlib.suppress(Exception):
            await self._holding.aclose()


_bodies: dict[int, BodyTransaction] = {}
"""Open transactions by the `id` of their connection, because wrappers of drivers need not be hashable."""


class _Answer(msgspec.Struct):
    answers: list[tuple[str, bool, int]] = []
    code: str = ""
    message: str = ""
    detail: str = ""


_answer = msgspec.json.Decoder(_Answer)
_encoder = msgspec.json.Encoder()


def _answers(raw: str) -> list[Enqueued]:
    answer = _answer.decode(raw)
    if answer.code:
        raise OWN_ERRORS[answer.code](answer.message, answer.detail)
    return [Enqueued(id, created, STATES[state]) for id, created, state in answer.answers]


def _encode(request: dict[str, Any]) -> str:
    return _encoder.encode(request).decode()


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode()
