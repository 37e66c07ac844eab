"""The reading verbs: jobs, positions, queues, lanes, failures, sessions, bindings, schedules and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import SchemaMismatch, StoreError
from ...model import listings
from ...model.binding import Binding
from ...model.job import Job, JobState, waiting_since
from ...model.lanes import terms
from ...model.listings import (
    ERROR_TAIL,
    FailureGroup,
    LaneListing,
    LanePage,
    LanesCursor,
    LineCursor,
    LineRow,
    comes_after,
    lane_order,
    lanes_page,
    largest_first,
    line_page,
)
from ...model.reading import (
    LANES_LOOKED_AT,
    MOST_DECLINED,
    Counts,
    DeclinedTask,
    Filter,
    JobPosition,
    LaneReading,
    Page,
    QueueReading,
    check_page,
    room_after,
)
from ...model.schedule import StoredSchedule
from ...model.session import Session, SessionState, Term
from ...model.tokens import AccessToken
from ..codes import STATES
from ..positions import MANY_LANES, MOST_COUNTED, MOST_LANES, QueueSnapshot, WaitingJob, Worker, job_position, servers
from ..shared.rows import position_of, schedules_of
from ..shared.stored_settings import read_settings, readable
from . import records
from .encoding import TIME, decode, encode, read_content
from .functions import Functions

MOST_SCANNED = 100
MOST_FAILURES_PER_CALL = 500
"""Failed jobs are read in parts of this size, so that other calls are served in between."""
_COUNTS = ("scheduled", "pending", "running", "completed", "failed", "cancelled")
SETS_OF_STATES = {
    JobState.SCHEDULED: "later",
    JobState.PENDING: "alive/",
    JobState.FAILED: f"by:state:{STATES.index(JobState.FAILED)}",
    JobState.CANCELLED: f"by:state:{STATES.index(JobState.CANCELLED)}",
}
"""The index for jobs in a state. Running jobs are found by their sessions, and completed ones by their tasks."""


async def schema(functions: Functions, known: int) -> int:
    """The schema of the namespace, for a user without write access. Raises if it is newer than `known`."""
    found = await functions.look("HGET", "counter", "schema")
    if found is None:
        raise StoreError(
            "the namespace does not exist yet, and this user may not create it. "
            "Run `fairlane migrate` as a user with the owner role."
        )
    if int(found) > known:
        raise SchemaMismatch(
            f"the namespace has schema {int(found)}, and this version knows {known}; upgrade Fairlane here, or use "
            "another namespace=…"
        )
    return int(found)


async def leader(functions: Functions) -> Term | None:
    """The current term, or None."""
    return records.term_of(await functions.call("leader"))


async def get(functions: Functions, ids: Sequence[str]) -> list[Job | None]:
    """Jobs by their ids; None for unknown ones."""
    answer = await functions.call("get", encode([id for id in ids if storable(id)]))
    found = {job.id: job for job in map(records.job_of, answer["parts"])}
    return [found.get(id) for id in ids]


async def find(functions: Functions, where: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
    """A page, newest first: the most selective filter picks the index, the others are checked job by job.

    Completed jobs have no index of their own, which each of them would pay for; the server passes what is in front of
    them in blocks, and a call that finds none returns where to continue.
    """
    check_page(limit)
    found: list[tuple[int, Job]] = []
    before, more = position_of(cursor), True
    names = await _sets_of(functions, where)
    in_blocks = where.state is JobState.COMPLETED and all(name.endswith("/") for name in names)
    asked = encode(names), min(limit + 1, MOST_SCANNED), "1" if in_blocks else ""
    while more and len(found) <= limit:
        *jobs, rest = (await functions.call("scan", before, *asked))["parts"]
        more = bool(rest)
        for parts in jobs:
            before = int(parts[0])
            job = records.job_of(parts) if len(parts) > 1 else None
            if job is not None and _matches(job, where):
                found.append((before, job))
    page = found[:limit]
    return Page(tuple(job for _, job in page), str(page[-1][0]) if len(found) > limit else None)


async def _sets_of(functions: Functions, where: Filter) -> list[str]:
    """The most selective index."""
    if where.error_group is not None:
        return [f"by:group:{where.error_group}"]
    if where.worker is not None:
        return await _sets_of_worker(functions, where.worker)
    if where.sticky is not None:
        return [f"by:sticky:{where.sticky}"]
    number: str | None = None
    if where.queue is not None:
        found = await functions.look("HGET", "queues", where.queue)
        if found is None:
            return []
        number = found.decode()
    if where.lane is not None and number is not None:
        return [f"by:lane:{number}|{where.lane}"]
    if where.state is JobState.RUNNING:
        present = (SessionState.LIVE, SessionState.STOPPING)
        held = [session for session in await sessions(functions) if session.state in present or any(session.running)]
        return ["parents", *(name for session in held for name in _held_sets(session.id))]
    if where.state in SETS_OF_STATES:
        return [SETS_OF_STATES[where.state]]
    names = [name.decode() for name in await functions.look("SMEMBERS", "tasks")]
    return [
        f"by:task:{name}/"
        for name in names
        for queue, _, task in [name.partition(":")]
        if number in (None, queue) and where.task in (None, task)
    ]


async def _sets_of_worker(functions: Functions, worker: str) -> list[str]:
    """Jobs that wait for a worker, run there or ended there, over all sessions of its pool and index."""
    held = [session.id for session in await sessions(functions) if session.worker == worker]
    live = [name for id in held for name in _held_sets(id)]
    return [f"inboxed:{worker}", *live, *(f"by:session:{id}/" for id in held)]


async def queues(functions: Functions) -> list[QueueReading]:
    """Every queue, by name."""
    answer, parts = await functions.call_for_parts("queues", LANES_LOOKED_AT)
    waits = [_wait(float(answer["now"]), *parts[index : index + 2]) for index in range(0, len(parts), 2)]
    readings = []
    for (name, record, classes), oldest_wait in sorted(
        zip(answer["queues"], waits, strict=True), key=lambda q: q[0][0]
    ):
        stored = read_settings(name, record.get("declared"), record.get("override"))
        # The effective settings are stored as well, in the form that the functions read.
        counted = read_settings(name, record.get("settings", b"{}"), None)
        counts = [Counts(**dict(zip(_COUNTS, numbers, strict=True))) for numbers in classes]
        readings.append(
            QueueReading(
                name=name,
                settings=counted.settings,
                declared=stored.declared,
                version=record["version"],
                override=stored.override,
                classes=(counts[0], counts[1], counts[2]),
                workers=sum(name in queues for queues in answer["serving"]),
                oldest_wait=oldest_wait,
                problem=stored.problem or counted.problem,
            )
        )
    return readings


def _wait(now: float, job: bytes, attempts: bytes) -> float | None:
    """How long a job has waited, from its content and its claims; None without a job."""
    if not job:
        return None
    try:
        enqueued_at, content = read_content(job)
        ended = [each["ended_at"] for each in (decode(attempts) if attempts else ())]
    except Exception:
        return None  # damaged: the next claim of it fails it
    return max(0.0, now - waiting_since(enqueued_at, content.delay, content.run_at, ended[-1] if ended else None))


async def lanes(functions: Functions, queue: str, limit: int, cursor: LanesCursor | None) -> LaneListing:
    """The lanes of a queue that have work, the longest backlog first."""
    check_page(limit)
    after = b"" if cursor is None else encode([cursor.pending, cursor.running, cursor.lane])
    answer, parts = await functions.call_for_parts("lanes", queue, limit + 1, after)
    settings = read_settings(queue, answer["settings"], None).settings
    now = float(answer["now"])
    found = []
    for index, (name, waits, runs) in enumerate(answer["lanes"]):
        if comes_after(cursor, waits, runs, name or None):
            oldest_wait = _wait(now, *parts[2 * index : 2 * index + 2])
            terms_of_lane = terms(settings, name or None)
            found.append(
                LaneReading(
                    queue=queue,
                    lane=name or None,
                    terms=terms_of_lane,
                    pending=waits,
                    running=runs,
                    oldest_wait=oldest_wait,
                )
            )
    found.sort(key=lambda each: lane_order(each.pending, each.running, each.lane))
    return lanes_page(found, cursor, limit)


async def lane_line(functions: Functions, queue: str, lane: str | None, limit: int, cursor: LineCursor) -> LanePage:
    """A page of a lane's jobs in the order in which they start; the cost depends on the page and on what runs."""
    # In an ordered lane all classes continue at the same place, and the functions read the first of these.
    afters = [cursor.after(class_, ordered=False) for class_ in range(3)]
    asked = {
        "running": not cursor.waiting,
        "after": [False if after is None else after for after in afters],
        "count": limit + 1,
    }
    about, parts = await functions.call_for_parts("lane_line", queue, lane or "", encode(asked))
    rows = []
    for record, came in zip(parts[::2], parts[1::2], strict=True):
        seq, id, task, state, class_, attempt, started_at, arrival = decode(record)
        enqueued_at = TIME.unpack(came)[0] if len(came) == TIME.size else 0.0
        place = None if arrival is False else int(arrival)
        started = None if started_at is False else float(started_at)
        rows.append(LineRow(int(seq), id, task, STATES[state], class_, enqueued_at, attempt, started, place))
    return line_page(queue, lane, rows, cursor, ordered=about["ordered"], limit=limit, exact=about["exact"])


async def failures(functions: Functions, queue: str | None, task: str | None, limit: int) -> list[FailureGroup]:
    """The newest failed jobs by task and error group, the largest groups first."""
    most, looked_at = listings.MOST_FAILURES, 0
    found: dict[tuple[str, str], list[Any]] = {}
    while True:
        # After the last part, one more job is read to learn whether there are more.
        asked = min(MOST_FAILURES_PER_CALL, most - looked_at) or 1
        answer = await functions.call("failures", queue or "", task or "", looked_at, asked, ERROR_TAIL)
        if looked_at == most:
            exact = not answer["looked_at"]
            break
        for row in answer["groups"]:
            _add_group(found, row)
        looked_at += answer["looked_at"]
        if answer["looked_at"] < asked:
            exact = True
            break
    return largest_first((FailureGroup.of(row, exact=exact) for row in found.values()), limit)


def _add_group(found: dict[tuple[str, str], list[Any]], row: list[Any]) -> None:
    known = found.setdefault((row[0], row[1]), row)
    if known is row:
        return
    known[2] += row[2]
    known[3] = min(known[3], row[3])
    if row[4] > known[4]:
        known[4:] = row[4:]


async def bindings(
    functions: Functions, pool: str | None = None, key: str | None = None, *, limit: int = 100
) -> list[Binding]:
    """Bindings, open ones first, then the latest."""
    check_page(limit)
    answer = await functions.call("bindings", pool or "", key or "", limit)
    return readable("binding", records.binding_of, answer["bindings"])


async def schedules(functions: Functions) -> list[StoredSchedule]:
    """All schedules, by name."""
    rows: list[tuple[Any, ...]] = []
    answer, parts = await functions.call_for_parts("schedules")
    now = float(answer["now"])
    for name, raw, job in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        try:
            record = decode(raw)
            moments = record["stored_at"], record["declared_at"], record.get("last_slot")
            rows.append((name.decode(), record["timetable"], job, *moments, now))
        except (ValueError, TypeError, KeyError):
            continue  # damaged: the others are still listed
    rows.sort(key=lambda row: row[0])
    return schedules_of(rows)


async def tokens(functions: Functions) -> list[AccessToken]:
    """All tokens, the oldest first."""
    found = []
    for raw in (await functions.call("tokens"))["parts"]:
        try:
            found.append(records.token_of(decode(raw)))
        except (ValueError, TypeError, KeyError):
            continue  # damaged: it grants nothing, and the others are still listed
    return sorted(found, key=lambda token: (token.created_at, token.id))


_LIMITS = {"lanes": MOST_LANES, "counted": MOST_COUNTED, "many": MANY_LANES}


class _Queue(msgspec.Struct):
    id: int
    name: str
    settings: str
    pending: tuple[int, int, int]
    busy: tuple[int, int, int]
    workers: list[Worker]
    seconds: float | None

    def snapshot(self) -> QueueSnapshot:
        return QueueSnapshot(
            name=self.name,
            settings=read_settings(self.name, self.settings, None).settings,
            pending=self.pending,
            busy=self.busy,
            workers=self.workers,
            seconds=self.seconds,
        )


class _Positions(msgspec.Struct):
    now: float
    queues: list[_Queue]
    jobs: list[WaitingJob]


class _Service(msgspec.Struct):
    queue: _Queue
    lanes: int


_positions = msgspec.msgpack.Decoder(_Positions)
_service = msgspec.msgpack.Decoder(_Service)


def room_of(answer: bytes, class_: int, lane: str | None, limit: int | None) -> float | None:
    """Seconds until a full queue, or a full lane of it, probably has room for one more job."""
    service = _service.decode(answer)
    queue = service.queue.snapshot()
    able = 0 if queue.settings.paused else servers(queue.workers, queue.settings, class_)
    if lane is None:
        return room_after(queue.seconds, able)
    # The lanes that have work share the slots.
    return room_after(queue.seconds, able / max(1, service.lanes), limit=limit)


def positions_of(answer: bytes) -> dict[str, JobPosition]:
    """The positions of jobs by id; jobs that do not wait are absent."""
    read = _positions.decode(answer)
    queues = {queue.id: queue.snapshot() for queue in read.queues}
    return {job.id: job_position(job, queues[job.queue], read.now) for job in read.jobs}


async def positions(functions: Functions, ids: Sequence[str]) -> list[JobPosition | None]:
    """The positions of waiting jobs, computed from what the server counts in one call."""
    asked = encode([id for id in ids if storable(id)])
    found = positions_of(await functions.send("positions", asked, encode(_LIMITS)))
    return [found.get(id) for id in ids]


async def declined(functions: Functions, limit: int) -> list[DeclinedTask]:
    """Tasks with jobs that workers declined, the longest waiting first."""
    check_page(limit)
    return [
        DeclinedTask(queue=queue, task=task, waiting=waiting, since=since, known=known)
        for queue, task, waiting, since, known in (await functions.call("declined", limit, MOST_DECLINED))["declined"]
    ]


async def sessions(functions: Functions) -> list[Session]:
    """All sessions, the newest first."""
    return records.sessions_of(await functions.call("sessions", ""))


def _held_sets(session: str) -> list[str]:
    """The sets of what a session holds: one for each class, and one for its turns."""
    return [f"held:{session}:{kind}" for kind in "012t"]


def storable(text: str) -> bool:
    """Whether a text can be encoded; lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _matches(job: Job, where: Filter) -> bool:
    fields = ("state", "queue", "lane", "task", "sticky", "worker", "error_group")
    return all(wanted is None or getattr(job, name) == wanted for name in fields for wanted in [getattr(where, name)])
