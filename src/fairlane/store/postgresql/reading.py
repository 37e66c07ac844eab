"""Reading: jobs, pages of them, queues, lanes, sessions and bindings. Each is one statement: one snapshot, one round
trip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ...errors import NotFound
from ...model.binding import Binding
from ...model.job import Job
from ...model.lanes import terms
from ...model.listings import LaneListing, LanesCursor, lanes_page
from ...model.reading import (
    COUNTED_WHOLE,
    LANES_LOOKED_AT,
    MOST_DECLINED,
    Counts,
    DeclinedTask,
    Filter,
    LaneReading,
    Page,
    QueueReading,
    check_page,
)
from ...model.schedule import StoredSchedule
from ...model.session import Session, SessionKind, SessionState, Term
from ...model.slots import Reserved, Slots
from ..shared.rows import binding_of, job_of, position_of, schedules_of
from ..shared.stored_settings import read_settings, readable
from .database import Record

LONG_SECONDS = 60.0
"""The timeout of a read that may examine every job, because its filters match few of them."""

_lanes = msgspec.json.Decoder(list[tuple[str | None, int, int, bool, float | None]])


class Source(Protocol):
    """Runs statements: the pool, or a single connection."""

    async def fetch(self, sql: str, *args: Any, timeout: float | None = None) -> list[Record]:
        """All rows of one statement."""

    async def fetchrow(self, sql: str, *args: Any, timeout: float | None = None) -> Record | None:
        """The first row of one statement."""


class View:
    """Runs named queries, at the time of an injected clock; None stands for the server's clock."""

    def __init__(self, source: Source, sql: Mapping[str, str], now: float | None, lease: float | None) -> None:
        self._source = source
        self._sql = sql
        self.now = now
        self.lease = lease

    async def one(self, name: str, *values: Any, timeout: float | None = None) -> Record | None:
        """The first row of a query, or None."""
        return await self._source.fetchrow(self._sql[name], *values, timeout=timeout)

    async def all(self, name: str, *values: Any, timeout: float | None = None) -> list[Record]:
        """Every row of a query."""
        return await self._source.fetch(self._sql[name], *values, timeout=timeout)


def storable(text: str) -> bool:
    """Whether the server can store a text: not with a NUL character or lone surrogates."""
    if "\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def wanted(ids: Iterable[str]) -> list[str]:
    """The ids that can exist in the store, each once."""
    return [id for id in dict.fromkeys(ids) if storable(id)]


async def get(view: View, ids: Sequence[str]) -> list[Job | None]:
    """Jobs by id, in the order of the ids."""
    asked = wanted(ids)
    rows = await view.all("read_jobs", asked) if asked else []
    found = {row[1]: job_of(row) for row in rows}
    return [found.get(id) for id in ids]


async def find(view: View, where: Filter, limit: int, cursor: str | None) -> Page:
    """A page, newest first: the most selective filter picks the index, the others are checked job by job."""
    check_page(limit)
    # Read one job more than the page shows, to know whether there is a next page.
    rows = await view.all(
        "read_page", None if where.state is None else where.state.value, where.queue, where.lane, where.task,
        where.sticky, where.worker, where.error_group, position_of(cursor), limit + 1, timeout=LONG_SECONDS,
    )  # fmt: skip
    more = len(rows) > limit
    return Page(tuple(map(job_of, rows[:limit])), str(rows[limit - 1][0]) if more else None)


async def queues(view: View) -> list[QueueReading]:
    """Every queue with its counts."""
    readings = []
    rows = await view.all("read_queues", view.lease, view.now, LANES_LOOKED_AT)
    for name, version, declared, override, tallies, workers, oldest_wait in rows:
        stored = read_settings(name, declared, override)
        classes = [Counts(), Counts(), Counts()]
        for class_, scheduled, pending, running, completed, failed, cancelled in tallies or ():
            classes[class_] = Counts(
                scheduled=scheduled, pending=pending, running=running, completed=completed, failed=failed,
                cancelled=cancelled,
            )  # fmt: skip
        readings.append(
            QueueReading(
                name=name,
                settings=stored.settings,
                declared=stored.declared,
                version=version,
                override=stored.override,
                classes=(classes[0], classes[1], classes[2]),
                workers=workers,
                oldest_wait=oldest_wait,
                problem=stored.problem,
            )
        )
    return readings


async def lanes(view: View, queue: str, limit: int, cursor: LanesCursor | None = None) -> LaneListing:
    """Lanes of a queue that have work."""
    check_page(limit)
    row = None
    if storable(queue) and (cursor is None or storable(cursor.lane)):
        after = (None, None, None, 0) if cursor is None else (cursor.pending, cursor.running, cursor.lane, cursor.shown)
        row = await view.one("read_lanes", queue, limit + 1, COUNTED_WHOLE, *after, view.now)
    if row is None:
        raise NotFound(f"there is no queue {queue!r}")
    declared, override, counted, whole = row
    settings = read_settings(queue, declared, override).settings
    found = [
        LaneReading(
            queue=queue,
            lane=lane,
            terms=terms(settings, lane),
            pending=pending,
            running=running,
            exact=exact,
            oldest_wait=oldest_wait,
        )
        for lane, pending, running, exact, oldest_wait in (() if counted is None else _lanes.decode(counted))
    ]
    return lanes_page(found, cursor, limit, exact=whole)


async def declined(view: View, limit: int) -> list[DeclinedTask]:
    """Tasks with jobs that workers declined, the longest waiting first."""
    rows = await view.all("read_declined", check_page(limit), MOST_DECLINED, view.lease)
    return [
        DeclinedTask(queue=queue, task=task, waiting=waiting, since=since, known=known)
        for queue, task, waiting, since, known in rows
    ]


async def sessions(view: View) -> list[Session]:
    """Every session, the newest first."""
    rows = await view.all("read_sessions", None, view.lease)
    known = await _task_sets(view, rows)
    return readable("session", lambda row: _session(row, known), rows)


async def session(view: View, id: str) -> Session:
    """One session that exists."""
    row = await view.one("read_sessions", id, view.lease)
    if row is None:
        raise NotFound(f"there is no session {id!r}")
    return _session(row, await _task_sets(view, [row]))


async def _task_sets(view: View, sessions: Sequence[Record]) -> dict[str, tuple[str, ...]]:
    """The task sets of sessions, each read once."""
    wanted = {row["task_set"] for row in sessions} - {None}
    rows = await view.all("read_task_sets", list(wanted)) if wanted else []
    return {id: tuple(tasks) for id, tasks in rows}


def _session(row: Record, task_sets: Mapping[str, tuple[str, ...]]) -> Session:
    (
        id, kind, state, host, pid, pool, index, named, queues, slots, reserved_high, reserved_normal,
        high, normal, low, turns, started_at, lease, remaining, task_set,
    ) = row  # fmt: skip
    running = [high, normal, low]
    for class_ in turns:
        running[class_] += 1
    reserved = Reserved(high=reserved_high, normal=reserved_normal)
    return Session(
        id=id,
        kind=SessionKind(kind),
        state=SessionState(state),
        host=host,
        pid=pid,
        pool=pool,
        index=index,
        named=named,
        queues=tuple(queues),
        slots=None if slots is None else Slots(total=slots, reserved=reserved),
        started_at=started_at,
        lease=lease,
        remaining=remaining,
        running=(running[0], running[1], running[2]),
        tasks=None if task_set is None else task_sets.get(task_set),
    )


async def bindings(view: View, pool: str | None, key: str | None, limit: int) -> list[Binding]:
    """Bindings, open ones first, then the latest."""
    check_page(limit)
    if not all(storable(text) for text in (pool, key) if text is not None):
        return []
    return readable("binding", binding_of, await view.all("read_bindings", pool, key, limit))


async def leader(view: View) -> Term | None:
    """The current term; None if there is no leader."""
    row = await view.one("read_leader", view.lease)
    if row is None or row[3] <= 0:
        return None
    return Term(number=row[0], session=row[1], lease=row[2], remaining=row[3])


async def schedules(view: View) -> list[StoredSchedule]:
    """Every schedule, by name."""
    return schedules_of(await view.all("read_schedules", view.now))
