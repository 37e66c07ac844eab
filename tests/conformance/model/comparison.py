"""Compares what readers see with what the model says they must see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fairlane.model.job import Job, JobKind, JobState, Priority
from fairlane.model.reading import Counts
from fairlane.model.session import worker_name

from . import lines
from .engine import Model
from .records import JobRecord, Records, Sight


def differences(model: Model, sight: Sight, unranked: frozenset[str] = frozenset()) -> list[str]:
    """A sentence for everything that is not as it must be.

    `unranked` names queues whose order of arrival the rules leave open: copies of a broadcast, clean-ups.
    """
    records = model.records
    found = [f"nobody asked for the job {id}" for id in sight.jobs.keys() - records.jobs.keys()]
    for job in records.jobs.values():
        shown = sight.jobs.get(job.id)
        if shown is None:
            found.append(f"{job.id} is gone")
        else:
            found += [f"{job.id}: {what}" for what in _job(records, job, shown)]
            if job.new.queue not in unranked:
                found += [f"{job.id}: {what}" for what in _standing(records, job, sight)]
    for queue in records.queues.keys() - unranked:
        found += _arrivals(records, queue, sight)
    found += _queues(records, sight)
    found += _sessions(records, sight)
    found += _bindings(records, sight)
    found += _ended(records, sight)
    leader = None if sight.leader is None else sight.leader.number
    ruled = None if model.leads is None else model.leads.number
    if leader != ruled:
        found.append(f"the leader's term is {leader}, by the rules {ruled}")
    return found


def _differing(**pairs: tuple[object, object]) -> Iterator[str]:
    for what, (shown, ruled) in pairs.items():
        if shown != ruled:
            yield f"{what} is {shown}, by the rules {ruled}"


def _job(records: Records, job: JobRecord, shown: Job) -> Iterator[str]:
    yield from _differing(
        state=(shown.state, job.state), reason=(shown.reason, job.reason), payload=(shown.payload, job.payload)
    )
    if job.new.kind is JobKind.BROADCAST or job.start_unsaid:
        return
    yield from _differing(fence=(shown.fence, job.fence))
    if not job.charge_unsaid:
        yield from _differing(attempt=(shown.attempt, job.attempt))
    if not job.state.final:
        yield from _differing(suspect=(shown.suspect, job.suspect))
    if job.state is JobState.RUNNING:
        yield from _differing(
            holder=(shown.session, job.holder), cancel_requested=(shown.cancel_requested, job.cancel_requested)
        )
        session = records.sessions.get(job.holder or "")
        if session is not None and session.index is not None:
            yield from _differing(worker=(shown.worker, worker_name(session.new.pool, session.index)))
    elif job.state is JobState.PENDING and job.index is not None:
        yield from _differing(worker=(shown.worker, worker_name(job.new.pool, job.index)))
    if job.due_at is not None and (shown.due_at is None or abs(shown.due_at - job.due_at) > 1e-3):
        yield f"due_at is {shown.due_at}, by the rules {job.due_at}"


def _ended(records: Records, sight: Sight) -> Iterator[str]:
    for job in records.jobs.values():
        reported = sight.ended.get(job.id)
        if (reported is not None) != (job.state in (JobState.FAILED, JobState.CANCELLED)):
            yield f"{job.id} is {job.state}, and the feed of ended jobs has {reported}"
        elif reported is not None and (reported.state, reported.reason) != (job.state, job.reason):
            yield f"the feed of ended jobs has {reported}, by the rules {job.state} for {job.reason}"


def _standing(records: Records, job: JobRecord, sight: Sight) -> Iterator[str]:
    position = sight.positions.get(job.id)
    if (position is not None) != job.waiting:
        yield f"its position is {position}, and it is {job.state}"
    elif position is not None:
        place, of = lines.place(records, job)
        yield from _differing(place=(position.place, place))
        if place is not None:
            yield from _differing(of=(position.of, of))


def _arrivals(records: Records, queue: str, sight: Sight) -> Iterator[str]:
    """Numbers differ between store and model; only their order among the waiting jobs of a queue matters."""
    pending = [job for job in records.jobs.values() if job.new.queue == queue and job.state is JobState.PENDING]
    ruled = [job.id for job in sorted(pending, key=lambda job: job.arrival or 0)]
    numbers = {id: sight.jobs[id].arrival for id in ruled if id in sight.jobs}
    shown = sorted(numbers, key=lambda id: numbers[id] or 0)
    if shown != ruled or None in numbers.values():
        yield f"jobs of {queue} arrived in the order {shown}, by the rules {ruled}"


def _queues(records: Records, sight: Sight) -> Iterator[str]:
    for name, queue in records.queues.items():
        jobs = [job for job in records.jobs.values() if job.new.queue == name]
        shown = sight.queues.get(name)
        if shown is None:
            if jobs:
                yield f"the queue {name} is not listed"
            continue
        for priority in Priority:
            states = Counter(job.state.value for job in jobs if job.new.priority is priority)
            yield from _differing(
                **{f"{name}.{priority.label}": (shown.classes[priority], Counts(**states))},
            )
        yield from _differing(**{f"settings of {name}": (shown.settings, queue.settings)})


def _sessions(records: Records, sight: Sight) -> Iterator[str]:
    for id, session in records.sessions.items():
        shown = sight.sessions.get(id)
        if shown is None:
            yield f"the session {id} is not listed"
            continue
        yield from _differing(**{f"state of {id}": (shown.state, session.state)})
        if session.is_worker:
            running = records.running_of(records.held_by(id))
            yield from _differing(**{f"running of {id}": (shown.running, running)})
            slots = session.new.slots
            if slots is not None and sum(shown.running) > slots.total:
                yield f"{id} runs {shown.running} in {slots.total} slots"


def _bindings(records: Records, sight: Sight) -> Iterator[str]:
    shown = Counter((b.pool, b.key, b.index, b.state.value) for b in sight.bindings)
    ruled = Counter((b.pool, b.key, b.index, b.state.value) for b in records.bindings)
    if shown != ruled:
        yield f"bindings are {dict(shown - ruled)}, by the rules {dict(ruled - shown)}"
