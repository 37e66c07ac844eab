"""What ``--json`` answers: plain documents with stable keys. Times are seconds since 1970 by the store's clock."""

from __future__ import annotations

from typing import Any

import msgspec

from ..binding import Binding
from ..job import Job
from ..reading import Counts, LaneReading, QueueReading
from ..session import Session, Term

Record = dict[str, Any]

LISTED = (
    *("id", "task", "queue", "lane", "priority", "kind", "state", "reason", "attempt", "retries", "worker", "sticky"),
    *("enqueued_at", "due_at", "expires_at", "started_at", "finished_at", "cancel_requested", "error", "error_group"),
    *("retry_of", "parent"),
)
"""What a list tells of a job; payload, result and history belong to the job alone."""


def listed_job(job: Job) -> Record:
    """A job as one of many."""
    record = {field: msgspec.to_builtins(getattr(job, field)) for field in LISTED}
    return record | {"priority": job.priority.label}


def whole_job(job: Job) -> Record:
    """A job with all that is known of it."""
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
    """A queue with its counts and what it allows."""
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
    """A process that the store knows."""
    record: Record = {field: msgspec.to_builtins(getattr(session, field)) for field in session.__struct_fields__}
    return record | {"worker": session.worker, "running": sum(session.running)}


def binding_record(binding: Binding) -> Record:
    """A sticky key and its worker."""
    record: Record = {field: msgspec.to_builtins(getattr(binding, field)) for field in binding.__struct_fields__}
    return record


def leader_record(term: Term | None) -> Record | None:
    """Who leads, and since which election."""
    if term is None:
        return None
    return {"term": term.number, "session": term.session, "lease": term.lease, "remaining": term.remaining}


def _json(raw: bytes | None) -> Any:
    return None if raw is None else msgspec.Raw(raw)
