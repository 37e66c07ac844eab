"""Diagnosis of a running system: what is wrong, and what to do about it. Each check reads and returns findings; none
changes anything, except a recount if requested.

A check that finds no problem reports that too, so that the list shows everything that was checked.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from .bulk import retried
from .client import Client
from .errors import FairlaneError, NotFound, StoreMissing
from .model.binding import BindingState
from .model.job import Job, JobState
from .model.reading import LaneReading, QueueReading
from .model.session import Session, SessionKind, SessionState, worker_name
from .runtime.connection import Connection
from .store.diagnosis import Diagnosable, Finding, Level
from .store.port import Store

STILL_SECONDS = 30.0
"""A lane whose head has waited for longer than this while no job of the lane runs is examined."""
RECENT_SECONDS = 3_600.0
CLOCK_SLACK = 2.0
SLOW_SECONDS = 0.5
LOOKED_AT = 20
"""The most lanes of a queue and groups of errors to report, the largest first: a longer list would hide them."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the checks, read once so that all of them see the same moment."""

    client: Client
    store: Store
    now: float
    """The store's clock."""
    queues: tuple[QueueReading, ...]
    sessions: tuple[Session, ...]
    """The sessions that are live or stopping."""
    leads: bool

    @property
    def workers(self) -> list[Session]:
        """The workers among them."""
        return [session for session in self.sessions if session.kind is SessionKind.WORKER]


Check = Callable[[Evidence], Awaitable[list[Finding]]]


async def diagnose(
    connection: Connection, *, recount: bool = False, wall: Callable[[], float] = time.time
) -> list[Finding]:
    """Run all checks. A store that cannot be reached is the only finding."""
    began = time.monotonic()
    try:
        store = await connection.store()
        version = await store.migrate()
        # `rescue` returns the store's clock. It declares no session dead here and does no more than any other pass.
        before, now, after = wall(), (await store.rescue(limit=1, declare=False)).now, wall()
        evidence = await _gather(connection, store, now)
    except StoreMissing as exc:
        return [Finding(Level.ERROR, "store", str(exc), "a worker, an enqueue or `fairlane migrate` creates it")]
    except FairlaneError as exc:
        return [Finding(Level.ERROR, "store", f"cannot be used: {exc}", "check --url, and that the server is running")]
    findings = [_reached(time.monotonic() - began, version), _clock(now - (before + after) / 2)]
    checks: list[Check] = [_server, _leader, _sessions, _queues, _tasks, _lanes, _bindings, _failures]
    if recount:
        checks.append(_recount)
    for check in checks:
        try:
            findings += await check(evidence)
        except FairlaneError as exc:
            topic = check.__name__.removeprefix("_")
            findings.append(Finding(Level.ERROR, topic, f"could not be checked: {exc}", "run the doctor again"))
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
    text = f"reachable, schema version {version}"
    if seconds > SLOW_SECONDS:
        return Finding(
            Level.WARN,
            "store",
            f"{text}, but slow: the first reads took {seconds:.1f} s",
            "check the load of its server",
        )
    return Finding(Level.OK, "store", text)


def _clock(offset: float) -> Finding:
    if abs(offset) > CLOCK_SLACK:
        return Finding(
            Level.WARN,
            "clock",
            f"the store's clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine's",
            "synchronise both with a time server; jobs follow the store's clock",
        )
    return Finding(Level.OK, "clock", f"within {abs(offset):.1f} s of this machine's clock")


async def _server(evidence: Evidence) -> list[Finding]:
    """The store's own findings, such as the settings of its server."""
    store = evidence.store
    return await store.findings() if isinstance(store, Diagnosable) else []


async def _leader(evidence: Evidence) -> list[Finding]:
    if evidence.leads:
        return [Finding(Level.OK, "leader", "there is a leader")]
    advice = "start a worker, or `fairlane manager`; if they are running, check their logs"
    waiting = any(_open(queue) for queue in evidence.queues)
    if not waiting and not evidence.sessions:
        return [Finding(Level.WARN, "leader", "there is no leader, and no job needs one", advice)]
    return [
        Finding(
            Level.ERROR,
            "leader",
            "there is no leader: delayed jobs, retries, schedules and rescues are not processed",
            advice,
        )
    ]


def _open(queue: QueueReading) -> int:
    counts = queue.counts
    return counts.pending + counts.running + counts.scheduled


async def _sessions(evidence: Evidence) -> list[Finding]:
    findings = []
    for session in evidence.sessions:
        name = f"{session.worker or session.kind.value} (pid {session.pid} on {session.host})"
        if session.remaining < 0:
            what = f"{name} has not renewed its lease, which expired {-session.remaining:.0f} s ago"
            advice = "if its process died, the leader recovers its jobs; if it is running, it is suspended or cut off"
            findings.append(Finding(Level.ERROR, "sessions", what, advice))
        elif session.remaining < session.lease / 3:
            what = f"{name} renews its lease late: {session.remaining:.1f} s of {session.lease:g} s are left"
            advice = "a job may block the interpreter; use isolate=True for its task, or --processes for the worker"
            findings.append(Finding(Level.WARN, "sessions", what, advice))
    if not evidence.workers:
        findings.append(
            Finding(Level.WARN, "sessions", "no worker is running", "start one: fairlane worker -A module:app")
        )
    count = len(evidence.workers)
    return findings or [
        Finding(Level.OK, "sessions", f"{count} worker{'s' if count != 1 else ''}, all renewing in time")
    ]


async def _queues(evidence: Evidence) -> list[Finding]:
    findings = [
        Finding(
            Level.ERROR,
            "queues",
            f"the settings of {queue.name} cannot be read ({queue.problem}); the defaults apply",
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
            what = f"{queue.name} is paused, {_jobs_waiting(waiting)}"
            findings.append(Finding(Level.WARN, "queues", what, f"fairlane resume {queue.name}"))
        elif not queue.workers:
            what = f"{queue.name}: {_jobs_waiting(waiting)}, and no live worker serves the queue"
            findings.append(Finding(Level.ERROR, "queues", what, f"fairlane worker -A module:app -Q {queue.name}"))
    return findings or [Finding(Level.OK, "queues", f"none of {len(evidence.queues)} is waiting for a worker")]


async def _tasks(evidence: Evidence) -> list[Finding]:
    findings = []
    for declined in await evidence.store.declined(limit=LOOKED_AT):
        if not declined.known:
            waited = max(0.0, evidence.now - declined.since)
            what = (
                f"{declined.task}: {_jobs_waiting(declined.waiting, of=f'queue {declined.queue}')}, "
                f"the first for {waited:.0f} s, and no live worker knows the task"
            )
            advice = "start workers of the application that has it, or restore its former name: @app.task(name=…)"
            findings.append(Finding(Level.ERROR, "tasks", what, advice))
    return findings or [Finding(Level.OK, "tasks", "none is waiting for a worker that knows it")]


async def _lanes(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    for queue in evidence.queues:
        if not queue.counts.pending or queue.settings.paused or not queue.workers:
            continue
        for lane in await evidence.client.lanes(queue.name, limit=LOOKED_AT):
            finding = await _stuck(evidence, lane)
            if finding is not None:
                findings.append(finding)
    return findings or [Finding(Level.OK, "lanes", "none is stuck")]


async def _stuck(evidence: Evidence, lane: LaneReading) -> Finding | None:
    if lane.lane is None or lane.running or not lane.pending:
        return None
    name = f"{lane.lane!r} of {lane.queue}"
    if lane.terms.paused:
        advice = f"fairlane resume {lane.queue} --lane {shlex.quote(lane.lane)}"
        return Finding(Level.WARN, "lanes", f"{name} is paused, {_jobs_waiting(lane.pending)}", advice)
    if lane.oldest_wait is None or lane.oldest_wait < STILL_SECONDS:
        return None
    # The head of the line: its cost does not depend on the backlog.
    head = next(iter((await evidence.client.lane_line(lane.queue, lane.lane, limit=1)).jobs), None)
    if head is None:
        return None
    try:
        why = await evidence.client.handle(head.id).why()
    except NotFound:
        return None
    waited = evidence.now - head.enqueued_at
    what = f"{name} is stuck: {_jobs_waiting(lane.pending)}, {head.id} for {waited:.0f} s ({why})"
    return Finding(Level.WARN, "lanes", what, f"fairlane job {shlex.quote(head.id)}")


async def _bindings(evidence: Evidence) -> list[Finding]:
    running = {session.worker for session in evidence.workers}
    unfinished = (BindingState.OPEN, BindingState.DRAINING)
    bindings = [b for b in await evidence.client.bindings(limit=500) if b.state in unfinished]
    orphaned = Counter(worker for b in bindings if (worker := worker_name(b.pool, b.index)) not in running)
    findings = [
        Finding(
            Level.WARN,
            "bindings",
            f"{count} sticky key{'s are' if count > 1 else ' is'} bound to {worker}, which is not running",
            "start it again with that index; otherwise the leader rebinds them once its lease has expired",
        )
        for worker, count in orphaned.most_common(LOOKED_AT)
    ]
    return findings or [Finding(Level.OK, "bindings", f"{len(bindings)} open, all to running workers")]


async def _failures(evidence: Evidence) -> list[Finding]:
    page = await evidence.client.find(state=JobState.FAILED, limit=500)
    recent = [
        job for job in page.jobs if job.finished_at is not None and job.finished_at > evidence.now - RECENT_SECONDS
    ]
    if not recent:
        return [Finding(Level.OK, "failures", "no job failed within the last hour")]
    done = await retried(evidence.store, [job.id for job in recent])
    left = [job for job in recent if job.id not in done]
    if not left:
        return [Finding(Level.OK, "failures", "every job that failed within the last hour was retried")]
    return [
        Finding(
            Level.WARN,
            "failures",
            f"{count} {'jobs' if count > 1 else 'job'} of {task} failed within the last hour ({group})",
            f"fairlane jobs --state failed {_selected(task, group)}; then fairlane retry {_selected(task, group)}",
        )
        for (task, group), count in _groups(left).most_common(LOOKED_AT)
    ]


def _selected(task: str, group: str) -> str:
    """Options that select only these failures; others may be of a kind that must not be retried."""
    return f"--task {task} --error {shlex.quote(group)}"


def _groups(jobs: Sequence[Job]) -> Counter[tuple[str, str]]:
    return Counter((job.task, job.error_group or (job.reason.value if job.reason else "error")) for job in jobs)


async def _recount(evidence: Evidence) -> list[Finding]:
    found = await evidence.client.recount()
    if found.differences:
        some = "; ".join(found.differences[:5])
        what = f"{len(found.differences)} counts differed from the {found.jobs:,} jobs and were corrected: {some}"
        advice = "report this as a bug: counts and jobs change in one step and must never differ"
        return [Finding(Level.ERROR, "recount", what, advice)]
    return [Finding(Level.OK, "recount", f"every count agrees with the {found.jobs:,} jobs")]


def _jobs_waiting(count: int, *, of: str = "") -> str:
    jobs = ("job" if count == 1 else "jobs") + (f" of {of}" if of else "")
    return f"{count:,} {jobs} {'is' if count == 1 else 'are'} waiting"
