"""Reading jobs, queues, sessions, bindings and service times. Each call sees one snapshot of the file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice
from statistics import median_high
from typing import Any

import msgspec

from ...model.binding import Binding
from ...model.job import Job, waiting_since
from ...model.reading import (
    LANES_LOOKED_AT,
    MOST_DECLINED,
    Counts,
    DeclinedTask,
    Filter,
    Page,
    QueueReading,
    check_page,
)
from ...model.schedule import StoredSchedule
from ...model.session import Session, SessionKind, SessionState, Term
from ...model.slots import Reserved, Slots
from ..clock import Clock
from ..positions import Worker
from ..shared.rows import binding_of, job_of, position_of, readable_attempts, schedules_of
from ..shared.stored_settings import StoredSettings, read_settings, readable
from .records import SQL, Queries, StoredSession, json_texts, lease_left


class View:
    """A snapshot for reading."""

    def __init__(self, connection: sqlite3.Connection, clock: Clock) -> None:
        self.connection = connection
        self.now = clock.now()
        self.mono = clock.monotonic()
        self.boot = clock.boot()

    def one(self, name: str, *values: Any) -> Any:
        """Return the first row of a query, or None."""
        return self.connection.execute(SQL[name], values).fetchone()

    def all(self, name: str, *values: Any) -> list[Any]:
        """Return every row of a query."""
        return self.connection.execute(SQL[name], values).fetchall()

    def settings(self) -> dict[int, tuple[str, int, StoredSettings]]:
        """Return the name, version and settings of every queue, by id."""
        found = {}
        for number, name, version, declared, override in self.all("queues_read"):
            found[number] = (name, version, read_settings(name, declared, override))
        return found


def get(view: View, ids: Sequence[str]) -> list[Job | None]:
    """Return jobs by id, in the order of the ids."""
    rows = view.all("jobs_by_ids", json_texts(ids))
    found = {row[1]: job_of(row) for row in rows}
    return [found.get(id) for id in ids]


def find(view: View, where: Filter, limit: int, cursor: str | None) -> Page:
    """Return a page, newest first. The narrowest filter selects the index; the others are checked for each job."""
    check_page(limit)
    before = position_of(cursor)
    queue = None
    if where.queue is not None:
        row = view.one("queue_by_name", where.queue)
        if row is None:
            return Page((), None)
        queue = row[0]
    jobs: list[Job] = []
    candidates = _candidates(view, where, queue, before)
    last = None
    # Read one job more than the page shows, to know whether there is a next page.
    while len(jobs) <= limit:
        batch = list(islice(candidates, limit + 1))
        if not batch:
            break
        for row in view.all("jobs_by_seqs", msgspec.json.encode(batch).decode()):
            job = job_of(row)
            if _matches(job, where):
                jobs.append(job)
                if len(jobs) == limit:
                    last = row[0]
    more = len(jobs) > limit
    return Page(tuple(jobs[:limit]), str(last) if more else None)


def _candidates(view: View, where: Filter, queue: int | None, before: int) -> Iterator[int]:
    """Return seqs of jobs, newest first, from the index that narrows most."""
    execute = view.connection.execute
    if where.error_group is not None:
        rows = execute(SQL["find_error"], (where.error_group, before))
    elif where.worker is not None:
        return _of_worker(view, where.worker, before)
    elif where.sticky is not None:
        rows = execute(SQL["find_sticky"], (where.sticky, before))
    elif where.lane is not None:
        rows = execute(SQL["find_lane"], (queue, where.lane, before))
    elif where.state is not None and not where.state.final:
        rows = execute(SQL[f"find_{where.state.value}"], (before,))
    elif where.task is not None:
        rows = execute(SQL["find_task"], (where.task, before))
    elif queue is not None:
        rows = execute(SQL["find_queue"], (queue, before))
    elif where.state is not None:
        rows = execute(SQL[f"find_{where.state.value}"], (before,))
    else:
        rows = execute(SQL["find_all"], (before,))
    return (seq for (seq,) in rows)


def _of_worker(view: View, worker: str, before: int) -> Iterator[int]:
    """Return the jobs that wait for a worker, run in it or ended in it, over all sessions with its index."""
    pool, _, index = worker.rpartition("/")
    if not (index.isascii() and index.isdigit() and len(index) < 10):
        return iter(())
    execute = view.connection.execute
    runs = [(-seq for (seq,) in execute(SQL["find_inbox"], (worker, before)))]
    for (session,) in view.all("sessions_of_worker", pool, int(index)):
        runs += [
            (-seq for (seq,) in execute(SQL[name], (session, before)))
            for name in ("find_session_active", "find_session")
        ]
    return (-seq for seq in merge(*runs))


def _matches(job: Job, where: Filter) -> bool:
    for field in ("state", "queue", "lane", "task", "sticky", "worker", "error_group"):
        wanted = getattr(where, field)
        if wanted is not None and getattr(job, field) != wanted:
            return False
    return True


def queues(view: View) -> list[QueueReading]:
    """Return every queue with its counts."""
    counts_of = {
        (queue, class_): Counts(**dict(zip(_COUNTS, counts, strict=True)))
        for queue, class_, *counts in view.all("queue_counts_read")
    }
    gated = {queue: (arrival, seq) for queue, arrival, seq in view.all("oldest_gated", LANES_LOOKED_AT)}
    readings = []
    for number, (name, version, stored) in view.settings().items():
        readings.append(
            QueueReading(
                name=name,
                settings=stored.settings,
                declared=stored.declared,
                version=version,
                override=stored.override,
                classes=(
                    counts_of.get((number, 0), Counts()),
                    counts_of.get((number, 1), Counts()),
                    counts_of.get((number, 2), Counts()),
                ),
                workers=len(view.all("workers_of_queue", view.boot, view.mono, name)),
                oldest_wait=_oldest_wait(view, number, gated.get(number)),
                problem=stored.problem,
            )
        )
    return readings


def _oldest_wait(view: View, queue: int, gated: tuple[int, int] | None) -> float | None:
    found = [gated] if gated is not None else []
    for (domain,) in view.all("domains_of_queue", queue):
        found += view.all("oldest_in_domain", domain, LANES_LOOKED_AT)
    found += [row for row in view.all("oldest_in_lanes", queue, LANES_LOOKED_AT) if row[0] is not None]
    if not found:
        return None
    return waited_seconds(view, min(found)[1])


def waited_seconds(view: View, seq: int) -> float:
    """Return how long a job has been waiting."""
    enqueued_at, delay, run_at, attempts = view.one("waiting_since", seq)
    ended = [attempt.ended_at for attempt in readable_attempts(attempts)]
    return max(0.0, view.now - waiting_since(enqueued_at, delay, run_at, ended[-1] if ended else None))


_COUNTS = ("scheduled", "pending", "running", "completed", "failed", "cancelled")


def declined(view: View, limit: int) -> list[DeclinedTask]:
    """Return the tasks of declined jobs, the longest waiting first."""
    check_page(limit)
    return [
        DeclinedTask(queue=queue, task=task, waiting=waiting, since=since, known=is_task_known(view, task, queue))
        for queue, task, waiting, since in view.all("declined_tasks", MOST_DECLINED, limit)
    ]


def sessions(view: View) -> list[Session]:
    """Return every session, newest first."""
    loads: dict[int, list[int]] = {}
    for session, class_, count in view.all("sessions_load"):
        loads.setdefault(session, [0, 0, 0])[class_] = count
    known = _task_sets(view, None)
    return readable("session", lambda row: _session(view, StoredSession(*row), loads, known), view.all("sessions_read"))


def session(view: View, id: str) -> Session:
    """Return a session that exists."""
    stored = StoredSession(*view.one("session_by_id", id))
    load = [0, 0, 0]
    for class_, count in view.all("session_load", stored.seq):
        load[class_] = count
    return _session(view, stored, {stored.seq: load}, _task_sets(view, id))


def _task_sets(view: View, session: str | None) -> dict[str, tuple[str, ...]]:
    rows = view.all("task_sets", session)
    return dict(readable("set of tasks", lambda row: (row[0], msgspec.json.decode(row[1], type=tuple[str, ...])), rows))


def _session(
    view: View, stored: StoredSession, loads: dict[int, list[int]], task_sets: Mapping[str, tuple[str, ...]]
) -> Session:
    high, normal, low = loads.get(stored.seq, [0, 0, 0])
    reserved = Reserved(high=stored.reserved_high, normal=stored.reserved_normal)
    return Session(
        id=stored.id,
        kind=SessionKind(stored.kind),
        state=SessionState(stored.state),
        host=stored.host,
        pid=stored.pid,
        pool=stored.pool,
        index=stored.index,
        named=bool(stored.named),
        queues=msgspec.json.decode(stored.queues, type=tuple[str, ...]),
        slots=None if stored.slots is None else Slots(total=stored.slots, reserved=reserved),
        started_at=stored.started_at,
        lease=stored.lease,
        remaining=stored.remaining(view.mono, view.boot),
        running=(high, normal, low),
        tasks=None if stored.task_set is None else task_sets.get(stored.task_set),
    )


def bindings(view: View, pool: str | None, key: str | None, limit: int) -> list[Binding]:
    """Return open bindings, then closed ones, the latest first."""
    check_page(limit)
    if key is not None:
        rows = view.all("bindings_of_key", key, pool, limit)
    else:
        rows = view.all("bindings_open", pool, limit)
        if len(rows) < limit:
            rows += view.all("bindings_closed", pool, limit - len(rows))
    return readable("binding", binding_of, rows)


def leader(view: View) -> Term | None:
    """Return the current term, if there is a leader."""
    row = view.one("leader")
    if row is None or row[1] is None:
        return None
    left = lease_left(row[4], row[3], row[2], view.mono, view.boot)
    return Term(number=row[0], session=row[1], lease=row[2], remaining=left) if left > 0 else None


def schedules(view: View) -> list[StoredSchedule]:
    """Return every schedule, by name."""
    return schedules_of(view.all("schedules_read", view.now))


def workers_of(queries: Queries, queue: str, inbox: str = "") -> list[Worker]:
    """Return the live workers that could run a job: the one its inbox names, else all that serve the queue."""
    if not inbox or inbox.endswith("/"):
        return queries.all("workers_of_queue", queries.boot, queries.mono, queue)
    pool, _, index = inbox.rpartition("/")
    row = queries.one("worker_at", pool, int(index), queries.boot, queries.mono)
    return [] if row is None else [row]


def is_task_known(queries: Queries, task: str, queue: str, inbox: str = "") -> bool:
    """Return whether one of those workers knows a task. A worker that did not report its tasks may know it."""
    if not inbox or inbox.endswith("/"):
        return bool(queries.one("task_known", task, queries.boot, queries.mono, queue)[0])
    pool, _, index = inbox.rpartition("/")
    return bool(queries.one("task_known_at", task, queries.boot, queries.mono, pool, int(index))[0])


def median_seconds(queries: Queries, queue: int) -> float | None:
    """Return the median run time of the last jobs of a queue; None if none has completed."""
    times = [max(0.0, time) for (time,) in queries.all("service_times", queue)]
    return median_high(times) if times else None
