"""Sessions: how they register, renew and end, and what happens to their jobs and bindings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fairlane.errors import IndexTaken, NotFound, SessionLost
from fairlane.model.job import Held, JobKind, JobState, Reason
from fairlane.model.maintenance import Rescued
from fairlane.model.placement import lowest_free
from fairlane.model.session import NewSession, Renewal, SessionKind, SessionState

from . import bindings, endings, requests
from .records import JobRecord, Mismatch, Records, SessionRecord


def register(records: Records, new: NewSession) -> SessionRecord:
    """Register a session."""
    now = records.clock.monotonic()
    known = records.sessions.get(new.id)
    if known is not None:
        if not known.present:
            raise SessionLost(new.id)
        _extend(records, known)
        return known
    index = None
    if new.kind is SessionKind.WORKER:
        taken = {s.index: s for s in records.sessions.values() if s.present and s.is_worker and s.new.pool == new.pool}
        index = new.index if new.index is not None else lowest_free(i for i in taken if i is not None)
        before = taken.get(index)
        if before is not None:
            if before.new.host != new.host:
                raise IndexTaken(f"{new.pool}/{index}", 0)
            before.state = SessionState.DEAD
            give_up_jobs(records, before, begun=None)
    session = SessionRecord(new, index, now + new.lease)
    records.sessions[new.id] = session
    if index is not None:
        bindings.rebind(records, new.pool)
        for job in list(records.jobs.values()):
            joins = job.new.kind is JobKind.BROADCAST and job.new.pool == new.pool and not job.state.final
            if joins and records.now < job.enqueued_at + job.new.ttl and not job.cancel_requested:
                requests.add_copy(records, job, index)
    return session


def _extend(records: Records, session: SessionRecord) -> None:
    """Renew a lease. If it had expired, the pool may have a live worker again, and unbound jobs are bound."""
    now = records.clock.monotonic()
    late = session.lease_ends < now
    session.lease_ends = now + session.new.lease
    if late and session.is_worker:
        bindings.rebind(records, session.new.pool)


def renew(records: Records, id: str, held: Sequence[Held], claim: int, stopping: bool, reply: Renewal | None) -> None:
    """Extend the lease, take back jobs that are not named, and check the reply."""
    session = records.sessions.get(id)
    if session is None or not session.present:
        raise SessionLost(id)
    if reply is None:
        raise Mismatch(f"{id} is alive, and its renewal was refused")
    if stopping:
        session.state = SessionState.STOPPING
    _extend(records, session)
    mine = {Held(job.id, job.fence): job for job in records.held_by(id)}
    taken_back = {
        job.id
        for name, job in mine.items()
        if name not in held and job.new.kind is not JobKind.TURN and job.claim <= claim
    }
    cancelled_back = {job for job in taken_back if records.jobs[job].cancel_requested}
    _check_renewal(records, id, held, mine, reply)
    # Whether a job that is cancelled while it is taken back counts as taken back is unspecified.
    if not taken_back - cancelled_back <= set(reply.taken_back) <= taken_back:
        raise Mismatch(f"{id}: {reply.taken_back} were taken back, by the rules {sorted(taken_back)}")
    for job in taken_back:
        _take_back(records, records.jobs[job])


def _check_renewal(
    records: Records, id: str, held: Sequence[Held], mine: dict[Held, JobRecord], reply: Renewal
) -> None:
    lost = {name for name in held if name not in mine}
    # A claim that the session itself has ended is not its own any more, but it was not lost either.
    ended = {h for h in lost if h.id in records.jobs and (id, h.fence) in records.jobs[h.id].written}
    if not lost - ended <= set(reply.lost) <= lost:
        raise Mismatch(f"{id}: {reply.lost} are lost, by the rules {lost}")
    named = {job.id for name, job in mine.items() if name in held and job.cancel_requested}
    if not named <= set(reply.cancel) <= {job.id for job in mine.values() if job.cancel_requested}:
        raise Mismatch(f"{id}: must cancel {reply.cancel}, by the rules {sorted(named)}")


def leave(records: Records, id: str, begun: Sequence[Held] | None) -> None:
    """End a session."""
    session = records.sessions.get(id)
    if session is None:
        raise NotFound(id)
    if not session.present:
        return
    session.state = SessionState.ENDED
    lost: list[str] = []
    if session.index is not None and session.new.index is None:
        lost = bindings.lose(records, session.new.pool, session.index)
    give_up_jobs(records, session, begun=begun)
    bindings.rebind(records, session.new.pool, lost)


def give_up_jobs(records: Records, session: SessionRecord, *, begun: Sequence[Held] | None) -> Counter[str]:
    """Take back the jobs of a session: those that had begun (None: all) as after a crash, the others uncharged."""
    outcomes: Counter[str] = Counter()
    for job in list(records.jobs.values()):
        waits_here = job.new.kind is JobKind.TURN and job.waiting and job.new.waiter == session.new.id
        if waits_here:
            endings.end(records, job, JobState.CANCELLED, Reason.WAITER_GONE)
            outcomes["cancelled"] += 1
        elif job.state is JobState.RUNNING and job.holder == session.new.id:
            if begun is None or Held(job.id, job.fence) in begun or job.new.kind is JobKind.TURN:
                outcomes[endings.crash(records, job)] += 1
            else:
                _take_back(records, job)
            if job.waiting and job.new.sticky is not None:
                binding = bindings.active(records, job.new.pool, job.new.sticky)
                job.index = None if binding is None else binding.index
    return outcomes


def _take_back(records: Records, job: JobRecord) -> None:
    job.taken_back.add((job.holder, job.fence))
    endings.give_back(records, job)


def rescue(records: Records, *, declare: bool, reply: Rescued) -> None:
    """Declare sessions with expired leases dead, and take back their jobs and bindings."""
    now = records.clock.monotonic()
    before = {id for id, job in records.jobs.items() if job.state is JobState.CANCELLED}
    dead = [s for s in records.sessions.values() if s.present and s.lease_ends < now] if declare else []
    ended = [s for s in records.sessions.values() if s.state is SessionState.ENDED and s.lease_ends < now]
    for session in dead:
        session.state = SessionState.DEAD
    gone = [s for s in dead + ended if s.index is not None and not _index_is_held(records, s)]
    lost = [(s.new.pool, key) for s in gone for key in bindings.lose(records, s.new.pool, s.index or 0)]
    outcomes: Counter[str] = Counter()
    for session in dead:
        for job in records.jobs.values():
            # If several die together, the place of a job of one may first be granted to a turn of the next.
            waits_here = job.new.kind is JobKind.TURN and job.waiting and job.new.waiter == session.new.id
            job.start_unsaid |= waits_here and len(dead) > 1
        outcomes += give_up_jobs(records, session, begun=None)
    copies = bindings.lose_copies(records)
    for pool in {pool for pool, _ in lost}:
        bindings.rebind(records, pool, [key for other, key in lost if other == pool])
    cancelled = len({id for id, job in records.jobs.items() if job.state is JobState.CANCELLED} - before)
    ruled = ({session.new.id for session in dead}, outcomes["failed"], len(lost))
    if (set(reply.declared), reply.failed, reply.lost_bindings) != ruled:
        raise Mismatch(f"rescue returned {reply}, by the rules declared, failed, lost bindings are {ruled}")
    # Whether clean-ups, copies and waiting turns count as rescued is unspecified.
    if not outcomes["retried"] - copies <= reply.retried <= outcomes["retried"] or reply.cancelled > cancelled:
        raise Mismatch(f"rescue returned {reply}, by the rules {outcomes}")


def _index_is_held(records: Records, session: SessionRecord) -> bool:
    """Whether another session has the index, or the index is reserved for its return."""
    now = records.clock.monotonic()
    return any(
        other is not session
        and other.index == session.index
        and other.new.pool == session.new.pool
        and (other.present or (other.state is SessionState.ENDED and other.lease_ends >= now))
        for other in records.sessions.values()
    )
