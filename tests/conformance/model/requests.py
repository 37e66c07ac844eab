"""Requests: what clients send. Jobs, cancels, releases."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fairlane.errors import Conflict, InvalidInput, NotFound
from fairlane.model.binding import BindingState, Release
from fairlane.model.job import Enqueued, JobKind, JobState, NewJob, Reason
from fairlane.model.lanes import terms
from fairlane.model.session import SessionState

from . import bindings, endings, lines
from .records import JobRecord, Mismatch, Records


def enqueue(records: Records, jobs: Sequence[NewJob]) -> list[tuple[str, bool]]:
    """Store jobs, all or none. Returns the id of each, and whether this call created it."""
    known = {job.id: job.new for job in records.jobs.values()}
    made: list[NewJob] = []
    answers: list[tuple[str, bool]] = []
    for new in jobs:
        if new.id in known:
            if known[new.id] != new:
                raise Conflict(new.id)
            answers.append((new.id, False))
            continue
        holder = unique_holder(records, new) or next((m.id for m in made if _same_unique(m, new)), None)
        if holder is not None:
            answers.append((holder, False))
            continue
        _check(records, new)
        known[new.id] = new
        made.append(new)
        answers.append((new.id, True))
    for new in made:
        _store(records, new)
    return answers


def answer(records: Records, answers: Sequence[tuple[str, bool]]) -> list[Enqueued]:
    """The answers with the state of each job after the step."""
    return [Enqueued(id, created, records.jobs[id].state) for id, created in answers]


def _same_unique(one: NewJob, other: NewJob) -> bool:
    return one.unique is not None and (one.task, one.unique) == (other.task, other.unique)


def unique_holder(records: Records, new: NewJob) -> str | None:
    """The job that holds the unique value of another one."""
    for job in records.jobs.values():
        if _same_unique(job.new, new):
            extended = job.new.unique_for is not None and records.now < job.enqueued_at + job.new.unique_for
            if not job.state.final or extended:
                return job.id
    return None


def unique_is_unsaid(records: Records, new: NewJob) -> bool:
    """Whether the value is free depends on how `unique_for` is counted: from the enqueue or from the end."""
    return any(
        _same_unique(job.new, new)
        and job.finished_at is not None
        and job.new.unique_for is not None
        and job.enqueued_at + job.new.unique_for <= records.now < job.finished_at + job.new.unique_for
        for job in records.jobs.values()
    )


def _check(records: Records, new: NewJob) -> None:
    settings = records.settings(new.queue)
    if not settings.admits(new.lane):
        raise InvalidInput("lane", "is not one of the queue's lanes")
    if new.kind is JobKind.TURN:
        if terms(settings, new.lane).limit is None:
            raise InvalidInput("lane", "has no limit")
        waiter = records.sessions.get(new.waiter or "")
        if waiter is None or waiter.state is not SessionState.LIVE:
            raise InvalidInput("waiter", "is not live")


def _store(records: Records, new: NewJob) -> None:
    records.queue(new.queue)
    job = JobRecord(new, JobState.SCHEDULED, records.now)
    records.jobs[new.id] = job
    due = records.now + new.delay if new.run_at is None else new.run_at
    if new.kind is JobKind.BROADCAST:
        job.state = JobState.RUNNING
        for index in records.live_workers(new.pool):
            add_copy(records, job, index)
    elif due > records.now:
        job.due_at = due
    else:
        lines.arrive(records, job, fresh=True)


def add_copy(records: Records, parent: JobRecord, index: int) -> None:
    """Add the copy of a broadcast for one worker, under the id that the store assigned."""
    if any(copy.new.worker == index for copy in records.children(parent.id)):
        return
    name = f"{parent.new.pool}/{index}"
    shown = [job for job in records.seen.jobs.values() if job.parent == parent.id and job.worker == name]
    if len(shown) != 1:
        raise Mismatch(f"{len(shown)} copies of {parent.id} for {name}")
    new = msgspec.structs.replace(parent.new, id=shown[0].id, kind=JobKind.JOB, ttl=0.0, worker=index)
    copy = JobRecord(new, JobState.PENDING, records.now, parent=parent.id)
    records.jobs[copy.id] = copy
    lines.arrive(records, copy)


def cancel(records: Records, ids: Sequence[str]) -> None:
    """Cancel jobs. Returns the state of each afterwards."""
    for id in ids:
        if id not in records.jobs:
            raise NotFound(id)
    for id in ids:
        job = records.jobs[id]
        if job.waiting:
            endings.end(records, job, JobState.CANCELLED, Reason.BY_USER)
        elif job.state is JobState.RUNNING:
            job.cancel_requested = True
            cancel(records, [copy.id for copy in records.children(id) if not copy.state.final])


def release(records: Records, pool: str, key: str, cleanup: NewJob | None, reply: Release) -> None:
    """Release a key: clean-up first and alone, release last."""
    binding = bindings.active(records, pool, key)
    if binding is None:
        was_released = any(
            (b.pool, b.key) == (pool, key) and b.state is BindingState.RELEASED for b in records.bindings
        )
        # A repeated release of a released key may be answered like the first one, or like one of an unbound key.
        allowed = {Release.NOTHING, Release.RELEASED} if was_released else {Release.NOTHING}
        if reply not in allowed:
            raise Mismatch(f"{key} is not bound, and releasing it returned {reply}")
        return
    if binding.state is BindingState.OPEN:
        binding.state = BindingState.DRAINING
        if cleanup is not None:
            records.queue(cleanup.queue)
            binding.cleanup = cleanup.id
            job = JobRecord(cleanup, JobState.PENDING, records.now, index=binding.index)
            records.jobs[cleanup.id] = job
            lines.arrive(records, job)
    bindings.settle(records)
    ruled = Release.RELEASED if binding.state is BindingState.RELEASED else Release.DRAINING
    if reply is not ruled:
        raise Mismatch(f"releasing {key} returned {reply}, by the rules it is {ruled}")
