"""Every way in which a job ends or goes back to waiting, with everything that follows from it in the same step.

Also jobs whose records are damaged: they get a new identity where theirs is lost, so that they can end like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...model.job import KEPT_ATTEMPTS, Attempt, Held, JobKind, JobState, Reason
from ...model.session import UNKNOWN, unknown_inbox
from ...model.states import MOST_HAND_BACKS, Move, Transition, after_crash, decline_delay
from ..codes import FINAL_CODES, MOVE_CODES, PENDING, RUNNING, SCHEDULED
from ..shared.claimed_jobs import LOST_PAYLOAD, logger, unreadable
from ..wakeups import job_topic, worker_topic
from . import bindings, broadcasts, fair_order, lane_limits
from .records import ClaimHolder, JobRecord, encode_attempts, reason_value
from .step import COUNT_OF_STATE, SLOTLESS, Step

_DECLINED = Move.DECLINE.value
CRASH_ERROR = "The process that ran it died, or lost contact for longer than its lease."
HANDED_BACK_ERROR = (
    "It was handed back too often: more than three times in a row its worker stopped before its body ended, and no "
    "attempt is left."
)
MOST_RESTORED = 1_000


def record(
    step: Step,
    e: JobRecord,
    holder: ClaimHolder,
    outcome: str,
    state: JobState,
    reason: Reason | None = None,
    error: str | None = None,
) -> None:
    """Add a claim that ends to the history of a job that goes on. The last claim of a job is part of its outcome."""
    ended = Attempt(
        fence=e.fence,
        attempt=e.attempt,
        session=holder.id,
        worker=holder.worker,
        started_at=e.started_at or step.now,
        ended_at=step.now,
        outcome=outcome,
        state=state,
        reason=reason,
        error=error,
        refused=e.refused,
    )
    before = e.attempts if e.attempts_json else []
    if outcome == _DECLINED and [each.outcome for each in before[-2:]] == [_DECLINED] * 2:
        # Of several declines in a row only the first and the last are kept.
        before.pop()
    e.attempts_json = encode_attempts([*before, ended][-KEPT_ATTEMPTS:])
    e.refused = 0


class Ending(msgspec.Struct):
    """A final state with its details."""

    state: JobState
    reason: Reason | None = None
    result: bytes | None = None
    error: str | None = None
    group: str | None = None
    move: Move | None = None
    """How the claim ended that the job ended in; None if it ended while waiting."""


def end(step: Step, e: JobRecord, state: JobState, reason: Reason | None = None, **more: Any) -> None:
    """Make a job final, and release what it held: its place, its binding and its unique value. Update its parent."""
    ending = Ending(state, reason, **more)
    step.run(
        "outcome_insert", e.seq, e.queue, FINAL_CODES[state], reason_value(reason), ending.result, ending.error,
        ending.group,
        e.session if ending.move else None, MOVE_CODES[ending.move] if ending.move else None, e.arrival, e.attempt,
        e.fence, e.started_at, step.now, e.refused, step.next_ending(FINAL_CODES[state]),
    )  # fmt: skip
    step.run("active_job_delete", e.seq)
    count_final(step, e.queue, e.class_, e.state, FINAL_CODES[state])
    step.topics.add(job_topic(e.id))
    if e.state == RUNNING and e.kind in (JobKind.TURN, JobKind.BROADCAST):
        step.count(e.queue, e.class_, SLOTLESS, -1)
    if e.flow is not None and e.state != RUNNING:
        flow = step.flow_number(e.flow)
        if flow.head == e.arrival:
            fair_order.find_head(step, flow)
    if e.uniq is not None:
        step.run("unique_release", e.seq, step.now)
        step.run("unique_outlive", FINAL_CODES[state], e.seq)
    if e.lane is not None:
        lane_limits.leave_lane(step, e)
    if e.kind == JobKind.CLEANUP:
        bindings.cleaned(step, e, state)
    elif e.binding is not None:
        bindings.used(step, e)
    if e.parent is not None:
        broadcasts.child_ended(step, e.parent, end)


def count_final(step: Step, queue: int, class_: int, was: int, code: int, count: int = 1) -> None:
    """Count jobs that are final now, and notify workers of the room they leave in their queue."""
    step.count(queue, class_, COUNT_OF_STATE[was], -count)
    step.count(queue, class_, COUNT_OF_STATE[code], count)
    if was == RUNNING:
        notify_room(step, queue)


def notify_room(step: Step, queue: int) -> None:
    """Notify workers that a running job has ended, if its queue has a limit: a job in any inbox may start now."""
    found = step.queue_number(queue)
    if found.slots is not None:
        step.topics.add(found.topic)
        step.topics.update(worker_topic(inbox) for (inbox,) in step.all("inboxes_waiting", queue))


def expire(step: Step, e: JobRecord) -> None:
    """Cancel a waiting job that has expired."""
    end(step, e, JobState.CANCELLED, Reason.EXPIRED)


def _stop(step: Step, e: JobRecord, state: int) -> None:
    """Remove a running job from its session."""
    step.move(e, state)
    e.session = e.claim = e.started_at = e.flow = None


def reschedule(step: Step, e: JobRecord, delay: float, *, crashed: bool = False) -> None:
    """Schedule a retry or a snooze. Its start stays charged. It keeps its place in an ordered lane, else arrives anew.

    `crashed`: the process that ran it died. Any other end of a run clears the suspicion.
    """
    e.crashes += crashed
    e.suspect = int(crashed)
    e.returns = 0
    e.expires_at = None
    e.paid = 0
    _requeue(step, e, delay, keep_arrival=False)


def put_back(step: Step, e: JobRecord, delay: float = 0.0, inbox: str | None = None) -> None:
    """Return a job to the front of its lane and refund its start. `inbox`: where it waits instead of its own."""
    fair_order.refund_start(step, e)
    _requeue(step, e, delay, keep_arrival=True, inbox=inbox)


def _requeue(step: Step, e: JobRecord, delay: float, *, keep_arrival: bool, inbox: str | None = None) -> None:
    notify_room(step, e.queue)
    lane = None if e.lane is None else step.lane(e.lane)
    keeps_place = lane is not None and (lane.ordered or (keep_arrival and not delay))
    _stop(step, e, SCHEDULED if delay > 0 else PENDING)
    e.due = step.now + delay if delay > 0 else None
    if not keeps_place:
        if not keep_arrival:
            e.arrival = None
        granted, e.lane, e.granted = e.granted, None, 0
        step.save(e)
        if lane is not None:
            lane.granted -= granted
            lane_limits.grant_free_places(step, lane)
    if delay <= 0:
        bindings.assign_worker(step, e, end)
        if inbox is not None:
            e.inbox = inbox
        if keeps_place:
            lane_limits.resume(step, e)
        else:
            lane_limits.arrive(step, e)
    step.save(e)
    step.run("job_attempts", e.attempts_json, e.seq)
    if keeps_place and lane is not None:
        lane_limits.trim(step, lane)
        lane_limits.reassign_places(step, lane)
    step.topics.add(job_topic(e.id))


def promote(step: Step, e: JobRecord) -> None:
    """Make a due job pending: it arrives, or resumes the place that it kept in an ordered lane."""
    step.move(e, PENDING)
    e.due = None
    admit(step, e)
    step.save(e)
    step.topics.add(job_topic(e.id))


def admit(step: Step, e: JobRecord) -> None:
    """Assign a pending job its binding, its arrival and its place. The caller saves it."""
    bindings.assign_worker(step, e, end)
    if e.lane is not None and e.granted:
        lane_limits.resume(step, e)
    elif e.lane is None:
        lane_limits.arrive(step, e)


def crash(step: Step, e: JobRecord, holder: ClaimHolder) -> JobState:
    """End the claim of a job whose process is gone after the job began; returns the new state."""
    if e.kind == JobKind.TURN:
        end(step, e, JobState.CANCELLED, Reason.WAITER_GONE, move=Move.CRASH)
        return JobState.CANCELLED
    e.returns = 0
    return _charge(step, e, holder, Move.CRASH, CRASH_ERROR)


def hand_back(step: Step, e: JobRecord, holder: ClaimHolder) -> JobState:
    """Put back a job that was stopped while it ran. The first times are not charged; then it counts as a crash."""
    if e.returns >= MOST_HAND_BACKS:
        return _charge(step, e, holder, Move.HAND_BACK, HANDED_BACK_ERROR)
    e.returns += 1
    e.suspect = int(e.suspect or e.returns == MOST_HAND_BACKS)
    e.expires_at = None
    return take_back(step, e, holder, Move.HAND_BACK)


def _charge(step: Step, e: JobRecord, holder: ClaimHolder, move: Move, error: str) -> JobState:
    """Charge a run that did not end by itself. The job runs again while it has attempts left."""
    if e.kind == JobKind.CLEANUP and _binding_is_lost(step, e):
        end(step, e, JobState.CANCELLED, Reason.WORKER_LOST, move=move)
        return JobState.CANCELLED
    e.crashes += 1
    fate = after_crash(
        cancel_requested=bool(e.cancel),
        attempt=e.attempt,
        retries=e.retries,
        crashes=e.crashes,
        backoff=e.backoff,
        draw=step.draw(),
    )
    if fate.state is JobState.FAILED:
        end(step, e, fate.state, fate.reason, error=error, group=move.value, move=move)
    elif fate.state is JobState.CANCELLED:
        end(step, e, fate.state, fate.reason, move=move)
    else:
        record(step, e, holder, move.value, fate.state, Reason.CRASHED)
        e.suspect = 1
        e.expires_at = None
        put_back(step, e, fate.delay)
    return fate.state


def take_back(
    step: Step, e: JobRecord, holder: ClaimHolder, outcome: Move = Move.TAKE_BACK, *, delay: float = 0.0
) -> JobState:
    """Put back a claimed job that never began, or was handed back. The attempt is not charged."""
    if e.kind == JobKind.CLEANUP and _binding_is_lost(step, e):
        end(step, e, JobState.CANCELLED, Reason.WORKER_LOST, move=outcome)
        return JobState.CANCELLED
    if e.cancel:
        end(step, e, JobState.CANCELLED, Reason.BY_USER, move=outcome)
        return JobState.CANCELLED
    state = JobState.SCHEDULED if delay > 0 else JobState.PENDING
    record(step, e, holder, outcome.value, state)
    if outcome is Move.TAKE_BACK:
        step.run("declined_go_on", e.seq, e.fence)
    e.attempt -= 1
    put_back(step, e, delay)
    return state


def decline(step: Step, e: JobRecord, holder: ClaimHolder, t: Transition) -> JobState:
    """Put back a job whose task its session does not know, uncharged; fail it if it was declined for too long."""
    if e.kind == JobKind.CLEANUP and _binding_is_lost(step, e):
        end(step, e, JobState.CANCELLED, Reason.WORKER_LOST, move=t.move)
        return JobState.CANCELLED
    row = step.one("declined_since", e.seq, e.fence - 1)
    since = step.now if row is None else row[0]
    if step.now - since >= t.delay:
        e.attempt -= 1
        end(step, e, JobState.FAILED, t.reason, error=t.error, group=t.error_group, move=t.move)
        return JobState.FAILED
    # A job in a worker's inbox can run nowhere else, so it is offered to the same worker again later.
    state = JobState.SCHEDULED if e.inbox else JobState.PENDING
    record(step, e, holder, t.move.value, state, t.reason)
    step.run("declined_put", e.seq, e.fence, since, None if e.inbox else since + t.delay)
    e.attempt -= 1
    if e.inbox:
        put_back(step, e, decline_delay(step.now - since))
    else:
        step.run("unknown_task_put", e.queue, e.task)
        put_back(step, e, inbox=unknown_inbox(e.task))
    return state


def offer_again(step: Step, limit: int) -> int:
    """Offer jobs that have been declined for long enough to all workers once more; the next decline fails them."""
    over = step.all("declined_over", step.now, limit)
    for (seq,) in over:
        step.run("declined_offered", seq)
        e = step.active_job(seq)
        if e is not None and e.state == PENDING and e.inbox.startswith(UNKNOWN):
            bindings.reassign_worker(step, e, end)
    return len(over)


def _binding_is_lost(step: Step, e: JobRecord) -> bool:
    row = step.one("binding_get", e.binding)
    return row is None or row[4] not in bindings.OPEN_STATES


def fail_damaged(step: Step, seq: int, problem: str) -> None:
    """Fail a running job whose record cannot be read."""
    e = step.active_job(seq)
    if e is None:
        _restore(step, seq)
        e = step.active_job(seq)
        assert e is not None
    if type(e.id) is not str:
        # The original id cannot be read.
        e.id = lost_id(seq)
        step.run("id_repair", e.id, seq)
    ending = unreadable(Held(e.id, e.fence), problem)
    end(step, e, JobState.FAILED, Reason.BAD_PAYLOAD, error=ending.error, group=ending.error_group, move=Move.FAIL)


def restore_identities(step: Step) -> list[str]:
    """Give active jobs that lost their identity a new one, under which they can be found and ended; returns the ids."""
    return _restore_all(step, step.all("identities_missing", MOST_RESTORED))


def restore_identities_of_session(step: Step, session: int) -> None:
    """Do the same for the running jobs of a session."""
    _restore_all(step, step.all("identities_missing_of", session))


def restored(step: Step, seq: int) -> JobRecord:
    """Return an active job that lost its identity, with a new one."""
    _restore_all(step, [(seq,)])
    e = step.active_job(seq)
    assert e is not None
    return e


def _restore_all(step: Step, seqs: Sequence[tuple[int]]) -> list[str]:
    found = [_restore(step, seq) for (seq,) in seqs]
    if found:
        logger.error("%d jobs had lost their identity and have new ids: %s", len(found), ", ".join(found[:5]))
    return found


def _restore(step: Step, seq: int) -> str:
    id = lost_id(seq)
    step.run("identity_lost", seq, id, LOST_PAYLOAD, step.now)
    return id


def lost_id(seq: int) -> str:
    """Return the new id of a job whose own id was lost."""
    return f"lost-{seq}"
