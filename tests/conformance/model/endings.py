"""Endings: every way out of running, and what a final job releases."""

from __future__ import annotations

from fairlane.model.job import JobKind, JobState, Reason
from fairlane.model.states import MOST_HAND_BACKS, Move, Transition, after_crash

from . import bindings, lines
from .records import JobRecord, Mismatch, Records

UNCHARGED = frozenset({Move.HAND_BACK, Move.TAKE_BACK, Move.SNOOZE, Move.DECLINE})
"""Moves that are not charged; a hand-back only `MOST_HAND_BACKS` times in a row."""


def end(records: Records, job: JobRecord, state: JobState, reason: Reason | None = None) -> None:
    """Make a job final."""
    assert not job.state.final
    job.state = state
    job.reason = reason
    job.holder = job.due_at = None
    job.keeps_place = job.retrying = False
    job.finished_at = records.now
    if job.new.kind is JobKind.CLEANUP and reason not in (Reason.REOPENED, Reason.WORKER_LOST):
        bindings.cleanup_ended(records, job)


def write(records: Records, job: JobRecord, transition: Transition) -> None:
    """Apply a decision of the holder of a running job."""
    move = transition.move
    if move is Move.COMPLETE:
        end(records, job, JobState.COMPLETED)
    elif job.cancel_requested or move is Move.CANCEL:
        # Whether a start that was handed back and then cancelled is charged is unspecified.
        job.charge_unsaid = move in UNCHARGED
        _refund(records, job, certain=False)
        end(records, job, JobState.CANCELLED, transition.reason if move is Move.CANCEL else Reason.BY_USER)
    elif move is Move.FAIL:
        end(records, job, JobState.FAILED, transition.reason)
    elif move is Move.RETRY:
        job.suspect = transition.reason is Reason.CRASHED
        job.crashes += job.suspect
        job.returns, job.started = 0, True
        job.replaced = transition.payload or job.replaced
        lines.wait(records, job, transition.delay, keeps_arrival=False)
    elif move is Move.SNOOZE:
        job.suspect = False
        job.returns, job.started = 0, True
        job.replaced = transition.payload or job.replaced
        _refund(records, job, certain=False)
        job.attempt -= 1
        lines.wait(records, job, transition.delay, keeps_arrival=False)
    elif move is Move.TAKE_BACK:
        give_back(records, job, transition.delay)
    else:
        assert move in (Move.HAND_BACK, Move.DECLINE)
        if move is Move.HAND_BACK:
            hand_back(records, job)
        else:
            give_back(records, job)
        job.declined = move is Move.DECLINE


def hand_back(records: Records, job: JobRecord) -> None:
    """A body that had begun was stopped: uncharged the first times in a row, then as after a crash."""
    if job.returns >= MOST_HAND_BACKS:
        _charge(records, job)
        return
    job.returns += 1
    job.suspect = job.suspect or job.returns == MOST_HAND_BACKS
    job.started = True
    give_back(records, job)


def give_back(records: Records, job: JobRecord, delay: float = 0.0) -> None:
    """The run does not count: the job waits again where it was. If a cancel was requested, it is cancelled instead."""
    if job.cancel_requested:
        job.charge_unsaid = True
        _refund(records, job, certain=False)
        end(records, job, JobState.CANCELLED, Reason.BY_USER)
        return
    job.attempt -= 1
    _refund(records, job)
    job.crashed_last = job.crashed_last or delay > 0
    lines.wait(records, job, delay, keeps_arrival=True)


def crash(records: Records, job: JobRecord) -> str:
    """The process that ran it died. Returns the new state of the job: retried, failed or cancelled."""
    if job.new.kind is JobKind.TURN:
        end(records, job, JobState.CANCELLED, Reason.WAITER_GONE)
        return "cancelled"
    job.returns = 0
    return _charge(records, job)


def _charge(records: Records, job: JobRecord) -> str:
    job.crashes += 1
    job.suspect = job.crashed_last = job.started = True
    fate = after_crash(
        cancel_requested=job.cancel_requested,
        attempt=job.attempt,
        retries=job.new.retries,
        crashes=job.crashes,
        backoff=job.new.backoff,
        draw=0.0,
    )
    if fate.state.final:
        _refund(records, job, certain=False)
        end(records, job, fate.state, fate.reason)
        return "failed" if fate.state is JobState.FAILED else "cancelled"
    _refund(records, job)
    lines.wait(records, job, fate.delay, keeps_arrival=True)
    return "retried"


def _refund(records: Records, job: JobRecord, *, certain: bool = True) -> None:
    if job.started_in is not None:
        records.order(job.started_in).refund(job.new.lane, job.paid, certain=certain)


def settle_broadcasts(records: Records) -> None:
    """A broadcast is over when all its copies are, and nobody can join any more.

    When its time to join ends between two passes of the promoter, the store may notice at once or in the next pass.
    """
    for parent in list(records.jobs.values()):
        if parent.new.kind is not JobKind.BROADCAST or parent.state.final:
            continue
        copies = records.children(parent.id)
        if not all(copy.state.final for copy in copies):
            continue
        shown = records.seen.jobs[parent.id].state
        time_over = records.now >= parent.enqueued_at + parent.new.ttl
        if parent.new.ttl == 0 or parent.swept or ((time_over or parent.cancel_requested) and shown.final):
            clean = all(copy.state is JobState.COMPLETED for copy in copies) and not parent.cancel_requested
            if not shown.final or (clean and shown is not JobState.COMPLETED):
                raise Mismatch(f"every copy of {parent.id} is over, and it is {shown}")
            end(records, parent, shown, records.seen.jobs[parent.id].reason)
