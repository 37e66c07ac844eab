"""Reading: jobs, queues, lanes, sessions and bindings, as people and programs look at them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...binding import Binding
from ...errors import SchemaMismatch, StoreError
from ...job import Job, JobState
from ...lanes import terms
from ...reading import Counts, Filter, LaneReading, Page, QueueReading, Standing, check_page
from ...schedule import StoredSchedule
from ...session import Session, SessionState, Term
from ...settings import QueueSettings
from ..codes import STATES
from ..rows import position_of, schedules_of, settings_of
from . import records
from . import standings as figures
from .functions import Functions
from .requests import decode, encode

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
            job = records.job_of(parts)
            if _matches(job, where):
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
    answer = await functions.call("queues")
    readings = []
    for name, record, classes in sorted(answer["queues"]):
        override = record.get("override")
        settings, laid_over = settings_of(record["declared"], override)
        counts = [Counts(**dict(zip(_COUNTS, numbers, strict=True))) for numbers in classes]
        readings.append(
            QueueReading(
                name=name,
                settings=settings,
                version=record["version"],
                override=laid_over,
                classes=(counts[0], counts[1], counts[2]),
                workers=sum(name in queues for queues in answer["serving"]),
            )
        )
    return readings


async def lanes(functions: Functions, queue: str, *, limit: int = 100) -> list[LaneReading]:
    """The lanes of a queue that have work, the longest backlog first."""
    check_page(limit)
    answer = await functions.call("lanes", queue, limit)
    settings = msgspec.json.decode(answer["settings"], type=QueueSettings)
    rows = [(lane or None, waits, runs) for lane, waits, runs in answer["lanes"]]
    rows.sort(key=lambda row: (-row[1], -row[2], row[0] or ""))
    return [
        LaneReading(queue=queue, lane=lane, terms=terms(settings, lane), pending=waits, running=runs)
        for lane, waits, runs in rows[:limit]
    ]


async def bindings(
    functions: Functions, pool: str | None = None, key: str | None = None, *, limit: int = 100
) -> list[Binding]:
    """Bindings, open ones first, then the latest."""
    check_page(limit)
    answer = await functions.call("bindings", pool or "", key or "", limit)
    return [records.binding_of(tie) for tie in answer["bindings"]]


async def schedules(functions: Functions) -> list[StoredSchedule]:
    """All schedules, by name."""
    rows = []
    for name, raw, job in (await functions.call("schedules"))["parts"]:
        record = decode(raw)
        moments = record["stored_at"], record["declared_at"], record.get("last_slot")
        rows.append((name.decode(), record["timetable"], job, *moments))
    return schedules_of(sorted(rows))


async def standing(functions: Functions, ids: Sequence[str]) -> list[Standing | None]:
    """Where waiting jobs stand."""
    asked = encode([id for id in ids if storable(id)])
    found = figures.standings_of(await functions.send("standing", asked, encode(figures.LIMITS)))
    return [found.get(id) for id in ids]


async def sessions(functions: Functions) -> list[Session]:
    """All sessions, the newest first."""
    return [records.session_of(each) for each in (await functions.call("sessions", ""))["sessions"]]


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
