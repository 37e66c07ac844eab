"""Reports failed jobs to Sentry with stack trace and tags. Requires the extra ``fairlane[sentry]``.

    import sentry_sdk
    from fairlane.integrations import sentry

    sentry_sdk.init(dsn=…)
    app = Fairlane()
    sentry.instrument(app)

The error that finally fails a job is reported once. Errors that are followed by a retry are reported only with
``retries=True``, as in Sentry's own integrations of Celery and RQ. `Snooze` and `Cancel` are never reported, `Retry`
only if no retry is left. Each run has its own scope. Arguments and results are not sent, but Sentry itself may send the
local variables of a stack (``include_local_variables`` of its `init`).
"""

from __future__ import annotations

from collections.abc import Iterator

try:
    import sentry_sdk
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "fairlane.integrations.sentry requires sentry-sdk: pip install 'fairlane[sentry]'", name=exc.name
    ) from None
from sentry_sdk.integrations.logging import ignore_logger
from sentry_sdk.utils import event_from_exception

from ..app import Fairlane
from ..errors import Cancel, Fail, Snooze
from ..events import Event, Finished
from ..model.job import JobState, Reason
from ..model.retry import may_retry
from ..model.states import Move
from ..runtime.running_job import RunningJob
from ..worker.body import users_frames

MECHANISM = {"type": "fairlane", "handled": False}
JOB_LOG = "fairlane.worker.jobs"
WITHOUT_EXCEPTION = frozenset({Reason.TIMEOUT, Reason.CRASHED, Reason.BAD_PAYLOAD, Reason.UNKNOWN_TASK})
"""Failures that no task function raised, so that no hook has seen an exception."""
BAD_RESULT = "result"
"""The error group of results that cannot be stored."""


def instrument(app: Fairlane, *, retries: bool = False) -> None:
    """Report failures of an application's jobs to Sentry; with `retries` also errors that are followed by a retry.

    Call it before other `around_job` hooks are declared, so that their errors are reported too. Call
    ``sentry_sdk.init`` in the module that declares the application, so that it also runs in the child processes of
    isolated tasks.
    """
    # The job log has an error record for each failed job, which Sentry would report a second time.
    ignore_logger(JOB_LOG)

    @app.around_job
    def sentry_scope(job: RunningJob) -> Iterator[None]:
        with sentry_sdk.isolation_scope() as scope:
            scope.clear_breadcrumbs()
            scope.set_transaction_name(job.task, source="task")
            scope.set_tags(_tags(job))
            scope.set_context("fairlane", {"job": job.id, "fence": job.fence, "retries": job.retries})
            try:
                yield
            except Exception as exc:
                if not isinstance(exc, Snooze | Cancel) and (retries or not _is_retried(app, job, exc)):
                    _capture(exc)
                raise

    def report(event: Event) -> None:
        if isinstance(event, Finished) and _is_failure(event) and (retries or event.state is JobState.FAILED):
            with sentry_sdk.new_scope() as scope:
                reason = "bad_result" if event.error_group == BAD_RESULT else str(event.reason)
                scope.set_tags({"task": event.task or "unknown", "queue": event.queue or "unknown", "reason": reason})
                scope.set_context("fairlane", {"job": event.id, "fence": event.fence})
                scope.fingerprint = ["fairlane", event.task or "unknown", reason]
                scope.capture_message(f"{event.task}: {reason}", level="error")

    app.events.subscribe(report)


def _tags(job: RunningJob) -> dict[str, str]:
    tags = {"task": job.task, "queue": job.queue, "attempt": str(job.attempt)}
    return tags if job.lane is None else tags | {"lane": job.lane}


def _is_retried(app: Fairlane, job: RunningJob, exc: Exception) -> bool:
    """Whether the job runs again after this error."""
    if isinstance(exc, Fail) or not may_retry(job.attempt, job.retries):
        return False
    task = app.registry.get(job.task)
    return task is None or task.allows_retry(exc)


def _is_failure(event: Finished) -> bool:
    if event.outcome not in (Move.FAIL, Move.RETRY):
        return False
    return event.reason in WITHOUT_EXCEPTION or event.error_group == BAD_RESULT


def _capture(exc: Exception) -> None:
    trace = (type(exc), exc, users_frames(exc.__traceback__))
    event, hint = event_from_exception(trace, client_options=sentry_sdk.get_client().options, mechanism=MECHANISM)
    sentry_sdk.capture_event(event, hint=hint)
