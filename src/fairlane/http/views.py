"""Builds response documents. Names and units are those of the command line's ``--json`` (`fairlane.documents`): times
are seconds since 1970 by the store's clock, durations are seconds. `shapes` describes their types.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..bulk import Bulk
from ..documents import Record, listed_job, task_record, whole_job
from ..handle import job_summary, position_of
from ..model.job import Job
from ..model.reading import JobPosition
from ..task import Task


def job_view(job: Job, reading: JobPosition | None) -> Record:
    """A job with its position."""
    return whole_job(job) | place_view(job, reading)


def place_view(job: Job, reading: JobPosition | None) -> Record:
    """The position of a job and why it waits."""
    position = position_of(reading)
    return {
        "position": None if position is None else msgspec.to_builtins(position),
        "eta": None if reading is None else reading.eta(),
        "why": job_summary(job) if reading is None else reading.why(),
    }


def update_view(job: Job, reading: JobPosition | None) -> Record:
    """The data of an event of a job. Result and error are set only in the final state."""
    return {
        "id": job.id,
        "state": job.state.value,
        **place_view(job, reading),
        "progress": _raw(job.progress),
        "final": job.state.final,
        "result": _raw(job.result),
        "error": job.error if job.state.final else None,
        "reason": None if job.reason is None else job.reason.value,
        "attempt": job.attempt,
        "fence": job.fence,
        "cancel_requested": job.cancel_requested,
    }


def outcome_view(job: Job) -> Record:
    """The outcome of a job, or its current state."""
    return {
        "id": job.id,
        "state": job.state.value,
        "final": job.state.final,
        "reason": None if job.reason is None else job.reason.value,
        "result": _raw(job.result),
        "error": job.error if job.state.final else None,
        "progress": _raw(job.progress),
    }


def bulk_view(result: Bulk) -> Record:
    """The result of a bulk change, final or so far."""
    return {
        "dry_run": result.dry_run,
        "matched": result.matched,
        "changed": result.changed,
        "requested": result.requested,
        "unchanged": {why.value: count for why, count in result.unchanged.items()},
        "refusal": result.refusal,
        "more": result.more,
        "jobs": [listed_job(job) for job in result.sample],
    }


def task_view(task: Task[..., Any]) -> Record:
    """A task with its schemas."""
    from .schemas import argument_schema, result_schema

    record = task_record(task)
    # Callers need not know where the code is.
    del record["module"]
    return record | {"arguments": argument_schema(task), "result": result_schema(task)}


def _raw(value: bytes | None) -> Any:
    return None if value is None else msgspec.Raw(value)
