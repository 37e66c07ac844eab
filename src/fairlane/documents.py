"""Records as JSON documents with stable keys, as ``--json`` and the HTTP API return them.

Times are seconds since 1970 by the store's clock.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from .model.binding import Binding
from .model.job import Job
from .model.reading import Counts, LaneReading, QueueReading
from .model.schedule import FORGOTTEN_SECONDS, StoredSchedule, slot_id
from .model.session import Session, Term
from .task import Task

Record = dict[str, Any]

REDECLARED_SECONDS = 2 * 3_600.0
"""A live worker declares its schedules every hour: one that was not declared for twice as long has no live worker."""

LISTED = (
    *("id", "task", "queue", "lane", "priority", "kind", "state", "reason", "attempt", "retries", "worker", "sticky"),
    *("enqueued_at", "due_at", "expires_at", "started_at", "finished_at", "cancel_requested", "error", "error_group"),
    *("retry_of", "parent"),
)
"""The fields of a job in a list; payload, result and history are only in the document of a single job."""


def listed_job(job: Job) -> Record:
    """A job in a list."""
    record = {field: msgspec.to_builtins(getattr(job, field)) for field in LISTED}
    return record | {"priority": job.priority.label}


def whole_job(job: Job) -> Record:
    """A job with all its fields."""
    return listed_job(job) | {
        "payload": _json(job.payload),
        "progress": _json(job.progress),
        "result": _json(job.result),
        "fence": job.fence,
        "arrival": job.arrival,
        "unique": job.unique,
        "pool": job.pool,
        "direct": job.direct,
        "cost": job.cost,
        "timeout": job.timeout,
        "suspect": job.suspect,
        "attempts": [
            {field: msgspec.to_builtins(getattr(attempt, field)) for field in attempt.__struct_fields__}
            for attempt in job.attempts
        ],
    }


def queue_record(queue: QueueReading) -> Record:
    """A queue with its counts and limits."""
    return {
        "name": queue.name,
        **counts_record(queue.counts),
        "workers": queue.workers,
        "oldest_wait": queue.oldest_wait,
        "paused": queue.settings.paused,
        "limit": queue.settings.limit,
        "max_pending": queue.settings.max_pending,
        "overridden": queue.override is not None,
        "classes": {
            label: counts_record(counts) for label, counts in zip(("high", "normal", "low"), queue.classes, strict=True)
        },
    }


def counts_record(counts: Counts) -> Record:
    """Jobs by state."""
    return {field: getattr(counts, field) for field in counts.__struct_fields__}


def lane_record(lane: LaneReading) -> Record:
    """A lane that has work."""
    terms = {field: msgspec.to_builtins(getattr(lane.terms, field)) for field in lane.terms.__struct_fields__}
    return {
        "queue": lane.queue,
        "lane": lane.lane,
        "pending": lane.pending,
        "running": lane.running,
        "exact": lane.exact,
        "oldest_wait": lane.oldest_wait,
        "share": lane.share,
        **terms,
    }


def session_record(session: Session) -> Record:
    """A session of a process."""
    record: Record = {field: msgspec.to_builtins(getattr(session, field)) for field in session.__struct_fields__}
    classes = dict(zip(("high", "normal", "low"), session.running, strict=True))
    return record | {"worker": session.worker, "running": sum(session.running), "classes": classes}


def binding_record(binding: Binding) -> Record:
    """A sticky key and its worker."""
    record: Record = {field: msgspec.to_builtins(getattr(binding, field)) for field in binding.__struct_fields__}
    return record


def leader_record(term: Term | None) -> Record | None:
    """The current term, or None."""
    if term is None:
        return None
    return {"term": term.number, "session": term.session, "lease": term.lease, "remaining": term.remaining}


def _json(raw: bytes | None) -> Any:
    return None if raw is None else msgspec.Raw(raw)


def task_record(task: Task[..., Any]) -> Record:
    """A task with its defaults."""
    usual = task.usual
    return {
        "name": task.name,
        "queue": task.queue,
        "lane": task.lane,
        "priority": usual.priority.label,
        "retries": usual.retries,
        "timeout": usual.timeout,
        "schedule": None if task.timetable is None else msgspec.to_builtins(task.timetable),
        "isolate": task.isolate,
        "signature": signature(task),
        "module": task.module,
    }


def signature(task: Task[..., Any]) -> str:
    """The signature of the task's function."""
    return str(inspect.signature(task.function))


def schedule_record(each: StoredSchedule, served: bool, now: float) -> Record:
    """A schedule. `live`: a live worker declares it."""
    age = now - each.declared_at
    return {
        "name": each.schedule.name,
        "timetable": msgspec.to_builtins(each.schedule.timetable),
        "next": each.next_slot(now),
        "last": each.last_slot,
        "stored_at": each.stored_at,
        "declared_at": each.declared_at,
        "live": served and age <= REDECLARED_SECONDS,
        "stopped": age > FORGOTTEN_SECONDS,
        "last_job": None if each.last_slot is None else slot_id(each.schedule.name, each.last_slot),
    }
