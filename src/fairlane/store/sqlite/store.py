"""The embedded store: one SQLite file, several processes. Writes run in one thread, reads in two others."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ...errors import StoreError, StoreMissing
from ...model.binding import Binding, Release
from ...model.ended import EndedPage, check_ended
from ...model.job import Claimed, Enqueued, Held, Job, JobState, NewJob, Verdict
from ...model.listings import FailureGroup, LaneListing, LanePage, LanesCursor, LineCursor, check_failures, check_lane
from ...model.maintenance import Admitted, Promoted, Pruned, Recount, Rescued, Retention
from ...model.names import check_count, check_key, check_name
from ...model.reading import DeclinedTask, Filter, JobPosition, Page, QueueReading, check_page
from ...model.schedule import Schedule, StoredSchedule
from ...model.session import Claim, Finished, NewSession, Renewal, Session, Term
from ...model.settings import SettingsChange
from ...model.states import Transition
from ...model.tokens import AccessToken, NewToken
from ..clock import Clock, SystemClock
from ..diagnosis import Finding
from ..shared.token_rows import check_token, token_of
from . import claim as claims
from . import (
    database,
    ended,
    enqueue,
    finish,
    listings,
    maintenance,
    positions,
    reading,
    sessions,
    settings,
)
from .file_lock import FileLock
from .step import Step
from .transactions import SqliteTransactions
from .wakeups import DatagramWakeups
from .writer import Writer

T = TypeVar("T")
READERS = 2


class SqliteStore:
    """Implements `fairlane.store.port.Store` on a file. Open it with `open`."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._wakeups = DatagramWakeups(path)
        try:
            self._writer = Writer(path, clock, self._wakeups.publish)
        except BaseException:
            self._wakeups.close()
            raise
        self.transactions = SqliteTransactions(path, clock, self._wakeups.publish)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix=f"fairlane-reader-{path.name}")
        self._reading = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._closed = False

    @classmethod
    async def open(cls, url: str, *, clock: Clock | None = None, create: bool = True) -> SqliteStore:
        """Open the store of a URL. A new file is created, and the schema is migrated."""
        path = database.path_of(url)
        if not create and not await asyncio.to_thread(database.is_made, path):
            raise StoreMissing(f"there is no store in {path}")
        return await asyncio.to_thread(cls, path, clock or SystemClock())

    @property
    def wakeups(self) -> DatagramWakeups:
        return self._wakeups

    # -- writing and reading -------------------------------------------------------------------------------------

    async def _write(self, work: Callable[[Step], T]) -> T:
        return await self._writer.submit(work)

    async def _read(self, query: Callable[[reading.View], T]) -> T:
        self._writer.check_usable()
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._readers, self._guarded_read, query)
        except RuntimeError:
            # Closed since the check above: the readers are closed before the writer.
            raise StoreError("this store is closed; open it again") from None
        return await answer

    def _guarded_read(self, query: Callable[[reading.View], T]) -> T:
        with database.FORK_GUARD:
            return self._run_read(query)

    def _run_read(self, query: Callable[[reading.View], T]) -> T:
        connection = getattr(self._reading, "connection", None)
        if connection is None:
            connection = self._reading.connection = database.open_for_reading(self._path)
            self._connections.append(connection)
        with database.translated(self._path):
            connection.execute("BEGIN")
            try:
                return query(reading.View(connection, self._clock))
            finally:
                connection.execute("COMMIT")

    # -- sessions ------------------------------------------------------------------------------------------------

    async def register(self, session: NewSession) -> Session:
        await self._write(lambda step: sessions.register(step, session))
        return await self._read(lambda view: reading.session(view, session.id))

    async def renew(self, session: str, held: Sequence[Held], *, claim: int, stopping: bool = False) -> Renewal:
        return await self._write(lambda step: sessions.renew(step, session, held, claim, stopping))

    async def leave(self, session: str, *, begun: Sequence[Held] | None = None) -> None:
        await self._write(lambda step: sessions.leave(step, session, begun))

    # -- jobs ----------------------------------------------------------------------------------------------------

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        return await self._write(lambda step: enqueue.enqueue(step, jobs))

    async def claim(self, session: str, claim: Claim) -> list[Claimed]:
        claimed = None
        while claimed is None:
            claimed = await self._write(lambda step: claims.claim(step, session, claim))
        return claimed

    async def finish(self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None) -> Finished:
        def work(step: Step) -> tuple[tuple[Verdict, ...], list[Claimed] | None]:
            verdicts = tuple(finish.finish(step, session, transitions))
            if claim is None:
                return verdicts, []
            step.flush()
            return verdicts, claims.claim(step, session, claim)

        verdicts, claimed = await self._write(work)
        if claimed is None and claim is not None:
            claimed = await self.claim(session, claim)
        return Finished(verdicts, tuple(claimed or ()))

    async def progress(self, session: str, reports: Sequence[tuple[Held, bytes]]) -> list[Verdict]:
        return await self._write(lambda step: finish.progress(step, session, reports))

    async def cancel(self, ids: Sequence[str]) -> list[JobState]:
        return await self._write(lambda step: finish.cancel(step, ids))

    async def forget(self, ids: Sequence[str], retention: Retention) -> list[bool]:
        return await self._write(lambda step: maintenance.forget(step, ids, retention))

    async def release(self, pool: str, key: str, cleanup: NewJob | None = None) -> Release:
        check_name("pool", pool)
        check_key("key", key)
        return Release(await self._write(lambda step: enqueue.release(step, pool, key, cleanup)))

    # -- the leader's passes -------------------------------------------------------------------------------------

    async def promote(self, *, limit: int = 1_000, term: int | None = None) -> Promoted:
        return await self._lead_pass(lambda step: enqueue.promote(step, limit), limit, term)

    async def admit(self, *, limit: int = 1_000, term: int | None = None) -> Admitted:
        return await self._lead_pass(lambda step: enqueue.admit(step, limit), limit, term)

    async def rescue(self, *, limit: int = 1_000, declare: bool = True, term: int | None = None) -> Rescued:
        return await self._lead_pass(lambda step: sessions.rescue(step, limit, declare), limit, term)

    async def prune(self, retention: Retention, *, limit: int = 1_000, term: int | None = None) -> Pruned:
        return await self._lead_pass(lambda step: maintenance.prune(step, retention, limit), limit, term)

    async def _lead_pass(self, work: Callable[[Step], T], limit: int, term: int | None) -> T:
        check_count("limit", limit, least=1, most=100_000)

        def fenced(step: Step) -> T:
            step.check_term(term)
            return work(step)

        return await self._write(fenced)

    async def lead(self, session: str, *, lease: float, term: int | None = None) -> Term | None:
        return await self._write(lambda step: settings.lead(step, session, lease, term))

    async def resign(self, term: int) -> None:
        await self._write(lambda step: settings.resign(step, term))

    # -- settings ------------------------------------------------------------------------------------------------

    async def configure(self, changes: Sequence[SettingsChange]) -> None:
        await self._write(lambda step: settings.configure(step, changes))

    async def declare(self, schedules: Sequence[Schedule]) -> list[StoredSchedule]:
        if schedules:
            await self._write(lambda step: settings.declare(step, schedules))
        return await self._read(reading.schedules)

    async def add_token(self, token: NewToken) -> AccessToken:
        return await self._write(lambda step: settings.add_token(step, token))

    async def revoke_token(self, id: str) -> bool:
        check_token(id)
        return await self._write(lambda step: settings.revoke_token(step, id))

    # -- reading -------------------------------------------------------------------------------------------------

    async def schedules(self) -> list[StoredSchedule]:
        return await self._read(reading.schedules)

    async def leader(self) -> Term | None:
        return await self._read(reading.leader)

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        return await self._read(lambda view: reading.get(view, ids))

    async def find(self, where: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        return await self._read(lambda view: reading.find(view, where, limit, cursor))

    async def positions(self, ids: Sequence[str]) -> list[JobPosition | None]:
        return await self._read(lambda view: positions.read_positions(view, ids))

    async def queues(self) -> list[QueueReading]:
        return await self._read(reading.queues)

    async def lanes(self, queue: str, *, limit: int = 100, cursor: str | None = None) -> LaneListing:
        check_page(limit)
        after = LanesCursor.read(cursor)
        return await self._read(lambda view: listings.lanes(view, queue, limit, after))

    async def lane_line(self, queue: str, lane: str | None, *, limit: int = 50, cursor: str | None = None) -> LanePage:
        check_lane(queue, lane)
        check_page(limit)
        after = LineCursor.read(cursor)
        return await self._read(lambda view: listings.lane_line(view, queue, lane, limit, after))

    async def declined(self, *, limit: int = 100) -> list[DeclinedTask]:
        return await self._read(lambda view: reading.declined(view, limit))

    async def failures(
        self, *, queue: str | None = None, task: str | None = None, limit: int = 50
    ) -> list[FailureGroup]:
        check_failures(queue, task)
        check_page(limit)
        return await self._read(lambda view: listings.failures(view, queue, task, limit))

    async def ended(self, after: str | None, *, limit: int = 1_000) -> EndedPage:
        check_ended(limit)
        return await self._read(lambda view: ended.read_ended(view, after, limit))

    async def sessions(self) -> list[Session]:
        return await self._read(reading.sessions)

    async def bindings(self, pool: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Binding]:
        return await self._read(lambda view: reading.bindings(view, pool, key, limit))

    async def tokens(self) -> list[AccessToken]:
        return await self._read(lambda view: [token_of(row) for row in view.all("tokens_read")])

    # -- the store itself ----------------------------------------------------------------------------------------

    def enqueue_on(self, connection: sqlite3.Connection, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs in the open transaction of a user's connection to the same file.

        They exist if it commits, and not if it rolls back. Until `admit` has admitted them they are pending, with the
        gate `arriving`.
        """
        return self.transactions.enqueue_here(connection, jobs)

    @contextmanager
    def file_lock(self) -> Iterator[None]:
        """Hold the lock that all writers of the file take, for a transaction on a user's connection.

        Blocks for up to 10 s, so an async program does this in a thread.
        """
        lock = FileLock.of(self._path)
        try:
            with lock:
                yield
        finally:
            lock.close()

    async def recount(self) -> Recount:
        return await self._write(maintenance.recount)

    async def migrate(self) -> int:
        return self._writer.version

    async def findings(self) -> list[Finding]:
        """Return what `fairlane doctor` reports about SQLite stores only."""
        return [database.version_found()]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._readers.shutdown(wait=True)
        with database.FORK_GUARD:
            for connection in self._connections:
                connection.close()
        self._writer.close()
        self._wakeups.close()
