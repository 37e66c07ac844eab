"""The state machine: every legal move as one table, and one constructor for each move a holder can ask for.

A `Transition` is a finished decision. Stores apply it (fenced by job, fence and session) and decide nothing
but what only they can know: that a cancel was requested meanwhile, or that the writer lost the job.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ..errors import InvalidInput
from . import names
from .job import CANCELLED_REASONS, FAILED_REASONS, Held, JobState, Reason
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
    # A turn is started by the step that grants it, and a broadcast's parent runs from the start.
    Move.ENQUEUE: (frozenset({None}), frozenset({S.SCHEDULED, S.PENDING, S.RUNNING})),
    Move.PROMOTE: (frozenset({S.SCHEDULED}), frozenset({S.PENDING})),
    Move.CLAIM: (frozenset({S.PENDING}), frozenset({S.RUNNING})),
    Move.COMPLETE: (frozenset({S.RUNNING}), frozenset({S.COMPLETED})),
    Move.FAIL: (frozenset({S.RUNNING}), frozenset({S.FAILED})),
    # A delay of nothing passes through scheduled within the same step.
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
"""What the session that runs a job may ask for; the rest belongs to the store and the manager."""
UNCHARGED = frozenset({Move.HAND_BACK, Move.TAKE_BACK, Move.SNOOZE, Move.DECLINE})
"""Moves that give the attempt back to the budget; a hand-back does so `MOST_HAND_BACKS` times in a row."""
MOST_HAND_BACKS = 3
"""Hand-backs of a job that had begun, one after the other, that are not charged. After them the job is a suspect."""
OWNED_OUTCOMES = frozenset(move.value for move in HOLDER_MOVES)
"""Outcomes that the holder itself wrote: repeating one is answered, not refused."""

UNKNOWN_TASK_SECONDS = 86_400.0
"""How long a job may be declined, from the first time on, before it fails as `unknown_task`."""
SHORTEST_DECLINE, LONGEST_DECLINE = 0.25, 15.0
"""A job that can wait for one worker alone, and was declined there, is left alone for a time between these two."""


_COMPLETE = Move.COMPLETE


def legal(move: Move, source: JobState | None, target: JobState) -> bool:
    """Whether `move` may lead from `source` to `target`."""
    sources, targets = MOVES[move]
    return source in sources and target in targets


class Transition(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A holder's decision about a running job, ready to be applied. Made by the constructors below."""

    held: Held
    move: Move
    delay: float = 0.0
    """Seconds until it may run again; of a decline, how long it may be declined before it fails."""
    result: bytes | None = None
    reason: Reason | None = None
    error: str | None = None
    error_group: str | None = None

    def __post_init__(self) -> None:
        # Identity before the set: hashing an enum member is slow, and nearly every transition is a completion.
        if self.move is not _COMPLETE and self.move not in HOLDER_MOVES:
            raise InvalidInput("move", f"a holder cannot ask for {self.move.name}")


def complete(held: Held, result: bytes | None = None) -> Transition:
    """The body returned."""
    if result is not None:
        names.check_size("result", result, names.RESULT_BYTES)
    return Transition(held=held, move=_COMPLETE, result=result)


def fail(held: Held, reason: Reason, error: str, *, group: str | None = None) -> Transition:
    """The job is over without a result."""
    if reason not in FAILED_REASONS:
        raise InvalidInput("reason", f"{reason.value!r} is not a reason to fail")
    return Transition(held=held, move=Move.FAIL, reason=reason, error=_cut(error), error_group=_group(group, reason))


def retry(held: Held, delay: float, reason: Reason, error: str, *, group: str | None = None) -> Transition:
    """The attempt failed and is charged; the job runs again after `delay`.

    `Reason.CRASHED` says that the body's own process died: the job is a suspect then.
    """
    if reason not in FAILED_REASONS:
        raise InvalidInput("reason", f"{reason.value!r} is not a reason to retry")
    names.check_seconds("delay", delay)
    return Transition(
        held=held,
        move=Move.RETRY,
        delay=delay,
        reason=reason,
        error=_cut(error),
        error_group=_group(group, reason),
    )


def snooze(held: Held, delay: float) -> Transition:
    """The body asked to be run again after `delay`, uncharged."""
    names.check_seconds("delay", delay)
    return Transition(held=held, move=Move.SNOOZE, delay=delay)


def hand_back(held: Held) -> Transition:
    """The session stops a body that had begun, and gives its job back: uncharged, `MOST_HAND_BACKS` times in a row."""
    return Transition(held=held, move=Move.HAND_BACK)


def take_back(held: Held, delay: float = 0.0) -> Transition:
    """The session gives the job back before its body began: uncharged, whatever happened before.

    With `delay` it is offered again only after so many seconds.
    """
    names.check_seconds("delay", delay)
    return Transition(held=held, move=Move.TAKE_BACK, delay=delay)


def decline(held: Held, error: str, *, patience: float = UNKNOWN_TASK_SECONDS) -> Transition:
    """The session does not know the job's task, so nothing of it began.

    It goes back uncharged, and from then on only sessions that know its task are offered it. One that is bound to this
    worker is offered to it again after a while (`decline_delay`). A job that has been declined for `patience` seconds
    without a run in between is offered to all once more, and fails as `unknown_task` with `error` if declined again.
    """
    names.check_seconds("patience", patience)
    reason = Reason.UNKNOWN_TASK
    return Transition(
        held=held, move=Move.DECLINE, delay=patience, reason=reason, error=_cut(error), error_group=reason.value
    )


def decline_delay(declined_for: float) -> float:
    """How long a job is left alone that was declined for the first time so many seconds ago.

    Half of that time, within bounds. The stores that count for themselves do the same.
    """
    return min(LONGEST_DECLINE, max(SHORTEST_DECLINE, declined_for / 2))


def cancel(held: Held, reason: Reason = Reason.BY_USER) -> Transition:
    """The body was stopped because the job was cancelled."""
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
    """What follows a failed attempt: another one while the budget lasts. A bad payload never gets better."""
    if reason is Reason.BAD_PAYLOAD or not may_retry(attempt, retries):
        return fail(held, reason, error, group=group)
    return retry(held, backoff.delay(attempt, draw), reason, error, group=group)


class Fate(msgspec.Struct, frozen=True):
    """What becomes of a running job whose process died."""

    state: JobState
    delay: float = 0.0
    reason: Reason | None = None


def after_crash(
    *, cancel_requested: bool, attempt: int, retries: int, crashes: int, backoff: Backoff, draw: float
) -> Fate:
    """The rescuer's decision for a job that had begun; `crashes` counts this one."""
    if cancel_requested:
        return Fate(S.CANCELLED, reason=Reason.BY_USER)
    if not may_retry(attempt, retries):
        return Fate(S.FAILED, reason=Reason.CRASHED)
    delay = backoff.after_crash(attempt, crashes, draw)
    return Fate(S.SCHEDULED if delay > 0 else S.PENDING, delay=delay)


def _cut(error: str) -> str:
    """The end of a traceback says what went wrong, so a long one loses its beginning.

    NUL and lone surrogates become marks: not every store holds them, and no write may fail for its text.
    """
    raw = error.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace")
    if len(raw) <= names.ERROR_BYTES:
        return raw.decode()
    return "…" + raw[-(names.ERROR_BYTES - 3) :].decode(errors="ignore")


def _group(group: str | None, reason: Reason) -> str:
    return reason.value if not group else "".join(c if c.isprintable() else "?" for c in group)[:120]
