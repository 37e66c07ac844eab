"""Requests of Celery that belong to a claimed job: Celery's endings become the job's transitions.

They are mixed into the `Request` of each task, and behave as that does for messages from the broker. Celery decides
whether a task is acknowledged, rejected, requeued or retried; the request follows that decision and reports it once.
"""

from __future__ import annotations

import logging
import time
from inspect import signature
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    TaskRevokedError,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.utils.imports import symbol_by_name
from celery.worker import state as celery_state
from celery.worker.request import Request, task_ready

from ...errors import InvalidInput
from ...model import states
from ...model.job import Claimed, Reason
from ...model.retry import may_retry
from ...model.states import Transition
from ...worker.run import Stop
from .applications import fair_of
from .executor import Delivery
from .messages import JOB, QUEUE, LocalMessage, following, headers_of
from .publishing import KEPT, reporting

logger = logging.getLogger("fairlane.celery")
SILENTLY = {"emit_retry": False} if "emit_retry" in signature(Request.cancel).parameters else {}
"""Cancel without storing a retry as the result, where Celery has that option."""


class FairRequest(Request):
    """A request that may belong to a job."""

    delivery: Delivery | None = None

    def __init__(self, message: Any, *args: Any, **options: Any) -> None:
        super().__init__(message, *args, **options)
        self._requeued = False
        self.future: Any = None
        """What a pool of threads made of it."""
        if isinstance(message, LocalMessage):
            delivery: Delivery = message.delivery
            delivery.request = self
            self.delivery = delivery
            # The class that Celery derives from this one overrides both without calling them.
            self._usual_success, self._usual_execute = super().on_success, super().execute_using_pool
            self.__dict__.update(on_success=self._succeeded, execute_using_pool=self._execute)
        else:
            # Only a claim has these. From a broker they would make it seem to be that job.
            for name in (JOB, QUEUE):
                self.request_dict.pop(name, None)

    @property
    def eta(self) -> Any:
        """None for a job: Fairlane has waited for its time."""
        return None if self.delivery is not None else self._eta

    # -- the way into the pool ---------------------------------------------------------------------------------------

    def _execute(self, pool: Any, **options: Any) -> Any:
        run = self._delivery.run
        if run.ended or run.stop not in (None, Stop.CANCEL):
            # It was withdrawn while it waited for a place or its rate: it may run elsewhere by now.
            task_ready(self)
            raise TaskRevokedError(self.id)
        result = self._usual_execute(pool, **options)
        self.future = getattr(result, "f", None)
        if self.future is not None:
            # A thread whose callbacks fail reports nothing else.
            self.future.add_done_callback(self._future_done)
        return result

    def _future_done(self, future: Any) -> None:
        delivery = self._delivery
        if future.cancelled():
            delivery.end(delivery.given_back())
        elif (exc := future.exception()) is not None:
            delivery.end(states.fail(self._job.held, Reason.ERROR, f"{type(exc).__name__} in Celery's pool"))
        else:
            delivery.end(states.fail(self._job.held, Reason.CRASHED, "Celery's pool did not report how the task ended"))

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """A process or thread of the pool begins to run the task."""
        if self.delivery is not None:
            self.delivery.accepted()
        super().on_accepted(pid, time_accepted)

    # -- endings -----------------------------------------------------------------------------------------------------

    def _succeeded(self, outcome: Any, **options: Any) -> None:
        """The callback of the pool for a run that returned, or whose failure the trace has handled."""
        if isinstance(outcome, ExceptionInfo):
            # A thread reports SystemExit like this, which Celery's own callback cannot read.
            self.on_failure(outcome)
            return
        if outcome[0]:
            # It calls `on_failure`.
            self._usual_success(outcome, **options)
            return
        try:
            self._usual_success(outcome, **options)
        finally:
            self._delivery.end(states.complete(self._job.held))

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """The task has raised, or its process has died."""
        delivery = self.delivery
        if delivery is None:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        exc = _exception(exc_info)
        if isinstance(exc, Terminated) and not self._stop_was_asked_for():
            # billiard remembers a signal that a process has survived: the death of a later job there is not a stop.
            exc_info = self._lost(f"the process of the task ended by {exc}")
            exc = _exception(exc_info)
        if isinstance(exc, WorkerLostError) and _stops_cold() and delivery.repeatable:
            # Celery 5.4 kills its processes without cancelling their tasks first. The task runs again: no result.
            delivery.end(delivery.given_back())
            return None
        self._requeued = False
        try:
            with reporting(self._context):
                return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            try:
                transition = self._transition(exc, exc_info)
            except Exception as bad:
                logger.exception("the end of job %s could not be read", self._job.id)
                transition = states.fail(self._job.held, Reason.ERROR, f"{type(bad).__name__} in the worker")
            if isinstance(exc, TimeLimitExceeded):
                delivery.end_without(self.worker_pid, transition)
            else:
                delivery.end(transition)

    def reject(self, requeue: bool = False) -> None:
        """Celery rejects the message: with `requeue` the task is to run again."""
        if not self.acknowledged:
            self._requeued = requeue
        super().reject(requeue=requeue)

    def _transition(self, exc: BaseException, exc_info: Any) -> Transition:
        """The transition of a run that ended with an exception, after Celery has dealt with it."""
        held = self._job.held
        if isinstance(exc, Terminated):
            delivery = self._delivery
            return delivery.given_back() if self._already_cancelled else states.cancel(held)
        if isinstance(exc, Retry):
            return self._retry(exc)
        if isinstance(exc, Ignore):
            return states.complete(held)
        error = str(getattr(exc_info, "traceback", "") or repr(exc))
        if isinstance(exc, Reject):
            return (
                states.snooze(held, 0.0) if self._requeued else states.fail(held, Reason.ERROR, error, group="Reject")
            )
        if isinstance(exc, TimeLimitExceeded):
            return self._again_or_fail(Reason.TIMEOUT, str(exc), exc)
        if isinstance(exc, WorkerLostError | SystemExit | KeyboardInterrupt):
            kept = self._context.__dict__.pop(KEPT, None)
            if kept is not None:
                delay = self._seconds_until(kept.headers.get("eta"))
                payload = following(kept.payload, self._job.payload)
                return states.retry(held, delay, Reason.CRASHED, str(exc), group="crashed", payload=payload)
            if self._success_is_stored():
                return states.complete(held)
            return self._again_or_fail(Reason.CRASHED, str(exc), exc)
        return states.fail(held, Reason.ERROR, error, group=type(exc).__name__)

    def _again_or_fail(self, reason: Reason, error: str, exc: BaseException) -> Transition:
        """Run it again if Celery wants to requeue it, while the job's budget for crashes lasts."""
        job = self._job
        if not self._requeued:
            return states.fail(job.held, reason, error)
        if may_retry(job.attempt, job.retries):
            return states.retry(job.held, 0.0, reason, error)
        # Celery has stored no result, because it expects another run.
        self.task.backend.mark_as_failure(self.id, exc, request=self._context, store_result=self.store_errors)
        return states.fail(job.held, reason, error)

    def _retry(self, exc: Any) -> Transition:
        payload = getattr(exc, "payload", None)
        if payload is None:
            # It was published to another queue, as a job of its own.
            return states.complete(self._job.held)
        error = str(exc)
        try:
            delay = self._seconds_until(headers_of(payload).get("eta"))
            payload = following(payload, self._job.payload)
            return states.retry(self._job.held, delay, Reason.ERROR, error, group="Retry", payload=payload)
        except InvalidInput as bad:
            self.task.backend.mark_as_failure(self.id, bad, request=self._context, store_result=self.store_errors)
            return states.fail(self._job.held, Reason.BAD_PAYLOAD, str(bad))

    def _seconds_until(self, eta: Any) -> float:
        moment = fair_of(self.app).moment("eta", {"eta": eta})
        return 0.0 if moment is None else max(0.0, moment - time.time())

    def _success_is_stored(self) -> bool:
        stored = getattr(self, "_success_was_stored", None)
        return stored is not None and bool(stored())

    # -- stops -------------------------------------------------------------------------------------------------------

    def stop(self, *, revoke: bool) -> None:
        """Stop the task, in the worker's main thread, where the pool can; `revoke` also stores that as its result."""
        pool = self._delivery.executor.host.pool
        if self.future is not None:
            # A thread that has begun cannot be stopped.
            self.future.cancel()
        elif revoke:
            self.terminate(pool)
        elif self._apply_result is None:
            # It waits in Celery for a place or its rate; `_execute` refuses it when its turn comes.
            self._delivery.end(self._delivery.given_back())
        else:
            super().cancel(pool, **SILENTLY)

    def cancel(self, pool: Any, signal: Any = None, **options: Any) -> None:
        """Celery cancels its tasks in a cold stop, and when the connection to the broker is lost.

        The latter does not concern a job: its message is not the broker's.
        """
        if self.delivery is None or not self.delivery.executor.host.connection_lost:
            super().cancel(pool, signal, **options)

    def _announce_cancelled(self, *args: Any, **options: Any) -> None:
        if self.delivery is not None and self.delivery.run.stop is None:
            # Celery cancels it, long before it says that it stops.
            self.delivery.executor.host.stop_claiming()
        super()._announce_cancelled(*args, **options)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        super()._announce_revoked(reason, terminated, signum, expired)
        if self.delivery is not None and not terminated:
            why = Reason.EXPIRED if expired else Reason.BY_USER
            self.delivery.end(states.cancel(self._job.held, why))

    def _stop_was_asked_for(self) -> bool:
        return self._already_revoked or self._already_cancelled or self._delivery.run.stop is not None

    def _lost(self, error: str) -> Any:
        try:
            raise WorkerLostError(error)
        except WorkerLostError:
            return ExceptionInfo()

    @property
    def _delivery(self) -> Delivery:
        assert self.delivery is not None, "the request does not belong to a job"
        return self.delivery

    @property
    def _job(self) -> Claimed:
        return self._delivery.run.claimed


def _stops_cold() -> bool:
    """Whether the worker ends without waiting for its tasks."""
    return celery_state.should_terminate not in (None, False)


def _exception(exc_info: Any) -> BaseException:
    exc = exc_info.exception
    found: BaseException = exc.exc if isinstance(exc, ExceptionWithTraceback) else exc
    return found


def mix_into(task: Any) -> None:
    """Make the requests of a task fair, whatever class it uses for them."""
    used = symbol_by_name(task.Request)
    if not issubclass(used, FairRequest):
        task.Request = FairRequest if used is Request else type("FairRequest", (FairRequest, used), {})
