"""Bindings: which worker a sticky key belongs to, and how it is released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from fairlane.model.binding import Binding, BindingState
from fairlane.model.job import JobKind, JobState, Reason
from fairlane.model.placement import choose

from . import endings
from .records import BindingRecord, JobRecord, Mismatch, Records


def active(records: Records, pool: str, key: str) -> BindingRecord | None:
    """The binding that holds a key now."""
    return next((b for b in records.bindings if b.active and (b.pool, b.key) == (pool, key)), None)


def of_cleanup(records: Records, job: JobRecord) -> BindingRecord | None:
    """The active binding that a clean-up belongs to."""
    return next((b for b in records.bindings if b.active and b.cleanup == job.id), None)


def seat(records: Records, job: JobRecord, *, fresh: bool) -> None:
    """Find the worker of a sticky job: its key's, or a newly chosen one; none when no worker is live."""
    assert job.new.sticky is not None
    binding = active(records, job.new.pool, job.new.sticky)
    if binding is None:
        index = _choose(records, job.new.pool)
        if index is None:
            job.index = None
            return
        binding = BindingRecord(job.new.pool, job.new.sticky, index)
        records.bindings.append(binding)
    elif fresh and binding.state is BindingState.DRAINING:
        _reopen(records, binding)
    job.index = binding.index


def _choose(records: Records, pool: str, more: Counter[int] | None = None) -> int | None:
    load = Counter(b.index for b in records.bindings if b.pool == pool and b.state is BindingState.OPEN)
    return choose(records.live_workers(pool), load + (more or Counter()))


def _reopen(records: Records, binding: BindingRecord) -> None:
    """A job for a draining binding: it cancels a clean-up that has not begun, else waits for its end."""
    if binding.cleanup is not None:
        cleanup = records.jobs[binding.cleanup]
        if cleanup.state is JobState.RUNNING:
            return
        binding.cleanup = None
        endings.end(records, cleanup, JobState.CANCELLED, Reason.REOPENED)
    binding.state = BindingState.OPEN


def in_use(records: Records, binding: BindingRecord) -> bool:
    """Whether a job of the key is pending, running or retrying; its clean-up does not count."""
    return any(
        job.state in (JobState.PENDING, JobState.RUNNING) or job.retrying
        for job in records.jobs.values()
        if (job.new.pool, job.new.sticky) == (binding.pool, binding.key)
    )


def startable(records: Records, job: JobRecord) -> bool:
    """Whether the binding lets the job start: a clean-up only alone, and nothing beside a running clean-up."""
    if job.new.kind is JobKind.CLEANUP:
        binding = of_cleanup(records, job)
        return binding is not None and not in_use(records, binding)
    if job.new.sticky is None:
        return True
    binding = active(records, job.new.pool, job.new.sticky)
    if binding is None or binding.cleanup is None:
        return binding is not None
    return records.jobs[binding.cleanup].state is not JobState.RUNNING


def cleanup_ended(records: Records, cleanup: JobRecord) -> None:
    """After its clean-up a binding is released, unless jobs of the key arrived meanwhile."""
    binding = of_cleanup(records, cleanup)
    if binding is None:
        return
    binding.state = BindingState.OPEN if in_use(records, binding) else BindingState.RELEASED
    if binding.active:
        binding.cleanup = None


def settle(records: Records) -> None:
    """Release every draining binding that nothing holds any more."""
    for binding in records.bindings:
        if binding.state is BindingState.DRAINING and binding.cleanup is None and not in_use(records, binding):
            binding.state = BindingState.RELEASED


def lose(records: Records, pool: str, index: int) -> list[str]:
    """Close the bindings of a worker that is gone. Returns their keys. Their jobs wait unbound until `rebind`."""
    lost = [b for b in records.bindings if b.active and (b.pool, b.index) == (pool, index)]
    for binding in lost:
        binding.state = BindingState.LOST
        if binding.cleanup is not None:
            cleanup = records.jobs[binding.cleanup]
            if not cleanup.state.final:
                endings.end(records, cleanup, JobState.CANCELLED, Reason.WORKER_LOST)
        for job in records.jobs.values():
            if (job.new.pool, job.new.sticky) == (binding.pool, binding.key) and job.waiting:
                job.index = None
    return [binding.key for binding in lost]


def rebind(records: Records, pool: str, keys: Collection[str] | None = None) -> None:
    """Bind unbound jobs, of `keys` or all, if there is a worker to bind them to."""
    if records.live_workers(pool):
        unbound = _unbound(records, pool)
        _bind(records, pool, [job for job in unbound if keys is None or job.new.sticky in keys])


def adopt(records: Records, pool: str) -> None:
    """Any step may bind unbound jobs, as long as it follows the rule for placement."""
    shown = {job.id for job in records.seen.jobs.values() if job.worker is not None}
    _bind(records, pool, [job for job in _unbound(records, pool) if job.id in shown])


def _unbound(records: Records, pool: str) -> list[JobRecord]:
    return [
        job
        for job in records.jobs.values()
        if job.new.pool == pool and job.new.sticky and job.state is JobState.PENDING and job.index is None
    ]


def _bind(records: Records, pool: str, jobs: list[JobRecord]) -> None:
    """Bind waiting jobs. All keys are equal: any of them may get any of the indexes that the rule yields."""
    keys = {job.new.sticky for job in jobs if job.new.sticky and active(records, pool, job.new.sticky) is None}
    ruled: Counter[int] = Counter()
    for _ in keys:
        index = _choose(records, pool, ruled)
        if index is not None:
            ruled[index] += 1
    shown = {b.key: b.index for b in records.seen.bindings if b.pool == pool and b.key in keys and _is_active(b)}
    if Counter(shown.values()) != ruled:
        raise Mismatch(f"the keys {sorted(keys)} were bound to {shown}, by the rule to {dict(ruled)}")
    records.bindings += [BindingRecord(pool, key, index) for key, index in shown.items()]
    for job in jobs:
        binding = active(records, pool, job.new.sticky or "")
        job.index = None if binding is None else binding.index


def _is_active(binding: Binding) -> bool:
    return binding.state in (BindingState.OPEN, BindingState.DRAINING)


def lose_copies(records: Records) -> int:
    """Copies of a broadcast for a worker that is gone: how long they wait for its return is unspecified."""
    shown = {job.id for job in records.seen.jobs.values() if job.reason is Reason.WORKER_LOST}
    present = {(s.new.pool, s.index) for s in records.sessions.values() if s.present}
    copies = [job for job in records.jobs.values() if job.parent is not None and job.waiting and job.id in shown]
    lost = [job for job in copies if (job.new.pool, job.new.worker) not in present]
    for job in lost:
        endings.end(records, job, JobState.CANCELLED, Reason.WORKER_LOST)
    return len(lost)
