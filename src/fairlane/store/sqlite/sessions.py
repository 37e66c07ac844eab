"""Sessions: registering, renewing, leaving, and being declared dead, with all that follows for their jobs and
bindings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...errors import IndexTaken, InvalidInput, NotFound, SessionLost
from ...model.job import Held, JobState, Reason
from ...model.maintenance import Rescued
from ...model.placement import lowest_free
from ...model.session import NewSession, Renewal, SessionKind, worker_name
from ..codes import RUNNING
from . import bindings, broadcasts, damage, endings, enqueue
from .endings import Holder
from .job_record import Entry, entry_of
from .leases import lease_left
from .step import Step

MOST_BOUND_AT_REGISTER = 1_000


class Presence(msgspec.Struct):
    """A session's row. The order is that of the query `session_by_id`."""

    seq: int
    id: str
    kind: str
    state: str
    host: str
    pid: int
    pool: str
    index: int | None
    named: int
    queues: str
    slots: int | None
    reserved_high: int
    reserved_normal: int
    started_at: float
    ended_at: float | None
    lease: float
    boot: str
    expires: float
    claim: int
    task_set: str | None

    @staticmethod
    def find(step: Step, id: str) -> Presence | None:
        """The session called `id`."""
        row = step.one("session_by_id", id)
        return None if row is None else Presence(*row)

    @property
    def present(self) -> bool:
        """Whether it is neither ended nor dead. Its lease may have run out: expired is not dead."""
        return self.state in ("live", "stopping")

    @property
    def worker(self) -> str:
        """How history names it: a worker by its place, anybody else by its host."""
        return self.host if self.index is None else worker_name(self.pool, self.index)

    @property
    def holder(self) -> Holder:
        """It, as the holder of jobs."""
        return Holder(self.id, self.worker)

    def remaining(self, mono: float, boot: str) -> float:
        """Seconds of lease left. Readings of another boot mean nothing: such a lease is over, as is a damaged one."""
        if type(self.expires) is not float or type(self.lease) is not float:
            return 0.0
        return lease_left(self.expires, self.boot, self.lease, mono, boot)


def register(step: Step, new: NewSession) -> None:
    """Make a session known, take over or give out an index, and bring the worker what waited for it."""
    known = Presence.find(step, new.id)
    if known is not None:
        if not known.present:
            raise SessionLost("this session has ended or was declared dead; register under a new id")
        step.run("session_renew", step.mono + known.lease, step.boot, known.seq)
        _back_in_time(step, known)
        return
    index = None
    if new.kind is SessionKind.WORKER:
        index = lowest_free(_taken(step, new.pool)) if new.index is None else new.index
        _make_room(step, new, index)
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


def _taken(step: Step, pool: str) -> list[int]:
    """Indices an unnamed worker may not have: of sessions that are there, and of named ones that may come back."""
    return [index for (index,) in step.all("indices_taken", pool, step.boot, step.mono)]


def _make_room(step: Step, new: NewSession, index: int) -> None:
    """The same index cannot be held twice. On the same host the newcomer is the old one restarted."""
    row = step.one("session_at_index", new.pool, index)
    if row is not None:
        old = Presence(*row)
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
        last = Presence(*row)
        if last.host != new.host or last.remaining(step.mono, step.boot) <= 0:
            # The state its keys were bound to lies on another machine, or was given up.
            bindings.lose(step, new.pool, index, endings.end)


def renew(step: Step, id: str, held: Sequence[Held], claim: int, stopping: bool) -> Renewal:
    """Extend a lease, and settle what the session and the store believe differently."""
    who = Presence.find(step, id)
    if who is None or not who.present:
        raise SessionLost("this session is unknown, ended or declared dead; drop its jobs and register a new one")
    step.run("session_renew", step.mono + who.lease, step.boot, who.seq)
    if stopping and who.state == "live":
        step.run("session_stopping", who.seq)
    _back_in_time(step, who)
    named = set(held)
    cancel, taken_back, found = [], [], set()
    for row in step.all("session_records", who.seq):
        e = entry_of(row)
        claim_of_job = Held(e.id, e.fence)
        if claim_of_job in named:
            found.add(claim_of_job)
            if e.cancel:
                cancel.append(e.id)
        elif e.claim is not None and e.claim <= claim:
            endings.take_back(step, e, who.holder)
            taken_back.append(e.id)
    return Renewal(
        lost=tuple(h for h in held if h not in found),
        cancel=tuple(cancel),
        taken_back=tuple(taken_back),
        now=step.now,
    )


def _back_in_time(step: Step, before: Presence) -> None:
    """A worker has renewed. If its lease had run out, jobs that found no live worker meanwhile are bound now."""
    if before.index is not None and before.remaining(step.mono, step.boot) <= 0:
        bindings.bind_unbound(step, before.pool, MOST_BOUND_AT_REGISTER, endings.end)


def leave(step: Step, id: str, begun: Sequence[Held] | None) -> None:
    """End a session and give back what it has."""
    who = Presence.find(step, id)
    if who is None:
        raise NotFound(f"there is no session {id!r}")
    if not who.present:
        return
    step.run("session_end", "ended", step.now, who.seq)
    _waiter_gone(step, who)
    if who.index is not None and not who.named:
        bindings.lose(step, who.pool, who.index, endings.end)
    started = None if begun is None else set(begun)
    damage.adopt_held(step, who.seq)
    for row in step.all("session_records", who.seq):
        e = entry_of(row)
        if started is None or Held(e.id, e.fence) in started or e.claim is None:
            endings.crash(step, e, who.holder)
        else:
            endings.take_back(step, e, who.holder)


def _waiter_gone(step: Step, who: Presence) -> int:
    """Turns that a session waited for go with it, before those it holds: or the next would start in a dead session."""
    gone = 0
    for row in step.all("waiter_records", who.seq):
        # Read again: the end of one turn may have started the next. What runs is ended with the rest of what it holds.
        e = step.entry(row[0])
        if e is not None and e.state != RUNNING:
            endings.end(step, e, JobState.CANCELLED, Reason.WAITER_GONE)
            gone += 1
    return gone


def _declare_dead(step: Step, who: Presence, *, keep_bindings: bool = False) -> tuple[int, dict[JobState, int]]:
    """A session is dead, for good. Its bindings go first, so that its jobs are placed anew at once."""
    step.run("session_end", "dead", step.now, who.seq)
    cancelled = _waiter_gone(step, who)
    lost = 0
    if who.index is not None and not keep_bindings:
        lost = bindings.lose(step, who.pool, who.index, endings.end)
    fates = {JobState.CANCELLED: cancelled}
    damage.adopt_held(step, who.seq)
    for row in step.all("session_records", who.seq):
        fate = endings.crash(step, entry_of(row), who.holder)
        fates[fate] = fates.get(fate, 0) + 1
    return lost, fates


def rescue(step: Step, limit: int, declare: bool) -> Rescued:
    """Declare the expired dead, take back what the dead and the missing hold, and close bindings nobody serves."""
    if limit < 1:
        raise InvalidInput("limit", "must be at least 1")
    declared: list[str] = []
    lost = 0
    fates: dict[JobState, int] = {}
    more = False
    if declare:
        for row in step.all("sessions_present"):
            who = Presence(*row)
            if who.remaining(step.mono, step.boot) > 0:
                continue
            if sum(fates.values()) >= limit:
                more = True
                break
            declared.append(who.id)
            closed, its = _declare_dead(step, who)
            lost += closed
            for state, count in its.items():
                fates[state] = fates.get(state, 0) + count
    orphans = step.all("records_orphaned", limit)
    for row in orphans:
        e = entry_of(row)
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


def _last_holder(step: Step, e: Entry) -> Holder:
    row = step.one("session_by_seq", e.session)
    return Holder("unknown", "unknown") if row is None else Presence(*row).holder
