"""The state machine: every legal move in one table, and one constructor for each move that a holder can request.

A `Transition` is a complete decision. Stores apply it (fenced by job, fence and session) and decide only what they
alone can know: that a cancel was requested meanwhile, or that the writer lost the job.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ..errors import InvalidInput
from . import names
from .job import CANCELLED_REASONS, FAILED_REASONS, Held, JobState, Reason, check_payload
from .retry import Backoff, may_retry

S = JobState


class Move(StrEnum):
    """Every way from one state to the next. The value is the outcome written into the history."""

    ENQUEUE = "enqueued"
    PROMOTE = "promoted"
    CLAIM = "claimed"
    COMPLETE = "completed"
    FAIL = "failed"
    RETRY = "retry"
    SNOOZE = "snoozed"
    HAND_BACK = "handed_back"
    CRASH = "crashed"
    TAKE_BACK = "taken_back"
    CANCEL = "cancelled"
    DECLINE = "declined"


MOVES: dict[Move, tuple[frozenset[JobState | None], frozenset[JobState]]] = {
    # A turn may be granted by its enqueue, and a broadcast's parent runs from the start.
    Move.ENQUEUE: (frozenset({None}), frozenset({S.SCHEDULED, S.PENDING, S.RUNNING})),
    Move.PROMOTE: (frozenset({S.SCHEDULED}), frozenset({S.PENDING})),
    Move.CLAIM: (frozenset({S.PENDING}), frozenset({S.RUNNING})),
    Move.COMPLETE: (frozenset({S.RUNNING}), frozenset({S.COMPLETED})),
    Move.FAIL: (frozenset({S.RUNNING}), frozenset({S.FAILED})),
    # Without a delay the job passes through scheduled within the same step.
    Move.RETRY: (frozenset({S.RUNNING}), frozenset({S.SCHEDULED, S.PENDING})),
    Move.SNOOZE: (frozenset({S.RUNNING}), frozenset({S.SCHEDULED, S.PENDING})),
    # To pending, uncharged; one too many in a row is charged as a crash is.
    Move.HAND_BACK: (frozenset({S.RUNNING}), frozenset({S.SCHEDULED, S.PENDING, S.FAILED})),
    Move.CRASH: (frozenset({S.RUNNING}), frozenset({S.SCHEDULED, S.PENDING, S.FAILED})),
    Move.TAKE_BACK: (frozenset({S.RUNNING}), frozenset({S.SCHEDULED, S.PENDING})),
    Move.CANCEL: (frozenset({S.SCHEDULED, S.PENDING, S.RUNNING}), frozenset({S.CANCELLED})),
    # Claimed by a session that does not know its task. It fails once this has gone on for too long.
    Move.DECLINE: (frozenset({S.RUNNING}), frozenset({S.SCHEDULED, S.PENDING, S.FAILED})),
}
"""Move → (states it may start from, states it may end in). None: the job does not exist yet."""

HOLDER_MOVES = frozenset(
    {
        *(Move.COMPLETE, Move.FAIL, Move.RETRY, Move.SNOOZE),
        *(Move.HAND_BACK, Move.TAKE_BACK, Move.CANCEL, Move.DECLINE),
    }
)
"""The moves that the session that runs a job may request; the others belong to the store and the manager."""
MOST_HAND_BACKS = 3
"""Consecutive hand-backs of a started job that are not charged. After them the job is a suspect."""

UNKNOWN_TASK_SECONDS = 86_400.0
"""How long a job may be declined, from the first time on, before it fails as `unknown_task`."""
SHORTEST_DECLINE, LONGEST_DECLINE = 0.25, 15.0
"""The bounds of the delay after which a job that only one worker can run is offered to it again after a decline."""


_COMPLETE = Move.COMPLETE


class Transition(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A holder's decision about a running job, ready to be applied. Created by the constructors below."""

    held: Held
    move: Move
    delay: float = 0.0
    """Seconds until the job may run again. For a decline, how long it may be declined before it fails."""
    result: bytes | None = None
    reason: Reason | None = None
    error: str | None = None
    error_group: str | None = None
    payload: bytes | None = None
    """For a retry or a snooze: what replaces the payload of the job."""

    def __post_init__(self) -> None:
        # Identity before the set: hashing an enum member is slow, and nearly every transition is a completion.
        if self.move is not _COMPLETE and self.move not in HOLDER_MOVES:
            raise InvalidInput("move", f"a session cannot request the move {self.move.name}")


def complete(held: Held, result: bytes | None = None) -> Transition:
    """The task function returned."""
    if result is not None:
        names.check_size("result", result, names.RESULT_BYTES)
    return Transition(held=held, move=_COMPLETE, result=result)


def fail(held: Held, reason: Reason, error: str, *, group: str | None = None) -> Transition:
    """The job ends without a result."""
    if reason not in FAILED_REASONS:
        raise InvalidInput("reason", f"{reason.value!r} is not a reason to fail")
    return Transition(
        held=held, move=Move.FAIL, reason=reason, error=bounded_error(error), error_group=_group(group, reason)
    )


def retry(
    held: Held, delay: float, reason: Reason, error: str, *, group: str | None = None, payload: bytes | None = None
) -> Transition:
    """The attempt failed and is charged; the job runs again after `delay`, with `payload` if one is given.

    `Reason.CRASHED` means that the process of the run died: the job becomes a suspect.
    """
    if reason not in FAILED_REASONS:
        raise InvalidInput("reason", f"{reason.value!r} is not a reason to retry")
    names.check_seconds("delay", delay)
    if payload is not None:
        check_payload(payload)
    return Transition(
        held=held,
        move=Move.RETRY,
        delay=delay,
        reason=reason,
        error=bounded_error(error),
        error_group=_group(group, reason),
        payload=payload,
    )


def snooze(held: Held, delay: float, *, payload: bytes | None = None) -> Transition:
    """The task function requested another run after `delay`, uncharged, with `payload` if one is given."""
    names.check_seconds("delay", delay)
    if payload is not None:
        check_payload(payload)
    return Transition(held=held, move=Move.SNOOZE, delay=delay, payload=payload)


def hand_back(held: Held) -> Transition:
    """The session stops a started job and returns it to the queue: uncharged, `MOST_HAND_BACKS` times in a row."""
    return Transition(held=held, move=Move.HAND_BACK)


def take_back(held: Held, delay: float = 0.0) -> Transition:
    """The session returns a job that it has not started: always uncharged.

    With `delay` it is offered again only after that many seconds.
    """
    names.check_seconds("delay", delay)
    return Transition(held=held, move=Move.TAKE_BACK, delay=delay)


def decline(held: Held, error: str, *, patience: float = UNKNOWN_TASK_SECONDS) -> Transition:
    """The session does not know the job's task, so the job was not started.

    It is returned uncharged, and from then on offered only to sessions that know its task. A job that is bound to this
    worker is offered to it again after `decline_delay`. A job that has been declined for `patience` seconds without a
    run in between is offered to all sessions once more, and fails as `unknown_task` with `error` if declined again.
    """
    names.check_seconds("patience", patience)
    reason = Reason.UNKNOWN_TASK
    return Transition(
        held=held,
        move=Move.DECLINE,
        delay=patience,
        reason=reason,
        error=bounded_error(error),
        error_group=reason.value,
    )


def decline_delay(declined_for: float) -> float:
    """How long to wait before offering a job again that was first declined `declined_for` seconds ago.

    Half of that time, within bounds. The SQL and Lua functions compute the same.
    """
    return min(LONGEST_DECLINE, max(SHORTEST_DECLINE, declined_for / 2))


def cancel(held: Held, reason: Reason = Reason.BY_USER) -> Transition:
    """The run was stopped because the job was cancelled."""
    if reason not in CANCELLED_REASONS:
        raise InvalidInput("reason", f"{reason.value!r} is not a reason to cancel")
    return Transition(held=held, move=Move.CANCEL, reason=reason)


def after_error(
    held: Held,
    *,
    attempt: int,
    retries: int,
    backoff: Backoff,
    draw: float,
    reason: Reason,
    error: str,
    group: str | None = None,
) -> Transition:
    """Decide what follows a failed attempt: a retry while the budget lasts. A bad payload is never retried."""
    if reason is Reason.BAD_PAYLOAD or not may_retry(attempt, retries):
        return fail(held, reason, error, group=group)
    return retry(held, backoff.delay(attempt, draw), reason, error, group=group)


class Fate(msgspec.Struct, frozen=True):
    """The next state of a running job whose process died."""

    state: JobState
    delay: float = 0.0
    reason: Reason | None = None


def after_crash(
    *, cancel_requested: bool, attempt: int, retries: int, crashes: int, backoff: Backoff, draw: float
) -> Fate:
    """Decide what happens to a started job whose process died; `crashes` includes this crash."""
    if cancel_requested:
        return Fate(S.CANCELLED, reason=Reason.BY_USER)
    if not may_retry(attempt, retries):
        return Fate(S.FAILED, reason=Reason.CRASHED)
    delay = backoff.after_crash(attempt, crashes, draw)
    return Fate(S.SCHEDULED if delay > 0 else S.PENDING, delay=delay)


def bounded_error(error: str) -> str:
    """Shorten an error to `ERROR_BYTES`, in the middle.

    The end of a traceback names the error, unless its message is very long: then the class stands before the message.

    NUL and lone surrogates are replaced: not every store accepts them, and a write must not fail because of them.
    """
    raw = error.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace")
    if len(raw) <= names.ERROR_BYTES:
        return raw.decode()
    head = names.ERROR_BYTES // 4
    tail = names.ERROR_BYTES - head - len("…".encode())
    return f"{raw[:head].decode(errors='ignore')}…{raw[-tail:].decode(errors='ignore')}"


def _group(group: str | None, reason: Reason) -> str:
    return reason.value if not group else "".join(c if c.isprintable() else "?" for c in group)[:120]
