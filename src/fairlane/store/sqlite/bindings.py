"""Sticky keys: binding them to workers, draining and releasing them, and losing them with their worker.

`assign_worker` decides the inbox and the gate of a job before it arrives. The clean-up of a binding waits behind the
gate CLEANUP until the binding has no other job; jobs that arrive while it runs wait behind the same gate.
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
from .records import JobRecord, job_record_of
from .step import Step

USED_RESOLUTION = 60.0
"""Least seconds between two writes of `used_at`, which is only used to find bindings that were idle for a day."""

OPEN_STATES = ("open", "draining")

End = Callable[[Step, JobRecord, JobState, Reason], None]
"""`endings.end`, passed by the caller: `endings` imports this module."""


class OpenBinding(msgspec.Struct):
    """An open or draining binding."""

    seq: int
    pool: str
    key: str
    index: int
    state: str
    used_at: float
    cleanup: int | None


def assign_worker(step: Step, e: JobRecord, end: End) -> None:
    """Set the inbox and the gate of a job that arrives. The caller saves it."""
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
        # A retry or a rescued job still belongs to its binding and does not reopen it.
        row = step.one("binding_get", e.binding)
        if row is not None and row[4] in OPEN_STATES:
            e.inbox = worker_name(row[1], row[3])
            return
        e.binding = None
    binding = _open_binding(step, e.pool, e.sticky)
    if binding is None:
        binding = _bind(step, e.pool, e.sticky)
    elif binding.state == "draining":
        _reopen(step, binding, e, end)
    if binding is None:
        e.gate, e.inbox, e.binding = UNBOUND, f"{e.pool}/", None
        return
    e.binding = binding.seq
    e.inbox = worker_name(binding.pool, binding.index)
    _touch(step, binding)


def _touch(step: Step, binding: OpenBinding) -> None:
    if step.now - binding.used_at > USED_RESOLUTION:
        step.run("binding_used", step.now, binding.seq)


def _open_binding(step: Step, pool: str, key: str) -> OpenBinding | None:
    row = step.one("binding_open", pool, key)
    return None if row is None else OpenBinding(*row)


def _bind(step: Step, pool: str, key: str) -> OpenBinding | None:
    live = [index for (index,) in step.all("pool_live", pool, step.boot, step.mono)]
    index = choose(live, dict(step.all("pool_bindings", pool)))
    if index is None:
        return None
    seq = step.run("binding_insert", pool, key, index, step.now, step.now).lastrowid
    assert seq is not None
    return OpenBinding(seq, pool, key, index, "open", step.now, None)


def _reopen(step: Step, binding: OpenBinding, e: JobRecord, end: End) -> None:
    """Handle a job for a draining binding: it cancels a clean-up that has not started, else waits for its end."""
    cleanup = None if binding.cleanup is None else step.active_job(binding.cleanup)
    # A clean-up that was ever claimed counts as started, even if it was handed back: jobs may already wait for it.
    if cleanup is not None and cleanup.fence > 0:
        e.gate = CLEANUP
        return
    binding.state = "open"
    step.run("binding_reopen", step.now, binding.seq)
    if cleanup is not None:
        end(step, cleanup, JobState.CANCELLED, Reason.REOPENED)


def used(step: Step, e: JobRecord) -> None:
    """Continue the release of a binding after one of its jobs is final or has left it."""
    if e.binding is None:
        return
    row = step.one("binding_get", e.binding)
    if row is None or row[4] not in OPEN_STATES:
        return
    binding = OpenBinding(*row)
    _touch(step, binding)
    if binding.state == "draining":
        drain(step, binding)


def cleaned(step: Step, e: JobRecord, state: JobState) -> None:
    """Close or reopen a binding whose clean-up is final."""
    row = step.one("binding_get", e.binding)
    if row is None or row[4] != "draining" or row[6] != e.seq:
        return
    held = list(map(job_record_of, step.all("binding_gated", e.binding)))
    if not held:
        if step.one("binding_busy", e.binding, e.seq) is not None:
            # It was cancelled before it could start: the release continues without a clean-up.
            step.run("binding_drain", None, e.binding)
        else:
            step.run("binding_close", "released", step.now, int(state is not JobState.COMPLETED), e.binding)
        return
    step.run("binding_cleaned", step.now, int(state is not JobState.COMPLETED), e.binding)
    for waiting in held:
        lane_limits.ungate(step, waiting)
        step.save(waiting)


def drain(step: Step, binding: OpenBinding) -> bool:
    """Advance the release of a draining binding; returns whether it is released."""
    if step.one("binding_busy", binding.seq, binding.cleanup or 0) is not None:
        return False
    if binding.cleanup is None:
        step.run("binding_close", "released", step.now, 0, binding.seq)
        return True
    cleanup = step.active_job(binding.cleanup)
    if cleanup is not None and cleanup.state == PENDING and cleanup.gate == CLEANUP:
        lane_limits.ungate(step, cleanup)
        step.save(cleanup)
    return False


def release(step: Step, pool: str, key: str, store_cleanup: Callable[[OpenBinding], int] | None) -> str:
    """Begin the release of a key, unless it has begun. `store_cleanup` stores the clean-up job and returns its seq."""
    binding = _open_binding(step, pool, key)
    if binding is None:
        return "nothing"
    if binding.state == "open":
        binding.state = "draining"
        binding.cleanup = None if store_cleanup is None else store_cleanup(binding)
        step.run("binding_drain", binding.cleanup, binding.seq)
        return "released" if drain(step, binding) else "draining"
    return "draining"


def lose(step: Step, pool: str, index: int, end: End) -> int:
    """Close the bindings of a lost worker, cancel their clean-ups, and assign their waiting jobs to workers again."""
    lost = [OpenBinding(*row) for row in step.all("bindings_of_worker", pool, index)]
    for binding in lost:
        step.run("binding_close", "lost", step.now, 0, binding.seq)
    for binding in lost:
        for e in map(job_record_of, step.all("binding_records", binding.seq)):
            if e.kind == JobKind.CLEANUP:
                if e.state != RUNNING:
                    end(step, e, JobState.CANCELLED, Reason.WORKER_LOST)
            elif e.state == PENDING:
                reassign_worker(step, e, end)
            elif e.state != RUNNING:
                # A scheduled job is assigned to a worker when it arrives.
                e.binding, e.inbox = None, ""
                step.save(e)
    return len(lost)


def reassign_worker(step: Step, e: JobRecord, end: End) -> None:
    """Move a pending job to where it belongs now. It keeps its arrival and its grant."""
    fair_order.withdraw(step, e)
    e.binding = None
    assign_worker(step, e, end)
    if e.gate == UNGATED and e.granted:
        fair_order.enter(step, e)
    elif e.granted and e.lane is not None:
        e.granted_at = step.now
    step.save(e)


def bind_unbound(step: Step, pool: str, limit: int, end: End) -> int:
    """Bind jobs that wait for a live worker of a pool, in order of arrival."""
    bound = 0
    for row in step.all("records_unbound", f"{pool}/", limit):
        e = job_record_of(row)
        assign_worker(step, e, end)
        if e.gate == UNBOUND:
            break
        if e.gate == UNGATED:
            lane_limits.ungate(step, e)
        step.save(e)
        bound += 1
    return bound


def drain_idle(step: Step, limit: int) -> int:
    """Drain open bindings that were not used for a day; one that still has jobs counts as used."""
    drained = 0
    for row in step.all("bindings_idle", step.now - IDLE_SECONDS, limit):
        binding = OpenBinding(*row)
        if step.one("binding_busy", binding.seq, 0) is not None:
            step.run("binding_used", step.now, binding.seq)
            continue
        step.run("binding_drain", None, binding.seq)
        binding.state = "draining"
        drain(step, binding)
        drained += 1
    return drained
