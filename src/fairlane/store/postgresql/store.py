"""The store on PostgreSQL. Every verb that writes is one call of one function in the schema: one round trip and one
transaction, so a client that freezes holds no lock."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

from ...errors import Busy, InvalidInput, NotFound, QueueFull, StoreUnavailable
from ...model.binding import Release
from ...model.job import MOST_JOBS_PER_CALL, Claimed, Enqueued, Held, JobKind, JobState, NewJob, Verdict, check_ids
from ...model.maintenance import Admitted, Promoted, Pruned, Recount, Rescued, Retention
from ...model.names import PAYLOAD_BYTES, check_count, check_key, check_name, check_seconds, check_size
from ...model.session import Claim, Finished, NewSession, Renewal, Session, SessionKind, Term
from ...model.states import Transition
from ..clock import Clock
from ..diagnosis import Finding
from ..shared.claimed_jobs import fail_unreadable, problem_of
from ..wakeups import job_topic, queue_topic
from . import encoding, health, migrator, reading, service_times
from .address import Address, parse
from .database import Connection, Database, Record
from .declarations import LONG_SECONDS, Declarations
from .driver_errors import FullQueue
from .enqueue_batcher import MOST_SHARED, EnqueueBatcher
from .statements import placed, queries
from .store_clock import StoreClock
from .transactions import PostgresqlTransactions, StoredJob
from .wakeups import ServerWakeups, wakeups_for

MOST_REMEMBERED_SEQS = 200_000
RENEWAL_SECONDS = 5.0
"""The timeout of a renewal: short, so that it can be repeated before the lease ends."""
ONE_FIRST, ONE_TOLD = 2, 4
"""Bits in the answer of `enqueue_one`: workers should be notified; they were, with the commit."""
USUAL_EXCHANGE = 19  # the arguments of `exchange` without payloads
NUMBER = "SELECT id FROM fairlane.queue WHERE name = $1"


class PostgresqlStore(Declarations):
    """Implements `fairlane.store.port.Store` on a schema of a database. Open it with `open`."""

    def __init__(self, address: Address, clock: Clock | None) -> None:
        self._address = address
        self._database = Database(address)
        self._clock = StoreClock(clock)
        self._wakeups = self._make_wakeups()
        self._batchers: WeakKeyDictionary[asyncio.AbstractEventLoop, EnqueueBatcher] = WeakKeyDictionary()
        self._seqs: dict[str, int] = {}
        """The numbers of jobs claimed through this object: hints for look-ups, which are verified."""
        self._numbers: dict[str, int] = {}
        self._calls: dict[tuple[str, int], str] = {}
        self._locks: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()
        self.transactions = PostgresqlTransactions(self, self._database, self._clock, self._wakeups.transaction_channel)
        self._closed = False

    @classmethod
    async def open(cls, url: str, *, clock: Clock | None = None, create: bool = True) -> Self:
        """Open the schema of a URL; with `create`, make it if it does not exist. Migrates it if necessary."""
        store = cls(parse(url), clock)
        try:
            await migrator.migrate(store._database, create=create)
        except BaseException:
            await store.close()
            raise
        return store

    def _make_wakeups(self) -> ServerWakeups:
        return wakeups_for(self._address)

    @property
    def wakeups(self) -> ServerWakeups:
        return self._wakeups

    def announce(self, topics: Collection[str]) -> None:
        """Publish topics of a call that has committed."""
        self._wakeups.publish(topics)

    def announce_stored(self, jobs: Sequence[StoredJob]) -> None:
        """Announce jobs that were stored in a user's transaction, which has committed."""
        self.announce({queue_topic(job.queue) for job in jobs})

    # -- how calls get there -------------------------------------------------------------------------------------

    def _function(self, name: str, count: int, ask: str = "SELECT * FROM") -> str:
        call = self._calls.get((name, count))
        if call is None:
            places = ", ".join(f"${n}" for n in range(1, count + 1))
            call = self._calls[name, count] = placed(f"{ask} fairlane.{name}({places})", self._address.schema)
        return call

    async def _call(self, name: str, *values: Any, timeout: float | None = None, sent: int = 0) -> Record:
        """Call a verb's function with the clock's readings as last arguments, and announce the topics it returns."""
        row = await self._call_quietly(name, *values, timeout=timeout, sent=sent)
        topics = row.get("topics")
        if topics:
            self.announce(topics)
        return row

    async def _call_quietly(self, name: str, *values: Any, timeout: float | None = None, sent: int = 0) -> Record:
        """The same; the caller announces the topics."""
        arguments = (*values, *self._clock.readings())
        call = self._function(name, len(arguments))
        row = await self._database.fetchrow(call, *arguments, timeout=timeout, sent=sent)
        assert row is not None
        return row

    def _view(self) -> reading.View:
        return reading.View(self._database, queries(self._address.schema), *self._clock.readings())

    # -- sessions ------------------------------------------------------------------------------------------------

    async def register(self, session: NewSession) -> Session:
        slots = session.slots
        await self._call(
            "register", session.id, session.kind.value, session.lease, session.host, session.pid, session.pool,
            session.index, list(session.queues), None if slots is None else slots.total,
            0 if slots is None else slots.reserved.high, 0 if slots is None else slots.reserved.normal,
            session.task_set, None if session.tasks is None else list(session.tasks),
        )  # fmt: skip
        if session.kind is SessionKind.WORKER:
            await health.warn_of_connections(self._database)
        return await reading.session(self._view(), session.id)

    async def renew(self, session: str, held: Sequence[Held], *, claim: int, stopping: bool = False) -> Renewal:
        ids, fences = [h.id for h in held], [h.fence for h in held]
        row = await self._call("renew", session, ids, fences, claim, stopping, False, timeout=RENEWAL_SECONDS)
        if row["again"]:
            row = await self._call("renew", session, ids, fences, claim, stopping, True)
        return Renewal(
            lost=tuple(held[place] for place in row["lost"]),
            cancel=tuple(row["cancel"]),
            taken_back=tuple(row["taken_back"]),
            now=row["now"],
        )

    async def leave(self, session: str, *, begun: Sequence[Held] | None = None) -> None:
        ids = None if begun is None else [held.id for held in begun]
        fences = None if begun is None else [held.fence for held in begun]
        await self._call("leave", session, ids, fences)

    # -- jobs ----------------------------------------------------------------------------------------------------

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        if len(jobs) > MOST_JOBS_PER_CALL:
            raise InvalidInput(
                "jobs", f"{len(jobs)} are more than {MOST_JOBS_PER_CALL} in one call; send them in parts"
            )
        if not jobs:
            return []
        if not all(map(encoding.is_plain, jobs)):
            if any(job.kind is JobKind.CLEANUP for job in jobs):
                raise InvalidInput("kind", "a clean-up is stored by release, not by enqueue")
            return await self._enqueue_any(jobs)
        loop = asyncio.get_running_loop()
        batcher = self._batchers.get(loop)
        if batcher is None:
            batcher = self._batchers[loop] = EnqueueBatcher(self._enqueue_plain)
        return await batcher.enqueue(jobs)

    def _enqueue_plain(self, jobs: Sequence[NewJob], patience: float) -> Coroutine[Any, Any, list[Enqueued]]:
        one = len(jobs) == 1 and not jobs[0].delay and jobs[0].run_at is None
        return self._enqueue_one(jobs, patience) if one else self._enqueue_several(jobs, patience)

    async def _enqueue_several(self, jobs: Sequence[NewJob], patience: float) -> list[Enqueued]:
        values = encoding.job_columns(jobs)
        # Large calls of one event loop are sent one after the other, so that they arrive in the order of the calls.
        # Encoding is done before, while another call is in progress.
        async with self._lock("enqueue") if len(jobs) > MOST_SHARED else nullcontext():
            row = await self._stored(jobs, "enqueue", *values, f"{patience * 1000:.0f}ms")
        if row["arriving"] and any(job.delay or job.run_at is not None for job in jobs):
            await self._admit(jobs)
        states = row["states"]
        if states is None:
            return [Enqueued(job.id, True, JobState.PENDING) for job in jobs]
        return [
            Enqueued(job.id, created, encoding.state_of(state))
            for job, created, state in zip(jobs, row["created"] or [True] * len(jobs), states, strict=True)
        ]

    async def _enqueue_one(self, jobs: Sequence[NewJob], patience: float) -> list[Enqueued]:
        """The hottest path: for one plain job that is due."""
        [job] = jobs
        values = encoding.job_values(job, self._wakeups.enqueue_channel)
        now, lease = self._clock.readings()
        if now is not None:
            values = [*values, *encoding.USUAL[len(values) - 5 :], now, lease]
        row = await self._database.fetchrow(self._function("enqueue_one", len(values), "SELECT"), *values)
        assert row is not None
        answer: int = row[0]
        if not answer:
            return await self._enqueue_several(jobs, patience)
        self._announce_one(job, answer)
        return [Enqueued(job.id, True, JobState.PENDING)]

    def _announce_one(self, job: NewJob, answer: int) -> None:
        if answer & ONE_TOLD:
            self._wakeups.was_sent((queue_topic(job.queue),))
        elif answer & ONE_FIRST:
            self.announce((queue_topic(job.queue),))

    async def _admit(self, jobs: Sequence[NewJob]) -> None:
        """Admit jobs with due times that were stored while another call had the locks. A failure is ignored: they are
        stored, but do not become due before another call has admitted them."""
        with suppress(Busy, StoreUnavailable):
            await self._call("admit_queues", list({job.queue for job in jobs}))

    async def _enqueue_any(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        row = await self._stored(jobs, "enqueue_any", *encoding.any_job_columns(jobs))
        return [
            Enqueued(id, created, encoding.state_of(state))
            for id, created, state in zip(row["ids"], row["created"], row["states"], strict=True)
        ]

    async def _stored(self, jobs: Sequence[NewJob], function: str, *values: Any) -> Record:
        try:
            row = await self._call_quietly(function, *values, sent=sum(job.size for job in jobs))
        except FullQueue as exc:
            raise QueueFull(str(exc), await service_times.room(self._view(), exc.where)) from None
        self._announce_several(jobs, row)
        return row

    def _announce_several(self, jobs: Sequence[NewJob], row: Record) -> None:
        if row["topics"]:
            self.announce(row["topics"])

    async def claim(self, session: str, claim: Claim) -> list[Claimed]:
        # Claims of one session are sent one after the other: on two connections a higher number could arrive first.
        async with self._lock(f"claim {session}"):
            found = await self._claim_one(session, claim) if claim.notified and claim.total > 0 else None
            return list((await self._exchange_once(session, (), claim)).claimed) if found is None else found

    async def _claim_one(self, session: str, claim: Claim) -> list[Claimed] | None:
        """A fast path that starts a single job or finds that there is none. None if the general claim is needed."""
        queue, *others = {ask.queue: None for ask in claim.asks if ask.queue is not None} or [None]
        number = None if queue is None or others else await self._number(queue)
        if queue is None or number is None:
            return None
        values = (session, *encoding.one_claim_values(claim, number, queue), *self._clock.readings())
        row = await self._database.fetchrow(self._function("claim_one", len(values)), *values)
        assert row is not None
        if row["seq"] is None:
            return None if row["more"] else []
        self._remember([row["id"]], [row["seq"]])
        try:
            job = encoding.one_claimed_of(row, queue)
        except Exception as exc:
            await fail_unreadable(self, session, [(Held(row["id"], row["fence"]), problem_of(exc))], claim)
            return None
        self.announce(encoding.topics_of(job))
        return [job]

    async def _number(self, queue: str) -> int | None:
        """The number of a queue, which never changes; None while the queue does not exist."""
        number = self._numbers.get(queue)
        if number is None:
            row = await self._database.fetchrow(placed(NUMBER, self._address.schema), queue)
            if row is not None:
                number = self._numbers[queue] = row["id"]
        return number

    async def finish(self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None) -> Finished:
        if not transitions and claim is None:
            return Finished(())
        async with self._lock(f"claim {session}") if claim is not None else nullcontext():
            return await self._exchange_once(session, transitions, claim)

    async def _exchange_once(self, session: str, transitions: Sequence[Transition], claim: Claim | None) -> Finished:
        arguments = self._exchange_arguments(session, transitions, claim)
        sent = sum(len(t.result) for t in transitions if t.result is not None)
        if len(arguments) > USUAL_EXCHANGE:
            sent += sum(len(payload) for payload in arguments[-1] if payload is not None)
        row = await self._database.fetchrow(self._function("exchange", len(arguments)), *arguments, sent=sent)
        assert row is not None
        finished, broken = self._take_in(transitions, row)
        if broken and claim is not None:
            await fail_unreadable(self, session, broken, claim)
        return finished

    def _lock(self, name: str) -> asyncio.Lock:
        """The lock of this name in this event loop; dropped when no call uses it."""
        key = (id(asyncio.get_running_loop()), name)
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    def _exchange_arguments(self, session: str, transitions: Sequence[Transition], claim: Claim | None) -> list[Any]:
        columns = encoding.transition_columns(transitions, self._seqs) if transitions else encoding.NOTHING_TO_FINISH
        arguments = [
            session,
            *columns,
            *(encoding.NOTHING_TO_CLAIM if claim is None else encoding.claim_columns(claim)),
            *self._clock.readings(),
        ]
        if columns[encoding.MOVES] is not None:
            arguments += encoding.payload_columns(transitions)
        return arguments

    def _take_in(self, transitions: Sequence[Transition], row: Record) -> tuple[Finished, encoding.Broken]:
        """Read the answer to an exchange, remember the numbers of claimed jobs, and announce topics."""
        verdicts = encoding.verdicts_of([t.held for t in transitions], row) if transitions else ()
        claimed, broken = encoding.claimed_of(row)
        topics = ["job:" + t.held.id for t in transitions]
        for t in transitions:
            self._seqs.pop(t.held.id, None)
        if row["seqs"]:
            self._remember(row["ids"], row["seqs"])
            for job in claimed:
                topics += encoding.topics_of(job)
        if row["topics"]:
            topics += row["topics"]
        if topics:
            self.announce(topics)
        return Finished(verdicts, tuple(claimed)), broken

    def _remember(self, ids: Sequence[str], seqs: Sequence[int]) -> None:
        if len(self._seqs) > MOST_REMEMBERED_SEQS:
            self._seqs.clear()
        self._seqs.update(zip(ids, seqs, strict=True))

    async def finish_on(
        self, connection: Connection, session: str, transitions: Sequence[Transition]
    ) -> tuple[Sequence[Verdict], Sequence[str]]:
        """Apply transitions of a session in the open transaction of a connection.

        Returns the verdicts, and the topics to publish after the commit.
        """
        arguments = self._exchange_arguments(session, transitions, None)
        row = await connection.fetchrow(self._function("exchange", len(arguments)), *arguments)
        assert row is not None
        verdicts = encoding.verdicts_of([t.held for t in transitions], row)
        return verdicts, [*(job_topic(t.held.id) for t in transitions), *(row["topics"] or ())]

    async def progress(self, session: str, reports: Sequence[tuple[Held, bytes]]) -> list[Verdict]:
        for _, value in reports:
            check_size("progress", value, PAYLOAD_BYTES)
        sent = sum(len(value) for _, value in reports)
        row = await self._call("report", session, *encoding.report_columns(reports), sent=sent)
        return list(encoding.verdicts_of([held for held, _ in reports], row))

    async def cancel(self, ids: Sequence[str]) -> list[JobState]:
        for id in ids:
            if not reading.storable(id):
                raise NotFound(f"there is no job {id!r}")
        row = await self._call("cancel", list(ids))
        self.announce([job_topic(id) for id in ids])
        return [encoding.state_of(code) for code in row["states"]]

    async def forget(self, ids: Sequence[str], retention: Retention) -> list[bool]:
        check_ids(ids)
        row = await self._call("forget_final", reading.wanted(ids), retention.id_seconds, retention.retry_id_seconds)
        return list(map(frozenset(row["gone"]).__contains__, ids))

    async def release(self, pool: str, key: str, cleanup: NewJob | None = None) -> Release:
        check_name("pool", pool)
        check_key("key", key)
        if cleanup is not None and cleanup.kind is not JobKind.CLEANUP:
            raise InvalidInput("cleanup", "give a job of kind 'cleanup'")
        row = await self._call("release", pool, key, *encoding.cleanup_values(cleanup))
        return Release(row["answer"])

    # -- the leader's passes -------------------------------------------------------------------------------------

    async def promote(self, *, limit: int = 1_000, term: int | None = None) -> Promoted:
        row = await self._pass("promote", limit, term)
        if row["queues"]:
            self._announce_promoted(row["queues"])
        return Promoted(**{field: row[field] for field in Promoted.__struct_fields__})

    def _announce_promoted(self, queues: Sequence[str]) -> None:
        """Called when jobs of these queues were promoted. Does nothing here: the answer has the topics to notify."""

    async def admit(self, *, limit: int = 1_000, term: int | None = None) -> Admitted:
        row = await self._pass("admit", limit, term)
        return Admitted(admitted=row["admitted"], moved=row["moved"], repaired=row["repaired"], more=row["more"])

    async def rescue(self, *, limit: int = 1_000, declare: bool = True, term: int | None = None) -> Rescued:
        check_count("limit", limit, least=1, most=100_000)
        row = await self._call("rescue", limit, declare, term)
        return Rescued(
            declared=tuple(row["declared"]),
            retried=row["retried"],
            failed=row["failed"],
            cancelled=row["cancelled"],
            lost_bindings=row["lost_bindings"],
            drained=row["drained"],
            more=row["more"],
            now=row["now"],
        )

    async def prune(self, retention: Retention, *, limit: int = 1_000, term: int | None = None) -> Pruned:
        row = await self._pass("prune", limit, term, *encoding.retention_values(retention))
        return Pruned(jobs=row["jobs"], other=row["other"], more=row["more"])

    async def _pass(self, name: str, limit: int, term: int | None, *before: Any) -> Record:
        check_count("limit", limit, least=1, most=100_000)
        return await self._call(name, *before, limit, term)

    async def lead(self, session: str, *, lease: float, term: int | None = None) -> Term | None:
        check_key("session", session)
        check_seconds("lease", lease, least=0.05)
        row = await self._call("lead", session, lease, term)
        if row["number"] is None:
            return None
        return Term(number=row["number"], session=row["session"], lease=row["lease"], remaining=row["remaining"])

    async def resign(self, term: int) -> None:
        await self._call("resign", term)

    # -- the store itself ----------------------------------------------------------------------------------------

    async def recount(self) -> Recount:
        row = await self._call("recount", timeout=LONG_SECONDS)
        return Recount(jobs=row["jobs"], differences=tuple(row["differences"]))

    async def findings(self) -> list[Finding]:
        """What `fairlane doctor` reports about the server."""
        return await health.findings(self._database)

    async def migrate(self) -> int:
        return await migrator.migrate(self._database)

    async def counters(self) -> dict[str, int]:
        """Counters of the server, see `health.counters`."""
        return await health.counters(self._database)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wakeups.close()
        await self.transactions.close()
        await self._database.close()
