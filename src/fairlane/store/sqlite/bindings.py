"""Sticky keys: binding them to workers, draining and releasing them, and losing them with their worker.

`place` decides where a job goes, before it arrives. A binding's clean-up waits behind the gate CLEANUP until it is
alone; jobs that come while it runs wait behind the same gate.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...model.binding import IDLE_SECONDS
from ...model.job import JobKind, JobState, Reason
from ...model.placement import choose
from ...model.session import worker_name
from ..codes import CLEANUP, PENDING, RUNNING, UNBOUND, UNGATED
from . import fair_order, lane_limits
from .job_record import Entry, entry_of
from .step import Step

USED_RESOLUTION = 60.0
"""`used_at` is written at most this often: it only tells bindings that were idle for a day."""

OPEN_STATES = ("open", "draining")

End = Callable[[Step, Entry, JobState, Reason], None]
"""How a step ends a job; given by the caller, because ending a job looks at its binding in turn."""


class Tie(msgspec.Struct):
    """An open or draining binding."""

    seq: int
    pool: str
    key: str
    index: int
    state: str
    used_at: float
    cleanup: int | None


def place(step: Step, e: Entry, end: End) -> None:
    """Decide the inbox and the gate of a job that arrives. The caller saves it."""
    e.gate = UNGATED
    if e.kind == JobKind.CLEANUP:
        return
    if e.direct is not None:
        e.inbox = worker_name(e.pool, e.direct)
        return
    if e.sticky is None:
        e.inbox = ""
        return
    if e.binding is not None:
        # It comes back (a retry, a rescue) and belongs to its binding still: that is no late job.
        row = step.one("binding_get", e.binding)
        if row is not None and row[4] in OPEN_STATES:
            e.inbox = worker_name(row[1], row[3])
            return
        e.binding = None
    tie = _open_tie(step, e.pool, e.sticky)
    if tie is None:
        tie = _bind(step, e.pool, e.sticky)
    elif tie.state == "draining":
        _reopen(step, tie, e, end)
    if tie is None:
        e.gate, e.inbox, e.binding = UNBOUND, f"{e.pool}/", None
        return
    e.binding = tie.seq
    e.inbox = worker_name(tie.pool, tie.index)
    _touch(step, tie)


def _touch(step: Step, tie: Tie) -> None:
    if step.now - tie.used_at > USED_RESOLUTION:
        step.run("binding_used", step.now, tie.seq)


def _open_tie(step: Step, pool: str, key: str) -> Tie | None:
    row = step.one("binding_open", pool, key)
    return None if row is None else Tie(*row)


def _bind(step: Step, pool: str, key: str) -> Tie | None:
    live = [index for (index,) in step.all("pool_live", pool, step.boot, step.mono)]
    index = choose(live, dict(step.all("pool_bindings", pool)))
    if index is None:
        return None
    seq = step.run("binding_insert", pool, key, index, step.now, step.now).lastrowid
    assert seq is not None
    return Tie(seq, pool, key, index, "open", step.now, None)


def _reopen(step: Step, tie: Tie, e: Entry, end: End) -> None:
    """A late job. Before the clean-up has started it cancels it; afterwards it waits behind it."""
    cleanup = None if tie.cleanup is None else step.entry(tie.cleanup)
    # Once claimed it counts as started, even if it was handed back since: jobs may wait behind it already.
    if cleanup is not None and cleanup.fence > 0:
        e.gate = CLEANUP
        return
    tie.state = "open"
    step.run("binding_reopen", step.now, tie.seq)
    if cleanup is not None:
        end(step, cleanup, JobState.CANCELLED, Reason.REOPENED)


def used(step: Step, e: Entry) -> None:
    """A job of a binding is final, or has left it: the binding may go on with its release."""
    if e.binding is None:
        return
    row = step.one("binding_get", e.binding)
    if row is None or row[4] not in OPEN_STATES:
        return
    tie = Tie(*row)
    _touch(step, tie)
    if tie.state == "draining":
        drain(step, tie)


def cleaned(step: Step, e: Entry, state: JobState) -> None:
    """The clean-up of a binding is final."""
    row = step.one("binding_get", e.binding)
    if row is None or row[4] != "draining" or row[6] != e.seq:
        return
    held = list(map(entry_of, step.all("binding_gated", e.binding)))
    if not held:
        if step.one("binding_busy", e.binding, e.seq) is not None:
            # It was cancelled before its turn came: the release goes on without it.
            step.run("binding_drain", None, e.binding)
        else:
            step.run("binding_close", "released", step.now, int(state is not JobState.COMPLETED), e.binding)
        return
    step.run("binding_cleaned", step.now, int(state is not JobState.COMPLETED), e.binding)
    for waiting in held:
        lane_limits.ungate(step, waiting)
        step.save(waiting)


def drain(step: Step, tie: Tie) -> bool:
    """Take a draining binding as far as it can go; True when it is released."""
    if step.one("binding_busy", tie.seq, tie.cleanup or 0) is not None:
        return False
    if tie.cleanup is None:
        step.run("binding_close", "released", step.now, 0, tie.seq)
        return True
    cleanup = step.entry(tie.cleanup)
    if cleanup is not None and cleanup.state == PENDING and cleanup.gate == CLEANUP:
        lane_limits.ungate(step, cleanup)
        step.save(cleanup)
    return False


def release(step: Step, pool: str, key: str, store_cleanup: Callable[[Tie], int] | None) -> str:
    """Begin, or find begun, the release of a key. `store_cleanup` stores the clean-up job and returns its number."""
    tie = _open_tie(step, pool, key)
    if tie is None:
        return "nothing"
    if tie.state == "open":
        tie.state = "draining"
        tie.cleanup = None if store_cleanup is None else store_cleanup(tie)
        step.run("binding_drain", tie.cleanup, tie.seq)
        return "released" if drain(step, tie) else "draining"
    return "draining"


def lose(step: Step, pool: str, index: int, end: End) -> int:
    """A worker is gone: close its bindings as lost, cancel their clean-ups, and place their waiting jobs anew."""
    ties = [Tie(*row) for row in step.all("bindings_of_worker", pool, index)]
    for tie in ties:
        step.run("binding_close", "lost", step.now, 0, tie.seq)
    for tie in ties:
        for e in map(entry_of, step.all("binding_records", tie.seq)):
            if e.kind == JobKind.CLEANUP:
                if e.state != RUNNING:
                    end(step, e, JobState.CANCELLED, Reason.WORKER_LOST)
            elif e.state == PENDING:
                replace(step, e, end)
            elif e.state != RUNNING:
                # It waits for its retry, and is placed when it arrives.
                e.binding, e.inbox = None, ""
                step.save(e)
    return len(ties)


def replace(step: Step, e: Entry, end: End) -> None:
    """Move a pending job to where it belongs now. It keeps its arrival and its grant."""
    fair_order.withdraw(step, e)
    e.binding = None
    place(step, e, end)
    if e.gate == UNGATED and e.granted:
        fair_order.enter(step, e)
    elif e.granted and e.lane is not None:
        e.granted_at = step.now
    step.save(e)


def bind_unbound(step: Step, pool: str, limit: int, end: End) -> int:
    """A pool has a live worker: jobs that waited for one are bound, in order of arrival."""
    bound = 0
    for row in step.all("records_unbound", f"{pool}/", limit):
        e = entry_of(row)
        place(step, e, end)
        if e.gate == UNBOUND:
            break
        if e.gate == UNGATED:
            lane_limits.ungate(step, e)
        step.save(e)
        bound += 1
    return bound


def drain_idle(step: Step, limit: int) -> int:
    """Drain open bindings that nobody used for a day; one that still has jobs counts as used."""
    drained = 0
    for row in step.all("bindings_idle", step.now - IDLE_SECONDS, limit):
        tie = Tie(*row)
        if step.one("binding_busy", tie.seq, 0) is not None:
            step.run("binding_used", step.now, tie.seq)
            continue
        step.run("binding_drain", None, tie.seq)
        tie.state = "draining"
        drain(step, tie)
        drained += 1
    return drained
