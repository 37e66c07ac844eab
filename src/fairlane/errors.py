"""Every error Fairlane raises, in one tree.

    FairlaneError
    ├── InvalidInput (ValueError)   an argument was rejected and nothing was stored; `.field` names it
    ├── NotFound (LookupError)      no job, queue or session has this id
    ├── Conflict                    this id already belongs to a job with other content
    ├── Busy                        another open transaction holds this id or unique value; try again
    ├── QueueFull                   `max_pending` is reached; `.retry_after` estimates when to try again
    ├── IndexTaken                  another live worker owns this index of the pool
    ├── Stale                       the writer no longer owns what it writes: a lost session or term
    │   ├── SessionLost             the session was declared dead or has ended; register a new one
    │   └── TermLost                the term has ended; another process may lead
    ├── NotSupported                this store does not have the capability
    ├── WouldDeadlock               the awaited job needs a place that only the caller's own end can free
    ├── JobFailed                   `result()` of a job that failed; see `.reason` and `.error`
    ├── JobCancelled                `result()` of a job that was cancelled; see `.reason`
    ├── StoreError                  the store failed
    │   ├── StoreUnavailable        it cannot be reached or is locked; the call may be repeated
    │   ├── StoreMissing            it does not exist yet, and the caller asked not to create it
    │   ├── StoreFull               no space left; nothing of the call was stored
    │   ├── StoreReadOnly           it cannot be written
    │   └── SchemaMismatch          its schema is newer than this code, or damaged
    └── Control                     raised by a task function to decide how its run ends
        ├── Retry                   charge this attempt and run again, while the budget lasts
        ├── Snooze                  run again later, uncharged
        ├── Fail                    fail now, whatever is left of the budget
        └── Cancel                  end as cancelled

A stale *job* write is not an exception: batches return a verdict for each write (`fairlane.model.job.Verdict`).
Messages say what to do next. No message contains a payload, a password or a token.
"""

from __future__ import annotations

from datetime import timedelta

from .error_text import error_summary


class FairlaneError(Exception):
    """The base class of every error of this package."""


class InvalidInput(FairlaneError, ValueError):
    """An argument was rejected, and nothing was stored. `field` names the argument."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[InvalidInput], tuple[str, str]]:
        return (type(self), (self.field, self.problem))


class NotFound(FairlaneError, LookupError):
    """The job, queue, session or binding does not exist."""


class Conflict(FairlaneError):
    """The id already exists with other content. Choose another id, or send the same content."""


class Busy(FairlaneError):
    """Another open transaction holds the same id or unique value. Try again when it has ended."""


class QueueFull(FairlaneError):
    """The queue or lane holds as many waiting jobs as `max_pending` allows.

    `retry_after`: estimated seconds until there is room for one more; None when there is no estimate.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[QueueFull], tuple[str, float | None]]:
        return (type(self), (str(self), self.retry_after))


class IndexTaken(FairlaneError):
    """Another live worker has this index. Choose another, or wait until `retry_after` seconds have passed."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[IndexTaken], tuple[str, float]]:
        return (type(self), (str(self), self.retry_after))


class Stale(FairlaneError):
    """The writer no longer owns what it writes; nothing was changed."""


class SessionLost(Stale):
    """The session has ended or was declared dead. Stop its jobs and register a new one."""


class TermLost(Stale):
    """This term has ended; another process may lead. Stop leading and stand for election again."""


class NotSupported(FairlaneError):
    """This store does not have the capability; the message names the stores that do."""


class StoreError(FairlaneError):
    """The store failed, and repeating the call will not help."""


class StoreUnavailable(StoreError):
    """The store cannot be reached at the moment, or is locked by another process. Repeating the call is safe."""


class StoreMissing(StoreError):
    """The store does not exist yet, and it was opened with ``create=False``. Nothing was created."""


class StoreFull(StoreError):
    """The store has no space left. Nothing of this call was stored."""


class StoreReadOnly(StoreError):
    """This process cannot write to the store."""


class SchemaMismatch(StoreError):
    """This version cannot use the store's schema."""


class WouldDeadlock(FairlaneError):
    """Waiting would never end: the awaited job needs a place of a lane, and the caller itself holds them all."""


class JobFailed(FairlaneError):
    """The job whose result was requested has failed."""

    def __init__(self, id: str, reason: str, error: str | None) -> None:
        summary = error_summary(error)
        super().__init__(f"job {id} failed ({reason}){': ' + summary if summary else ''}")
        self.id = id
        self.reason = reason
        self.error = error

    def __reduce__(self) -> tuple[type[JobFailed], tuple[str, str, str | None]]:
        return (type(self), (self.id, self.reason, self.error))


class JobCancelled(FairlaneError):
    """The job whose result was requested was cancelled."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(f"job {id} was cancelled ({reason})")
        self.id = id
        self.reason = reason

    def __reduce__(self) -> tuple[type[JobCancelled], tuple[str, str]]:
        return (type(self), (self.id, self.reason))


class Control(FairlaneError):
    """Raised by a task function to decide how its run ends. The base class of the four below; raise one of those."""


class Retry(Control):
    """Run this job again: the attempt is charged. `delay` in seconds replaces the back-off."""

    def __init__(
        self, message: str = "the task function requested a retry", *, delay: float | timedelta | None = None
    ) -> None:
        super().__init__(message)
        self.delay = delay.total_seconds() if isinstance(delay, timedelta) else delay


class Snooze(Control):
    """Run this job again after `delay` seconds; the attempt is not charged."""

    def __init__(self, delay: float | timedelta) -> None:
        self.delay = delay.total_seconds() if isinstance(delay, timedelta) else delay
        super().__init__(f"snoozed for {self.delay} s")


class Fail(Control):
    """Fail this job now: running it again would not help."""


class Cancel(Control):
    """End this job as cancelled: its result is no longer needed."""
