"""Registering, renewing, leaving and rescuing sessions, with the effects on their jobs and bindings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...errors import IndexTaken, InvalidInput, NotFound, SessionLost
from ...model.job import Held, JobState, Reason
from ...model.maintenance import Rescued
from ...model.placement import lowest_free
from ...model.session import NewSession, Renewal, SessionKind
from ..codes import RUNNING
from . import bindings, broadcasts, endings, enqueue
from .records import ClaimHolder, JobRecord, StoredSession, job_record_of
from .step import Step

MOST_BOUND_AT_REGISTER = 1_000


def register(step: Step, new: NewSession) -> None:
    """Store a session and assign its index. Bind jobs that waited for a worker of its pool."""
    known = StoredSession.find(step, new.id)
    if known is not None:
        if not known.present:
            raise SessionLost("this session has ended or was declared dead; register under a new id")
        step.run("session_renew", step.mono + known.lease, step.boot, known.seq)
        _bind_after_expiry(step, known)
        return
    index = None
    if new.kind is SessionKind.WORKER:
        index = lowest_free(_taken_indices(step, new.pool)) if new.index is None else new.index
        _take_index(step, new, index)
    slots = new.slots
    step.run(
        "session_insert", new.id, new.kind.value, new.host, new.pid, new.pool, index, int(new.index is not None),
        msgspec.json.encode(new.queues).decode(), None if slots is None else slots.total,
        0 if slots is None else slots.reserved.high, 0 if slots is None else slots.reserved.normal,
        step.now, new.lease, step.boot, step.mono + new.lease, new.task_set,
    )  # fmt: skip
    if new.tasks is not None:
        step.run("task_set_used", new.task_set, msgspec.json.encode(new.tasks).decode(), step.now)
    for queue in new.queues:
        step.queue(queue)
    if index is not None:
        bindings.bind_unbound(step, new.pool, MOST_BOUND_AT_REGISTER, endings.end)
        broadcasts.join(step, new.pool, index, enqueue.add_child)


def _taken_indices(step: Step, pool: str) -> list[int]:
    """Return the indices of present sessions, and of named ones that may come back."""
    return [index for (index,) in step.all("indices_taken", pool, step.boot, step.mono)]


def _take_index(step: Step, new: NewSession, index: int) -> None:
    """End the session that holds an index. On the same host it is an earlier run of the new worker."""
    row = step.one("session_at_index", new.pool, index)
    if row is not None:
        old = StoredSession(*row)
        left = old.remaining(step.mono, step.boot)
        if left > 0 and old.host != new.host:
            raise IndexTaken(
                f"index {index} of pool {new.pool!r} belongs to a live worker on {old.host}; "
                "choose another index, or wait",
                max(0.0, left),
            )
        _declare_dead(step, old, keep_bindings=old.host == new.host and left > 0)
        return
    row = step.one("session_last_at_index", new.pool, index)
    if row is not None:
        last = StoredSession(*row)
        if last.host != new.host or last.remaining(step.mono, step.boot) <= 0:
            # The local state that its keys were bound to is on another machine or was given up.
            bindings.lose(step, new.pool, index, endings.end)


def renew(step: Step, id: str, held: Sequence[Held], claim: int, stopping: bool) -> Renewal:
    """Extend a lease, and reconcile the jobs that the session holds with those that are stored."""
    session = StoredSession.find(step, id)
    if session is None or not session.present:
        raise SessionLost("this session is unknown, ended or declared dead; drop its jobs and register a new one")
    step.run("session_renew", step.mono + session.lease, step.boot, session.seq)
    if stopping and session.state == "live":
        step.run("session_stopping", session.seq)
    _bind_after_expiry(step, session)
    held_jobs = set(held)
    cancel, taken_back, found = [], [], set()
    for row in step.all("session_records", session.seq):
        e = job_record_of(row)
        claim_of_job = Held(e.id, e.fence)
        if claim_of_job in held_jobs:
            found.add(claim_of_job)
            if e.cancel:
                cancel.append(e.id)
        elif e.claim is not None and e.claim <= claim:
            endings.take_back(step, e, session.holder)
            taken_back.append(e.id)
    return Renewal(
        lost=tuple(h for h in held if h not in found),
        cancel=tuple(cancel),
        taken_back=tuple(taken_back),
        now=step.now,
    )


def _bind_after_expiry(step: Step, before: StoredSession) -> None:
    """Bind jobs that found no live worker while the lease of a renewed session had expired."""
    if before.index is not None and before.remaining(step.mono, step.boot) <= 0:
        bindings.bind_unbound(step, before.pool, MOST_BOUND_AT_REGISTER, endings.end)


def leave(step: Step, id: str, begun: Sequence[Held] | None) -> None:
    """End a session and put back its jobs."""
    session = StoredSession.find(step, id)
    if session is None:
        raise NotFound(f"there is no session {id!r}")
    if not session.present:
        return
    step.run("session_end", "ended", step.now, session.seq)
    _cancel_waiting_turns(step, session)
    if session.index is not None and not session.named:
        bindings.lose(step, session.pool, session.index, endings.end)
    started = None if begun is None else set(begun)
    endings.restore_identities_of_session(step, session.seq)
    for row in step.all("session_records", session.seq):
        e = job_record_of(row)
        if started is None or Held(e.id, e.fence) in started or e.claim is None:
            endings.crash(step, e, session.holder)
        else:
            endings.take_back(step, e, session.holder)


def _cancel_waiting_turns(step: Step, session: StoredSession) -> int:
    """Cancel the turns that a session waits for, before those it holds: else the next would start in a dead session."""
    gone = 0
    for row in step.all("waiter_records", session.seq):
        # Read again: the end of one turn may have started the next. Running turns end with the session's other jobs.
        e = step.active_job(row[0])
        if e is not None and e.state != RUNNING:
            endings.end(step, e, JobState.CANCELLED, Reason.WAITER_GONE)
            gone += 1
    return gone


def _declare_dead(
    step: Step, session: StoredSession, *, keep_bindings: bool = False
) -> tuple[int, dict[JobState, int]]:
    """Declare a session dead. Its bindings are closed first, so that its jobs are placed anew at once."""
    step.run("session_end", "dead", step.now, session.seq)
    cancelled = _cancel_waiting_turns(step, session)
    lost = 0
    if session.index is not None and not keep_bindings:
        lost = bindings.lose(step, session.pool, session.index, endings.end)
    fates = {JobState.CANCELLED: cancelled}
    endings.restore_identities_of_session(step, session.seq)
    for row in step.all("session_records", session.seq):
        fate = endings.crash(step, job_record_of(row), session.holder)
        fates[fate] = fates.get(fate, 0) + 1
    return lost, fates


def rescue(step: Step, limit: int, declare: bool) -> Rescued:
    """Declare expired sessions dead, put back jobs of lost sessions, and close bindings without a worker."""
    if limit < 1:
        raise InvalidInput("limit", "must be at least 1")
    declared: list[str] = []
    lost = 0
    fates: dict[JobState, int] = {}
    more = False
    if declare:
        for row in step.all("sessions_present"):
            session = StoredSession(*row)
            if session.remaining(step.mono, step.boot) > 0:
                continue
            if sum(fates.values()) >= limit:
                more = True
                break
            declared.append(session.id)
            closed, its = _declare_dead(step, session)
            lost += closed
            for state, count in its.items():
                fates[state] = fates.get(state, 0) + count
    orphans = step.all("records_orphaned", limit)
    for row in orphans:
        e = job_record_of(row)
        state = endings.crash(step, e, _last_holder(step, e))
        fates[state] = fates.get(state, 0) + 1
    for pool, index in step.all("bindings_unserved", step.boot, step.mono):
        lost += bindings.lose(step, pool, index, endings.end)
    broadcasts.abandon(step, endings.end)
    drained = bindings.drain_idle(step, limit)
    return Rescued(
        declared=tuple(declared),
        retried=fates.get(JobState.PENDING, 0) + fates.get(JobState.SCHEDULED, 0),
        failed=fates.get(JobState.FAILED, 0),
        cancelled=fates.get(JobState.CANCELLED, 0),
        lost_bindings=lost,
        drained=drained,
        more=more or len(orphans) == limit or drained == limit,
        now=step.now,
    )


def _last_holder(step: Step, e: JobRecord) -> ClaimHolder:
    row = step.one("session_by_seq", e.session)
    return ClaimHolder("unknown", "unknown") if row is None else StoredSession(*row).holder
