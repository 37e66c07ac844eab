"""Reading: jobs, queues, lanes, sessions and bindings, as people and programs look at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import SchemaMismatch, StoreError
from ...model.binding import Binding
from ...model.job import Job, JobState, waiting_since
from ...model.lanes import terms
from ...model.listings import LaneListing, LanesCursor, comes_after, lane_order, lanes_page
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
)
from ...model.schedule import StoredSchedule
from ...model.session import Session, SessionState, Term
from ...model.tokens import AccessToken
from ..codes import STATES
from ..shared.rows import position_of, schedules_of
from ..shared.stored_settings import read_settings, readable
from . import positions as figures
from . import records
from .encoding import decode, encode, read_content
from .functions import Functions

MOST_SCANNED = 100
_COUNTS = ("scheduled", "pending", "running", "completed", "failed", "cancelled")
SETS_OF_STATES = {
    JobState.SCHEDULED: "later",
    JobState.PENDING: "alive/",
    JobState.FAILED: f"by:state:{STATES.index(JobState.FAILED)}",
    JobState.CANCELLED: f"by:state:{STATES.index(JobState.CANCELLED)}",
}
"""Where to look for jobs in a state. Those that run are found by who runs them, and all others by their tasks."""


async def schema(functions: Functions, known: int) -> int:
    """The schema of the namespace, for code that knows this one and may change nothing."""
    found = await functions.look("HGET", "counter", "schema")
    if found is None:
        raise StoreError("the namespace is not made yet, and this user may not. Run `fairlane migrate` as one who may.")
    if int(found) > known:
        raise SchemaMismatch(
            f"the namespace has schema {int(found)}, and this code knows {known}; upgrade Fairlane here, or use "
            "another namespace=…"
        )
    return int(found)


async def leader(functions: Functions) -> Term | None:
    """Who leads, and for how long."""
    found = (await functions.call("leader"))["leader"]
    if not found:
        return None
    number, session, lease, remaining = found
    return Term(number=number, session=session, lease=lease, remaining=remaining)


async def get(functions: Functions, ids: Sequence[str]) -> list[Job | None]:
    """Jobs by their ids; None for what is not there."""
    answer = await functions.call("get", encode([id for id in ids if storable(id)]))
    found = {job.id: job for job in map(records.job_of, answer["parts"])}
    return [found.get(id) for id in ids]


async def find(functions: Functions, where: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
    """A page, newest first: the narrowest filter picks the index, the others are checked job by job."""
    check_page(limit)
    found: list[tuple[int, Job]] = []
    before, more = position_of(cursor), True
    sets = encode(await _sets_of(functions, where))
    while more and len(found) <= limit:
        *jobs, rest = (await functions.call("scan", sets, before, min(limit + 1, MOST_SCANNED)))["parts"]
        more = bool(rest)
        for parts in jobs:
            before = int(parts[0])
            job = records.job_of(parts) if len(parts) > 1 else None
            if job is not None and _matches(job, where):
                found.append((before, job))
    page = found[:limit]
    return Page(tuple(job for _, job in page), str(page[-1][0]) if len(found) > limit else None)


async def _sets_of(functions: Functions, where: Filter) -> list[str]:
    """The index that narrows most."""
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
    """What waits for it, runs there now and ended there, over all sessions that had this place."""
    held = [session.id for session in await sessions(functions) if session.worker == worker]
    live = [name for id in held for name in _held_sets(id)]
    return [f"inboxed:{worker}", *live, *(f"by:session:{id}/" for id in held)]


async def queues(functions: Functions) -> list[QueueReading]:
    """Every queue, by name."""
    answer, parts = await functions.call_for_parts("queues", LANES_LOOKED_AT)
    waits = [_wait(float(answer["now"]), *parts[place : place + 2]) for place in range(0, len(parts), 2)]
    readings = []
    for (name, record, classes), oldest_wait in sorted(
        zip(answer["queues"], waits, strict=True), key=lambda q: q[0][0]
    ):
        stored = read_settings(name, record.get("declared"), record.get("override"))
        # What counts is stored a third time, as the functions read it.
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
    """How long a job has waited, out of its content and its claims; None when there is none."""
    if not job:
        return None
    try:
        enqueued_at, content = read_content(job)
        ended = [each["ended_at"] for each in (decode(attempts) if attempts else ())]
    except Exception:
        return None  # damaged: the claim that meets it fails it
    return max(0.0, now - waiting_since(enqueued_at, content.delay, content.run_at, ended[-1] if ended else None))


async def lanes(functions: Functions, queue: str, limit: int, cursor: LanesCursor | None) -> LaneListing:
    """The lanes of a queue that have work, the longest backlog first."""
    check_page(limit)
    after = b"" if cursor is None else encode([cursor.pending, cursor.running, cursor.lane])
    answer, parts = await functions.call_for_parts("lanes", queue, limit + 1, after)
    settings = read_settings(queue, answer["settings"], None).settings
    now = float(answer["now"])
    found = []
    for place, (name, waits, runs) in enumerate(answer["lanes"]):
        if comes_after(cursor, waits, runs, name or None):
            oldest_wait = _wait(now, *parts[2 * place : 2 * place + 2])
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
    for name, raw, job in (await functions.call("schedules"))["parts"]:
        try:
            record = decode(raw)
            moments = record["stored_at"], record["declared_at"], record.get("last_slot")
            rows.append((name.decode(), record["timetable"], job, *moments))
        except (ValueError, TypeError, KeyError):
            continue  # damaged: it does not hide the others
    rows.sort(key=lambda row: row[0])
    return schedules_of(rows)


async def tokens(functions: Functions) -> list[AccessToken]:
    """All tokens, the oldest first."""
    found = []
    for raw in (await functions.call("tokens"))["parts"]:
        try:
            found.append(records.token_of(decode(raw)))
        except (ValueError, TypeError, KeyError):
            continue  # damaged: it opens nothing, and does not hide the others
    return sorted(found, key=lambda token: (token.created_at, token.id))


async def positions(functions: Functions, ids: Sequence[str]) -> list[JobPosition | None]:
    """Where waiting jobs stand."""
    asked = encode([id for id in ids if storable(id)])
    found = figures.standings_of(await functions.send("positions", asked, encode(figures.LIMITS)))
    return [found.get(id) for id in ids]


async def declined(functions: Functions, limit: int) -> list[DeclinedTask]:
    """Tasks that workers declined jobs of, the longest waiting first."""
    check_page(limit)
    return [
        DeclinedTask(queue=queue, task=task, waiting=waiting, since=since, known=known)
        for queue, task, waiting, since, known in (await functions.call("declined", limit, MOST_DECLINED))["declined"]
    ]


async def sessions(functions: Functions) -> list[Session]:
    """All sessions, the newest first."""
    return records.sessions_of(await functions.call("sessions", ""))


def _held_sets(session: str) -> list[str]:
    """What a session holds, by class, and its turns."""
    return [f"held:{session}:{kind}" for kind in "012t"]


def storable(text: str) -> bool:
    """Whether a text can be sent at all: not one out of half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _matches(job: Job, where: Filter) -> bool:
    fields = ("state", "queue", "lane", "task", "sticky", "worker", "error_group")
    return all(wanted is None or getattr(job, name) == wanted for name in fields for wanted in [getattr(where, name)])
