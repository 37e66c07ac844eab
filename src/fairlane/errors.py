"""Every error Fairlane raises, in one tree.

    FairlaneError
    ├── InvalidInput (ValueError)   an argument was refused before anything was stored; `.field` names it
    ├── NotFound (LookupError)      no job, queue or session has this id
    ├── Conflict                    this id already belongs to a job with other content
    ├── Busy                        somebody else's open transaction holds this id or unique value; try again
    ├── QueueFull                   `max_pending` is reached; `.retry_after` says when to come back
    ├── IndexTaken                  another live worker owns this index of the pool
    ├── Stale                       the writer no longer owns what it writes: a lost session or term
    │   ├── SessionLost             the session was declared dead or has ended; register anew
    │   └── TermLost                somebody else leads now
    ├── NotSupported                this store does not have the capability
    ├── WouldDeadlock               it would wait for a lane that only its own end can free
    ├── JobFailed                   `result()` of a job that failed; `.reason` and `.error` say how
    ├── JobCancelled                `result()` of a job that was cancelled; `.reason` says why
    ├── StoreError                  the store failed
    │   ├── StoreUnavailable        it cannot be reached or is locked; the call may be repeated
    │   ├── StoreMissing            there is none at this place yet, and the caller asked not to make one
    │   ├── StoreFull               no room left; nothing of the call was stored
    │   ├── StoreReadOnly           it may not be written
    │   └── SchemaMismatch          its schema is newer than this code, or damaged
    └── Control                     raised by a body, to say how its run ends
        ├── Retry                   charge this attempt and run again, while the budget lasts
        ├── Snooze                  run again later, uncharged
        ├── Fail                    fail now, whatever is left of the budget
        └── Cancel                  end as cancelled

A stale *job* write is not an exception: batches answer each write with a verdict (`fairlane.model.job.Verdict`).
Messages say what to do next. No message contains a payload, a password or a token.
"""

from __future__ import annotations

from datetime import timedelta


class FairlaneError(Exception):
    """The base of every error of this package."""


class InvalidInput(FairlaneError, ValueError):
    """An argument was refused, and nothing was stored. `field` names the argument."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[InvalidInput], tuple[str, str]]:
        return (type(self), (self.field, self.problem))


class NotFound(FairlaneError, LookupError):
    """There is no such job, queue, session or binding."""


class Conflict(FairlaneError):
    """The id is known already, with other content. Choose another id, or send the same content."""


class Busy(FairlaneError):
    """An open transaction elsewhere holds the same id or unique value. Try again when it has ended."""


class QueueFull(FairlaneError):
    """The queue or lane holds as many waiting jobs as `max_pending` allows.

    `retry_after`: seconds until there is probably room for one more; None when that cannot be told.
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
    """The writer does not own what it writes any more; nothing was changed."""


class SessionLost(Stale):
    """The session has ended or was declared dead. Drop its bodies and register a new one."""


class TermLost(Stale):
    """This term has ended: somebody else leads, or nobody does. Stop leading and stand again."""


class NotSupported(FairlaneError):
    """This store does not have the capability; the message names the stores that do."""


class StoreError(FairlaneError):
    """The store failed in a way that repeating the call will not cure."""


class StoreUnavailable(StoreError):
    """The store cannot be reached just now, or is held by somebody else. Repeating the call is safe."""


class StoreMissing(StoreError):
    """There is no store at this place yet, and it was opened with ``create=False``. Nothing was made."""


class StoreFull(StoreError):
    """The store has no room left. Nothing of this call was stored."""


class StoreReadOnly(StoreError):
    """The store may not be written by this process."""


class SchemaMismatch(StoreError):
    """The store's schema is not one this version can use."""


class WouldDeadlock(FairlaneError):
    """Waiting here could never end: what is waited for needs a place of the lane that the waiter itself holds."""


class JobFailed(FairlaneError):
    """The job whose result was asked for has failed."""

    def __init__(self, id: str, reason: str, error: str | None) -> None:
        last = (error or "").strip().rpartition("\n")[2]
        super().__init__(f"job {id} failed ({reason}){': ' + last if last else ''}")
        self.id = id
        self.reason = reason
        self.error = error

    def __reduce__(self) -> tuple[type[JobFailed], tuple[str, str, str | None]]:
        return (type(self), (self.id, self.reason, self.error))


class JobCancelled(FairlaneError):
    """The job whose result was asked for was cancelled."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(f"job {id} was cancelled ({reason})")
        self.id = id
        self.reason = reason

    def __reduce__(self) -> tuple[type[JobCancelled], tuple[str, str]]:
        return (type(self), (self.id, self.reason))


class Control(FairlaneError):
    """What a body raises to say how its run ends. The base of the four below; raise one of those."""


class Retry(Control):
    """Run this job again: the attempt is charged. `delay` in seconds replaces the back-off."""

    def __init__(
        self, message: str = "the body asked for another run", *, delay: float | timedelta | None = None
    ) -> None:
        super().__init__(message)
        self.delay = delay.total_seconds() if isinstance(delay, timedelta) else delay


class Snooze(Control):
    """Run this job again after `delay` seconds; the attempt is not charged."""

    def __init__(self, delay: float | timedelta) -> None:
        self.delay = delay.total_seconds() if isinstance(delay, timedelta) else delay
        super().__init__(f"again in {self.delay} s")


class Fail(Control):
    """Fail this job now: running it again would not help."""


class Cancel(Control):
    """End this job as cancelled: nobody needs it any more."""
