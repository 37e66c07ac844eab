"""What is wrong with a running system, and what to do about it. Each check reads what is there and answers with
findings; none of them changes anything but a recount that was asked for.

A check that finds nothing wrong says so too, so that whoever reads the list knows what was looked at.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from .client import Client
from .errors import FairlaneError, NotFound, StoreMissing
from .model.binding import BindingState
from .model.job import Job, JobState
from .model.reading import LaneReading, QueueReading
from .model.session import Session, SessionKind, SessionState, worker_name
from .runtime.connection import Connection
from .store.diagnosis import Diagnosable, Finding, Level
from .store.instrumented import InstrumentedStore
from .store.port import Store

STILL_SECONDS = 30.0
"""A lane whose head has waited for longer, while nothing of the lane runs, is worth a look."""
RECENT_SECONDS = 3_600.0
CLOCK_SLACK = 2.0
SLOW_SECONDS = 0.5
LOOKED_AT = 20
"""Lanes of a queue, and groups of errors: the longest and largest come first, and a list of all would hide them."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the checks judge: read once, so that they speak of the same moment."""

    client: Client
    store: Store
    now: float
    """The store's clock."""
    queues: tuple[QueueReading, ...]
    sessions: tuple[Session, ...]
    """Those that are there."""
    leads: bool

    @property
    def workers(self) -> list[Session]:
        """The workers that are there."""
        return [session for session in self.sessions if session.kind is SessionKind.WORKER]


Check = Callable[[Evidence], Awaitable[list[Finding]]]


async def diagnose(
    connection: Connection, *, recount: bool = False, wall: Callable[[], float] = time.time
) -> list[Finding]:
    """Look at everything. A store that cannot be reached is one finding, and then there is nothing else to look at."""
    began = time.monotonic()
    try:
        store = await connection.store()
        version = await store.migrate()
        # The verb that tells the store's clock. It declares nobody dead here; what it may do is any pass's work.
        before, now, after = wall(), (await store.rescue(limit=1, declare=False)).now, wall()
        evidence = await _gather(connection, store, now)
    except StoreMissing as exc:
        return [Finding(Level.ERROR, "store", str(exc), "a worker, an enqueue or `fairlane migrate` makes it")]
    except FairlaneError as exc:
        return [Finding(Level.ERROR, "store", f"cannot be used: {exc}", "check --url, and that the server runs")]
    findings = [_reached(time.monotonic() - began, version), _clock(now - (before + after) / 2)]
    checks: list[Check] = [_server, _leader, _sessions, _queues, _tasks, _lanes, _bindings, _failures]
    if recount:
        checks.append(_recount)
    for check in checks:
        try:
            findings += await check(evidence)
        except FairlaneError as exc:
            topic = check.__name__.removeprefix("_")
            findings.append(Finding(Level.ERROR, topic, f"could not be looked at: {exc}", "run the doctor again"))
    return findings


async def _gather(connection: Connection, store: Store, now: float) -> Evidence:
    client = Client(connection)
    present = (SessionState.LIVE, SessionState.STOPPING)
    return Evidence(
        client=client,
        store=store,
        now=now,
        queues=tuple(await client.queues()),
        sessions=tuple(session for session in await client.sessions() if session.state in present),
        leads=await client.leader() is not None,
    )


def _reached(seconds: float, version: int) -> Finding:
    told = f"reachable, schema version {version}"
    if seconds > SLOW_SECONDS:
        return Finding(Level.WARN, "store", f"{told}, but slow: a first look took {seconds:.1f} s", "see what loads it")
    return Finding(Level.OK, "store", told)


def _clock(offset: float) -> Finding:
    if abs(offset) > CLOCK_SLACK:
        return Finding(
            Level.WARN,
            "clock",
            f"the store's clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine's",
            "let both follow a time server; jobs go by the store's clock",
        )
    return Finding(Level.OK, "clock", f"agrees with this machine's to {abs(offset):.1f} s")


async def _server(evidence: Evidence) -> list[Finding]:
    """What the store says of itself, if it has something to say."""
    store = evidence.store
    while isinstance(store, InstrumentedStore):
        store = store.inner
    return await store.findings() if isinstance(store, Diagnosable) else []


async def _leader(evidence: Evidence) -> list[Finding]:
    if evidence.leads:
        return [Finding(Level.OK, "leader", "somebody leads")]
    advice = "start a worker, or `fairlane manager`; if they are there, look into their logs"
    waiting = any(_open(queue) for queue in evidence.queues)
    if not waiting and not evidence.sessions:
        return [Finding(Level.WARN, "leader", "nobody leads, and nothing waits for it", advice)]
    return [Finding(Level.ERROR, "leader", "nobody leads: retries, schedules and rescues stand still", advice)]


def _open(queue: QueueReading) -> int:
    counts = queue.counts
    return counts.pending + counts.running + counts.scheduled


async def _sessions(evidence: Evidence) -> list[Finding]:
    findings = []
    for session in evidence.sessions:
        name = f"{session.worker or session.kind.value} (pid {session.pid} on {session.host})"
        if session.remaining < 0:
            what = f"{name} has not renewed its lease, which ended {-session.remaining:.0f} s ago"
            advice = "if its process is gone, the leader takes its jobs back; if it is there, it is stopped or cut off"
            findings.append(Finding(Level.ERROR, "sessions", what, advice))
        elif session.remaining < session.lease / 3:
            what = f"{name} renews late: {session.remaining:.1f} s are left of {session.lease:g} s"
            advice = "a body may hold the interpreter; run it with isolate=True, or the worker with --processes"
            findings.append(Finding(Level.WARN, "sessions", what, advice))
    if not evidence.workers:
        findings.append(
            Finding(Level.WARN, "sessions", "no worker is there", "start one: fairlane worker -A module:app")
        )
    count = len(evidence.workers)
    return findings or [
        Finding(Level.OK, "sessions", f"{count} worker{'s' if count != 1 else ''}, all renewed in time")
    ]


async def _queues(evidence: Evidence) -> list[Finding]:
    findings = [
        Finding(
            Level.ERROR,
            "queues",
            f"the settings of {queue.name} cannot be read ({queue.problem}); they are taken for the defaults",
            "declare them again: restart a worker that declares the queue, or set its limits by hand",
        )
        for queue in evidence.queues
        if queue.problem
    ]
    for queue in evidence.queues:
        waiting = queue.counts.pending
        if not waiting:
            continue
        if queue.settings.paused:
            what = f"{queue.name} is paused, {waiting:,} jobs wait"
            findings.append(Finding(Level.WARN, "queues", what, f"fairlane resume {queue.name}"))
        elif not queue.workers:
            what = f"{queue.name}: {waiting:,} jobs wait, and no live worker serves it"
            findings.append(Finding(Level.ERROR, "queues", what, f"fairlane worker -A module:app -Q {queue.name}"))
    return findings or [Finding(Level.OK, "queues", f"none of {len(evidence.queues)} waits for a worker")]


async def _tasks(evidence: Evidence) -> list[Finding]:
    findings = []
    for declined in await evidence.store.declined(limit=LOOKED_AT):
        if not declined.known:
            waited = max(0.0, evidence.now - declined.since)
            what = (
                f"{declined.task}: {declined.waiting:,} jobs of queue {declined.queue} wait, "
                f"the first for {waited:.0f} s, and no live worker knows the task"
            )
            advice = "start workers of the application that has it, or name the task as before: @app.task(name=…)"
            findings.append(Finding(Level.ERROR, "tasks", what, advice))
    return findings or [Finding(Level.OK, "tasks", "none waits for a worker that knows it")]


async def _lanes(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    for queue in evidence.queues:
        if not queue.counts.pending or queue.settings.paused or not queue.workers:
            continue
        for lane in await evidence.client.lanes(queue.name, limit=LOOKED_AT):
            finding = await _stuck(evidence, lane)
            if finding is not None:
                findings.append(finding)
    return findings or [Finding(Level.OK, "lanes", "none stands still")]


async def _stuck(evidence: Evidence, lane: LaneReading) -> Finding | None:
    if lane.lane is None or lane.running or not lane.pending:
        return None
    name = f"{lane.lane!r} of {lane.queue}"
    if lane.terms.paused:
        advice = f"fairlane resume {lane.queue} --lane {shlex.quote(lane.lane)}"
        return Finding(Level.WARN, "lanes", f"{name} is paused, {lane.pending:,} jobs wait", advice)
    page = await evidence.client.find(queue=lane.queue, lane=lane.lane, state=JobState.PENDING, limit=500)
    # Newest first; the last of a lane that fits on a page is its head, of a longer one somebody who waits long enough.
    head = min(page.jobs, key=lambda job: job.arrival or 0, default=None)
    if head is None or evidence.now - max(head.enqueued_at, head.due_at or 0) < STILL_SECONDS:
        return None
    try:
        why = await evidence.client.handle(head.id).why()
    except NotFound:
        return None
    waited = evidence.now - head.enqueued_at
    what = f"{name} stands still: {lane.pending:,} wait, {head.id} for {waited:.0f} s ({why})"
    return Finding(Level.WARN, "lanes", what, f"fairlane job {shlex.quote(head.id)}")


async def _bindings(evidence: Evidence) -> list[Finding]:
    there = {session.worker for session in evidence.workers}
    tied = (BindingState.OPEN, BindingState.DRAINING)
    bindings = [b for b in await evidence.client.bindings(limit=500) if b.state in tied]
    lonely = Counter(worker for b in bindings if (worker := worker_name(b.pool, b.index)) not in there)
    findings = [
        Finding(
            Level.WARN,
            "bindings",
            f"{count} sticky key{'s are' if count > 1 else ' is'} bound to {worker}, which is not there",
            "start it again under that index; else the leader binds them anew once its lease is over",
        )
        for worker, count in lonely.most_common(LOOKED_AT)
    ]
    return findings or [Finding(Level.OK, "bindings", f"{len(bindings)} open, all to workers that are there")]


async def _failures(evidence: Evidence) -> list[Finding]:
    page = await evidence.client.find(state=JobState.FAILED, limit=500)
    recent = [
        job for job in page.jobs if job.finished_at is not None and job.finished_at > evidence.now - RECENT_SECONDS
    ]
    if not recent:
        return [Finding(Level.OK, "failures", "no job failed within the hour")]
    return [
        Finding(
            Level.WARN,
            "failures",
            f"{count} {'jobs' if count > 1 else 'job'} of {task} failed within the hour ({group})",
            f"fairlane jobs --state failed {_selected(task, group)}; then fairlane retry {_selected(task, group)}",
        )
        for (task, group), count in _groups(recent).most_common(LOOKED_AT)
    ]


def _selected(task: str, group: str) -> str:
    """Options that select these failures alone; the others may be of a kind that must not run again."""
    return f"--task {task} --error {shlex.quote(group)}"


def _groups(jobs: Sequence[Job]) -> Counter[tuple[str, str]]:
    return Counter((job.task, job.error_group or (job.reason.value if job.reason else "error")) for job in jobs)


async def _recount(evidence: Evidence) -> list[Finding]:
    found = await evidence.client.recount()
    if found.differences:
        some = "; ".join(found.differences[:5])
        what = f"{len(found.differences)} numbers differed from the {found.jobs:,} jobs, and were corrected: {some}"
        advice = "report it: numbers and jobs change in one step and may never differ"
        return [Finding(Level.ERROR, "recount", what, advice)]
    return [Finding(Level.OK, "recount", f"every number agrees with the {found.jobs:,} jobs")]
