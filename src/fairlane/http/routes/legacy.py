"""The legacy API: ``GET /task`` submits a job, ``GET /task/{task_id}`` returns its status, one of four words.

A GET that creates a job is kept for existing programs: proxies, prefetchers and retries may repeat it, and each
repetition creates another job. New programs use ``POST /api/v1/jobs`` with an ``Idempotency-Key``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...app import Fairlane
from ...error_text import error_summary
from ...errors import InvalidInput
from ...handle import unknown_job
from ...model.job import Job, JobState
from ...task import Task
from ..access import Scope
from ..answers import Answer, json_answer
from ..operation import Exchange, Operations, check_id

Word = Literal["queued", "processing", "completed", "failed"]
WORDS: dict[JobState, Word] = {
    JobState.SCHEDULED: "queued",
    JobState.PENDING: "queued",
    JobState.RUNNING: "processing",
    JobState.COMPLETED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "failed",
}


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The query parameters of a submission."""

    priority: Literal["low", "high"] = "low"


class LegacyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the legacy API describes it. Times are seconds since 1970, durations are seconds."""

    id: str
    status: Word
    priority: str
    submitted_at: float
    worker: str | None = None
    """The worker that runs it or last ran it."""
    started_at: float | None = None
    finished_at: float | None = None
    latency: float | None = None
    """From submission to end; null before the end."""
    error: str | None = None


def legacy_operations(app: Fairlane, task: Task[..., Any] | str) -> Operations:
    """The legacy API of an application: each submission runs `task` without arguments."""
    found = app.registry.find(task) if isinstance(task, str) else task
    if app.registry.get(found.name) is None:
        raise InvalidInput("legacy_task", f"{found.name!r} is not a task of this application")
    try:
        found.call()
    except TypeError:
        raise InvalidInput(
            "legacy_task", f"{found.name} runs without arguments, so every parameter needs a default"
        ) from None
    operations = Operations("legacy API")
    example = LegacyStatus(
        id="01990f5e-8a70-7000-8000-000000000000", status="queued", priority="low", submitted_at=1.7e9
    )

    @operations.add("GET", "/task", Scope.ENQUEUE, bound=True, query=Submission, answer=LegacyStatus, shows=example)
    async def submit_task(exchange: Exchange) -> Answer:
        """Submit a job (legacy); new programs use POST /api/v1/jobs."""
        priority = exchange.query(Submission).priority
        call = found.options(priority=priority).call()
        exchange.caller.check_new(call.job)
        handle = await exchange.client.enqueue(call)
        job = await handle.job()
        # It may already run; the response reports the state in which it was accepted.
        return json_answer(
            LegacyStatus(id=job.id, status="queued", priority=job.priority.label, submitted_at=job.enqueued_at)
        )

    @operations.add("GET", "/task/{task_id}", Scope.READ, bound=True, answer=LegacyStatus, shows=example)
    async def task_status(exchange: Exchange) -> Answer:
        """Get the status of a job: queued, processing, completed or failed."""
        job = await exchange.client.job(check_id(exchange.path("task_id")))
        if not exchange.caller.sees(job):
            raise unknown_job(job.id)
        return json_answer(legacy_status(job))

    return operations


def legacy_status(job: Job) -> LegacyStatus:
    """Describe a job as the legacy API does."""
    started = job.state not in (JobState.SCHEDULED, JobState.PENDING)
    ended = job.finished_at if job.state.final else None
    error = None
    if WORDS[job.state] == "failed":
        reason = "" if job.reason is None else job.reason.value
        error = error_summary(job.error) or f"{job.state.value} ({reason})"
    return LegacyStatus(
        id=job.id,
        status=WORDS[job.state],
        priority=job.priority.label,
        submitted_at=job.enqueued_at,
        worker=job.worker if started else None,
        started_at=job.started_at if started else None,
        finished_at=ended,
        latency=None if ended is None else max(0.0, ended - job.enqueued_at),
        error=error,
    )
