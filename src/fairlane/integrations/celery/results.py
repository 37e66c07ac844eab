"""Results of jobs that ended without Celery: they expired, were cancelled while they waited, or lost their worker.

Celery writes the result of a task where it runs. For other ends the job itself is read, and its result is written with
Celery's own methods, so that `get()` raises, chords fail instead of waiting, and error callbacks run.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery import states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import (
    InvalidTaskError,
    NotRegistered,
    Reject,
    TaskError,
    TaskRevokedError,
    TimeLimitExceeded,
    WorkerLostError,
)
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.serialization import prepare_accept_content

from ...errors import InvalidInput
from ...model.job import Job, JobState, Reason
from .executor import DIED, STOPPED
from .messages import JOB, LANE, QUEUE, LocalMessage
from .publishing import Publish, reporting

if TYPE_CHECKING:
    from .fair import Fair

logger = logging.getLogger("fairlane.celery")
ENDED_BY_A_WORKER = frozenset({"failed", "cancelled"})
"""The outcomes of an attempt that a worker has reported."""
NOT_SEEN_BY_CELERY = frozenset({Reason.BAD_PAYLOAD, Reason.UNKNOWN_TASK})
"""Why a worker ends a job that Celery has not made a request of."""


class Results:
    """Writes results to the backend of a Celery application. It belongs to one thread, as Celery's backends do."""

    def __init__(self, fair: Fair) -> None:
        self._fair = fair
        self._accept = prepare_accept_content(fair.app.conf.accept_content)

    def record(self, job: Job) -> bool:
        """Write the result of a job that has failed or was cancelled, unless Celery has. Whether it was written.

        To repeat this is harmless where the result is stored. A task that ignores its result has no record of that: its
        error callbacks run once for each call.
        """
        if not self._fair.is_fair(job.queue):
            return False
        try:
            request = request_of(job.payload, job.id, job.queue, job.lane, self._accept)
        except (InvalidInput, KeyError, ValueError):
            return False  # not a message of Celery: a job of another program in the same store
        task = self._fair.task(job.task)
        backend = self._fair.app.backend if task is None else task.backend
        stored = _is_stored(task, request)
        if stored and remembers(backend):
            if backend.get_task_meta(request.id, cache=False)["status"] in states.READY_STATES:
                return False
        elif not _ended_without_celery(job):
            return False
        state, exc = _outcome(job)
        _write(backend, request, state, exc, stored=stored)
        logger.info("job %s ended as %s without Celery; its result is %s", job.id, job.state.value, state)
        return True


def record_duplicate(fair: Fair, publish: Publish, lane: str | None, holder: str) -> None:
    """Write the result of a publish that became no job, because `holder` has the same unique value.

    Nothing will run under its id, so nothing else would end a wait for it, or for its chord.
    """
    accept = prepare_accept_content(fair.app.conf.accept_content)
    request = request_of(publish.payload, publish.id, publish.queue, lane, accept)
    task = fair.task(publish.task)
    backend = fair.app.backend if task is None else task.backend
    exc = TaskRevokedError(f"job {holder} has the same unique value")
    _write(backend, request, states.REVOKED, exc, stored=_is_stored(task, request))


def _write(backend: Any, request: Context, state: str, exc: BaseException, *, stored: bool) -> None:
    with reporting(request):
        backend.mark_as_failure(
            request.id,
            exc,
            request=request,
            store_result=stored,
            # As in Celery, a task that is revoked does not call them.
            call_errbacks=state == states.FAILURE,
            state=state,
        )


def request_of(payload: bytes, job: str, queue: str, lane: str | None, accept: Any) -> Context:
    """The request that Celery would make of the message of a job."""
    added = {JOB: job, QUEUE: queue, LANE: lane}
    message = LocalMessage(payload, _Nowhere(), added=added, accept=accept, again=False)
    try:
        embedded = message.payload[2]
    except (ContentDisallowed, DecodeError, LookupError, TypeError):
        embedded = None  # then the chord and the callbacks are unknown
    properties: Any = message.properties
    return Context(
        {
            **(embedded if isinstance(embedded, dict) else {}),
            **message.headers,
            "id": str(message.headers["id"]),
            "reply_to": properties.get("reply_to"),
            "correlation_id": properties.get("correlation_id"),
            "delivery_info": message.delivery_info,
        }
    )


def remembers(backend: Any) -> bool:
    """Whether every worker can read the results in a backend; replies to the caller it cannot, also if they persist."""
    return bool(backend.persistent) and not isinstance(backend, DisabledBackend | RPCBackend)


class _Nowhere:
    """Where a message reports to that is only read."""

    def refused(self, why: str) -> None:
        """Do nothing."""


def _is_stored(task: Any, request: Context) -> bool:
    """Whether Celery would store the error of a task."""
    # Not the attribute of the context, which is False also if the message does not say it.
    ignored = request.__dict__.get("ignore_result")
    if ignored is None:
        ignored = task is not None and task.ignore_result
    return not ignored or (task is not None and bool(task.store_errors_even_if_ignored))


def _ended_without_celery(job: Job) -> bool:
    """Whether Celery has not dealt with the end of a job, by its history."""
    last = job.attempts[-1] if job.attempts else None
    return (
        last is None
        or last.outcome not in ENDED_BY_A_WORKER
        or job.reason in NOT_SEEN_BY_CELERY
        or (job.reason is Reason.CRASHED and job.error in (DIED, STOPPED))
    )


def _outcome(job: Job) -> tuple[str, BaseException]:
    """The state of the result in Celery's words, and the exception that `get()` raises."""
    if job.state is JobState.CANCELLED:
        why = "revoked" if job.reason in (None, Reason.BY_USER) else job.reason.value
        return states.REVOKED, TaskRevokedError(why)
    error = job.error or f"the job failed: {job.reason.value if job.reason else 'for an unknown reason'}"
    if job.reason is Reason.UNKNOWN_TASK:
        return states.FAILURE, NotRegistered(job.task)
    if job.reason is Reason.CRASHED:
        return states.FAILURE, WorkerLostError(error)
    if job.reason is Reason.TIMEOUT:
        return states.FAILURE, TimeLimitExceeded(error)
    if job.reason is Reason.BAD_PAYLOAD:
        return states.FAILURE, InvalidTaskError(error)
    if job.error_group == "Reject":
        return states.FAILURE, Reject(error)
    return states.FAILURE, TaskError(error)
