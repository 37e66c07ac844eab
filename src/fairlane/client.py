"""The client: send, read, cancel, retry, release, set limits. HTTP, the command line and the dashboard use only this
class. It is thin on purpose: the store makes the decisions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack, overload

import msgspec

from .bulk import Bulk, BulkOptions, Bulks, PurgeOptions
from .errors import InvalidInput, NotFound
from .events import Tracer
from .handle import BroadcastHandle, Cancellation, Handle, cancellation, children, find_job
from .model import codec, lanes, tokens
from .model.binding import Binding, Release
from .model.job import MOST_BYTES_PER_ENQUEUE, Enqueued, Job, JobKind, JobState, NewJob, parts_of
from .model.listings import FailureGroup, LaneListing, LanePage
from .model.maintenance import Recount, Retention
from .model.names import ERROR_BYTES, shown
from .model.reading import Filter, Page, QueueReading
from .model.schedule import StoredSchedule
from .model.session import Session, Term
from .model.settings import LaneRule, QueueOverride, QueueSettings, SettingsChange
from .model.tokens import AccessToken, Scope
from .runtime.connection import Connection
from .store.clock import Clock
from .store.diagnosis import Counted
from .store.transactions import Joining, transactions_of
from .task import Call, Seconds, Task, seconds

R = TypeVar("R")
RETENTION = Retention()
OnSent = Callable[[int, int], None]
"""Called after each part of a long list with the number of jobs stored so far and the total."""


class Client:
    """The operations on a store in terms of tasks and jobs."""

    def __init__(
        self,
        connection: Connection,
        *,
        tracer: Tracer | None = None,
        clock: Clock | None = None,
        retention: Retention = RETENTION,
    ) -> None:
        self._connection = connection
        self._tracer = tracer
        self._clock = clock
        self._retention = retention

    # -- sending -------------------------------------------------------------------------------------------------

    async def enqueue(self, call: Call[R]) -> Handle[R]:
        """Store the job of a call. Sending the same call again creates no second job."""
        jobs = (_job_of(call),)
        store = self._connection.opened
        # The common case calls the store directly: an intermediate coroutine is measurable here, because its code is
        # no longer in the processor's caches when the next call comes.
        [answer] = await (self.send(jobs) if store is None or self._tracer is not None else store.enqueue(jobs))
        return Handle(self._connection, answer.id, call.task.read_result, answer.created)

    async def send(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store up to 1,000 requests, all or none. For code that knows a task only by its name."""
        store = self._connection.opened or await self._connection.store()
        if self._tracer is None:
            return await store.enqueue(jobs)
        with self._tracing(jobs) as traced:
            return await store.enqueue(traced)

    async def enqueue_many(self, calls: Sequence[Call[R]], progress: OnSent | None = None) -> list[Handle[R]]:
        """Store any number of jobs in order, in parts of at most 1,000 jobs and 16 MiB, each part all or none.

        The calls already have their ids: after an error the same list may be sent again, and the missing jobs are
        stored.
        """
        handles: list[Handle[R]] = []
        parts = parts_of(calls, lambda call: _job_of(call).size, most_bytes=MOST_BYTES_PER_ENQUEUE)
        sending: list[asyncio.Task[list[Enqueued]]] = []
        try:
            for number, part in enumerate(parts):
                # Send one part ahead: it is encoded while the store works on the current one.
                sending += [
                    asyncio.create_task(self.send([_job_of(call) for call in other]))
                    for other in parts[number + len(sending) : number + 2]
                ]
                answers = await sending.pop(0)
                handles += map(self._handle_of, part, answers)
                if progress is not None:
                    progress(len(handles), len(calls))
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
        return handles

    async def enqueue_on(self, connection: object, *calls: Call[R]) -> list[Handle[R]]:
        """Store jobs in the transaction that is open on your own connection: they exist once you commit it.

        The connection must be to the store's own database. On PostgreSQL: an asyncpg connection, an `AsyncConnection`
        of psycopg, or an `AsyncConnection` or `AsyncSession` of SQLAlchemy; on SQLite: a sqlite3 connection. Raises
        `Conflict`, `Busy`, `InvalidInput`, and `NotSupported` for a store without transactions.
        """
        if not calls:
            return []
        joining = await self._joining(calls)
        return self._handles_of(calls, await joining.enqueue_on(connection))

    async def _joining(self, calls: Sequence[Call[R]]) -> Joining:
        """Prepare the jobs of calls for a user's connection."""
        transactions = transactions_of(await self._connection.store())
        with self._tracing([_job_of(call) for call in calls]) as jobs:
            await transactions.prepare(jobs)
        return Joining(transactions, jobs)

    def _handles_of(self, calls: Sequence[Call[R]], answers: Sequence[Enqueued]) -> list[Handle[R]]:
        return list(map(self._handle_of, calls, answers))

    async def broadcast(self, call: Call[R], *, pool: str = "default", ttl: Seconds = 0.0) -> BroadcastHandle[R]:
        """Run a call once on every live worker of a pool, and on those that join it within `ttl`."""
        job = _changed(_job_of(call), kind=JobKind.BROADCAST, pool=pool, ttl=seconds("ttl", ttl))
        [answer] = await self.send([job])
        return BroadcastHandle(self._connection, answer.id, call.task.read_result, answer.created)

    async def release(self, key: str, *, cleanup: Call[Any] | None = None, pool: str = "default") -> Release:
        """Release a sticky key: its clean-up runs first and alone, on the worker the key is bound to."""
        store = await self._connection.store()
        if cleanup is None:
            return await store.release(pool, key)
        with self._tracing([_changed(_job_of(cleanup), kind=JobKind.CLEANUP, pool=pool)]) as [job]:
            return await store.release(pool, key, job)

    @contextmanager
    def _tracing(self, jobs: Sequence[NewJob]) -> Iterator[Sequence[NewJob]]:
        """The jobs with the tracer's headers; one span covers them all."""
        if self._tracer is None:
            yield jobs
            return
        with self._tracer.headers(jobs[0].task, jobs[0].queue) as headers:
            if headers is None:
                yield jobs
            else:
                carried = codec.encode("headers", headers, ERROR_BYTES)
                yield [_changed(job, headers=carried) for job in jobs]

    def _handle_of(self, call: Call[R], answer: Enqueued) -> Handle[R]:
        return Handle(self._connection, answer.id, call.task.read_result, answer.created)

    # -- one job -------------------------------------------------------------------------------------------------

    @overload
    def handle(self, id: str) -> Handle[Any]: ...
    @overload
    def handle(self, id: str, task: Task[..., R]) -> Handle[R]: ...
    def handle(self, id: str, task: Task[..., Any] | None = None) -> Handle[Any]:
        """The handle of a job that was sent before. With its task, the result is decoded into the task's type."""
        return Handle(self._connection, id, _read_any if task is None else task.read_result, created=False)

    async def job(self, id: str) -> Job:
        """A job with its history."""
        return await find_job(await self._connection.store(), id)

    async def children(self, id: str) -> list[Job]:
        """The copies of a broadcast; none for any other job."""
        return await children(await self._connection.store(), id)

    async def cancel(self, ids: Sequence[str]) -> list[Cancellation]:
        """Cancel jobs. If an id is unknown, raises `NotFound` and cancels none."""
        return [cancellation(state) for state in await (await self._connection.store()).cancel(ids)]

    async def retry(self, id: str) -> Handle[Any]:
        """Run a job that has ended again, as a new job."""
        return await self.handle(id).retry()

    # -- many jobs -----------------------------------------------------------------------------------------------

    async def retry_all(self, **options: Unpack[BulkOptions]) -> Bulk:
        """Run every selected job that has ended again; failed ones unless `state` is given.

        No job is retried twice, however often this is interrupted and repeated; a retry that failed is a job of its
        own. `progress` is called after each page, `most` bounds how many jobs are examined, and a dry run changes
        nothing. After an error the call may be repeated and continues with the rest.
        """
        return await (await self._bulks()).retry(options)

    async def cancel_all(self, **options: Unpack[BulkOptions]) -> Bulk:
        """Cancel every selected job that has not ended: waiting ones immediately, running ones by a cancel request."""
        return await (await self._bulks()).cancel(options)

    async def purge(self, **options: Unpack[PurgeOptions]) -> Bulk:
        """Delete every selected job that has ended, before its retention is over.

        With `cancel_waiting` also waiting jobs, which are cancelled first. Running jobs stay. Ids stay taken as they do
        when retention removes a job.
        """
        return await (await self._bulks()).purge(options, self._retention)

    async def _bulks(self) -> Bulks:
        now = time.time() if self._clock is None else self._clock.now()
        return Bulks(await self._connection.store(), self.send, now=now)

    # -- reading -------------------------------------------------------------------------------------------------

    async def schedules(self) -> list[StoredSchedule]:
        """Every schedule that was declared, by name."""
        return await (await self._connection.store()).schedules()

    async def find(
        self,
        *,
        state: JobState | None = None,
        queue: str | None = None,
        lane: str | None = None,
        task: str | None = None,
        sticky: str | None = None,
        worker: str | None = None,
        error_group: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page:
        """A page of jobs, newest first; pass the `cursor` of a page to get the next one."""
        where = Filter(
            state=state, queue=queue, lane=lane, task=task, sticky=sticky, worker=worker, error_group=error_group
        )
        return await (await self._connection.store()).find(where, limit=limit, cursor=cursor)

    async def queues(self) -> list[QueueReading]:
        """Every queue, by name."""
        return await (await self._connection.store()).queues()

    async def counters(self) -> dict[str, int]:
        """Counts that the store's servers keep: deadlocks of PostgreSQL, tokens in Redis. Empty if there are none."""
        store = await self._connection.store()
        return await store.counters() if isinstance(store, Counted) else {}

    async def lanes(self, queue: str, *, limit: int = 100, cursor: str | None = None) -> LaneListing:
        """The lanes of a queue that have work, the longest backlog first: a list with a `cursor` for the next page."""
        return await (await self._connection.store()).lanes(queue, limit=limit, cursor=cursor)

    async def lane_line(self, queue: str, lane: str | None, *, limit: int = 50, cursor: str | None = None) -> LanePage:
        """A page of a lane's jobs in the order in which they start: the running ones, then the waiting ones."""
        return await (await self._connection.store()).lane_line(queue, lane, limit=limit, cursor=cursor)

    async def failures(
        self, *, queue: str | None = None, task: str | None = None, limit: int = 50
    ) -> list[FailureGroup]:
        """Failed jobs that are still kept, grouped by task and error group, the largest group first."""
        return await (await self._connection.store()).failures(queue=queue, task=task, limit=limit)

    async def sessions(self) -> list[Session]:
        """Every session that retention still keeps, the newest first."""
        return await (await self._connection.store()).sessions()

    async def bindings(self, pool: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Binding]:
        """Bindings, open ones first, then the latest."""
        return await (await self._connection.store()).bindings(pool, key, limit=limit)

    async def leader(self) -> Term | None:
        """The current term; None if there is no leader."""
        return await (await self._connection.store()).leader()

    # -- settings ------------------------------------------------------------------------------------------------

    async def pause(self, queue: str, lane: str | None = None) -> None:
        """Start no more jobs of a queue, or of one of its lanes; running jobs continue."""
        await self._set_paused(queue, lane, True)

    async def resume(self, queue: str, lane: str | None = None) -> None:
        """Undo `pause`."""
        await self._set_paused(queue, lane, False)

    async def set_limit(self, queue: str, limit: int | None, *, lane: str | None = None) -> None:
        """Override how many jobs of a queue, or of one of its lanes, run at once; None for no limit."""
        reading, override = await self._override(queue)
        if lane is None:
            changed = msgspec.structs.replace(override, limit=limit)
        else:
            rule = _rule(reading.settings, lane)
            ordered = None if limit is None else rule.ordered
            changed = _with_rule(override, msgspec.structs.replace(rule, limit=limit, ordered=ordered))
        await self._lay_over(queue, changed)

    async def clear_limit(self, queue: str, *, lane: str | None = None) -> None:
        """Undo `set_limit`: the declared limit of the queue, or of the lanes that match `lane`, applies again."""
        reading, override = await self._override(queue)
        if lane is None:
            await self._lay_over(queue, msgspec.structs.replace(override, limit=msgspec.UNSET))
            return
        others = _without_rule(override, lane)
        if any(rule.paused for rule in override.lanes if rule.pattern == lane):
            # A pause is independent of the limit, and stays.
            rule = _rule(others.over(reading.declared), lane)
            others = _with_rule(others, msgspec.structs.replace(rule, paused=True))
        await self._lay_over(queue, others)

    async def clear_override(self, queue: str) -> None:
        """Undo every `pause` and `set_limit` of the queue and of its lanes: only the declaration applies."""
        await self._override(queue)
        await self._lay_over(queue, None)

    async def _set_paused(self, queue: str, lane: str | None, paused: bool) -> None:
        reading, override = await self._override(queue)
        if lane is None:
            # Resuming removes the override: `paused=False` would hide a later declaration.
            undone = not paused and (override.paused is True or not reading.settings.paused)
            changed = msgspec.structs.replace(override, paused=msgspec.UNSET if undone else paused)
        else:
            rule = msgspec.structs.replace(_rule(reading.settings, lane), paused=paused)
            changed = _with_rule(override, rule)
            others = _without_rule(reading.settings, lane)
            if not paused and lanes.terms(others, lane) == lanes.terms(_only(rule), lane):
                # The rule adds nothing to the others: left in place it would hide a later declaration.
                changed = _without_rule(override, lane)
        await self._lay_over(queue, changed)

    async def _override(self, queue: str) -> tuple[QueueReading, QueueOverride]:
        for reading in await self.queues():
            if reading.name == queue:
                return reading, reading.override or QueueOverride()
        raise NotFound(f"queue {shown(queue)} does not exist yet; declare it with app.queue() or enqueue a job")

    async def _lay_over(self, queue: str, override: QueueOverride | None) -> None:
        if override == QueueOverride():
            override = None
        await (await self._connection.store()).configure([SettingsChange(queue=queue, override=override)])

    # -- tokens of the HTTP service ------------------------------------------------------------------------------

    async def make_token(
        self,
        name: str,
        scopes: Sequence[Scope | str],
        queues: Sequence[str] | None = None,
        lane_prefix: str | None = None,
        expires: Seconds | None = None,
    ) -> tuple[AccessToken, str]:
        """Create a token and return it with its secret, which is not stored and cannot be shown again."""
        lasts = None if expires is None else seconds("expires", expires)
        token, secret = tokens.make(name, scopes, queues=queues, lane_prefix=lane_prefix, expires=lasts)
        return await (await self._connection.store()).add_token(token), secret

    async def tokens(self) -> list[AccessToken]:
        """Every token, the oldest first, including revoked and expired ones."""
        return await (await self._connection.store()).tokens()

    async def revoke_token(self, id: str) -> bool:
        """Revoke a token permanently; False if it was revoked before."""
        return await (await self._connection.store()).revoke_token(id)

    # -- the store itself ----------------------------------------------------------------------------------------

    async def recount(self) -> Recount:
        """Recompute all derived data, correct differences, and report them."""
        return await (await self._connection.store()).recount()

    async def migrate(self) -> int:
        """Bring the schema up to date and return its version."""
        return await (await self._connection.store()).migrate()


S = TypeVar("S", QueueSettings, QueueOverride)


def _job_of(call: object) -> NewJob:
    if not isinstance(call, Call):
        got = type(call).__name__
        raise InvalidInput(
            "call", f"expected a call such as render.call('ann'), not a {got}; render('ann') runs the function here"
        )
    return call.job


def _rule(settings: QueueSettings, lane: str) -> LaneRule:
    """The settings that apply to a lane, as a rule for that lane alone."""
    matching = [rule for rule in settings.lanes if rule.matches(lane)]
    closest = max(matching, key=lambda r: (len(r.prefix), not r.pattern.endswith("*")), default=None)
    return LaneRule(pattern=lane) if closest is None else msgspec.structs.replace(closest, pattern=lane)


def _only(rule: LaneRule) -> QueueSettings:
    return QueueSettings(lanes=(rule,))


def _without_rule(settings: S, lane: str) -> S:
    return msgspec.structs.replace(settings, lanes=tuple(r for r in settings.lanes if r.pattern != lane))


def _with_rule(override: QueueOverride, rule: LaneRule) -> QueueOverride:
    others = _without_rule(override, rule.pattern)
    return msgspec.structs.replace(others, lanes=(*others.lanes, rule))


def _changed(job: NewJob, **fields: Any) -> NewJob:
    return msgspec.structs.replace(job, **fields)


_anything: codec.Reader[Any] = codec.Reader("result", Any)


def _read_any(raw: bytes | None) -> Any:
    return _anything.read(raw or b"null")
