"""How jobs end and how they go back: every way out of running or waiting, with all that follows in the same step."""

from __future__ import annotations

from typing import Any

import msgspec

from ...model.job import KEPT_ATTEMPTS, Attempt, JobKind, JobState, Reason
from ...model.session import UNKNOWN, unknown_inbox
from ...model.states import MOST_HAND_BACKS, Move, Transition, after_crash, decline_delay
from ..codes import FINAL_CODES, MOVE_CODES, PENDING, RUNNING, SCHEDULED
from ..wakeups import job_topic, worker_topic
from . import bindings, broadcasts, fair_order, lane_limits
from .job_record import Entry, encode_attempts, reason_value
from .step import SLOTLESS, TALLY_OF_STATE, Step

_DECLINED = Move.DECLINE.value
CRASH_ERROR = "The process that ran it died, or lost contact for longer than its lease."
HANDED_BACK_ERROR = (
    "It was handed back too often: more than three times in a row its worker stopped before its body ended, and no "
    "attempt is left."
)


class Holder:
    """Who runs a job, as its history names them."""

    __slots__ = ("id", "worker")

    def __init__(self, id: str, worker: str) -> None:
        self.id = id
        self.worker = worker


def record(
    step: Step,
    e: Entry,
    holder: Holder,
    outcome: str,
    state: JobState,
    reason: Reason | None = None,
    error: str | None = None,
) -> None:
    """Add a claim that ends, while its job goes on, to the history. The last claim of all is told by the outcome."""
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
        # Of declines in a row the first and the last are kept: they may be many, and all are alike.
        before.pop()
    e.attempts_json = encode_attempts([*before, ended][-KEPT_ATTEMPTS:])
    e.refused = 0


class Ending(msgspec.Struct):
    """A final state and what belongs to it."""

    state: JobState
    reason: Reason | None = None
    result: bytes | None = None
    error: str | None = None
    group: str | None = None
    move: Move | None = None
    """How the claim ended that the job ended in; None when it ended while it waited."""


def end(step: Step, e: Entry, state: JobState, reason: Reason | None = None, **more: Any) -> None:
    """Make a job final. What it held goes on to the next: place, binding, unique value, parent."""
    ending = Ending(state, reason, **more)
    step.run(
        "outcome_insert", e.seq, e.queue, FINAL_CODES[state], reason_value(reason), ending.result, ending.error,
        ending.group,
        e.session if ending.move else None, MOVE_CODES[ending.move] if ending.move else None, e.arrival, e.attempt,
        e.fence, e.started_at, step.now, e.refused,
    )  # fmt: skip
    step.run("active_job_delete", e.seq)
    tell(step, e.queue, e.class_, e.state, FINAL_CODES[state])
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
        lane_limits.vacate(step, e)
    if e.kind == JobKind.CLEANUP:
        bindings.cleaned(step, e, state)
    elif e.binding is not None:
        bindings.used(step, e)
    if e.parent is not None:
        broadcasts.child_ended(step, e.parent, end)


def tell(step: Step, queue: int, class_: int, was: int, code: int, count: int = 1) -> None:
    """Count jobs that are final now, and wake those who wait for the room they leave in their queue."""
    step.count(queue, class_, TALLY_OF_STATE[was], -count)
    step.count(queue, class_, TALLY_OF_STATE[code], count)
    if was == RUNNING:
        tell_room(step, queue)


def tell_room(step: Step, queue: int) -> None:
    """A running job leaves: where its queue has a limit, somebody else may start now, in any inbox."""
    found = step.queue_number(queue)
    if found.slots is not None:
        step.topics.add(found.topic)
        step.topics.update(worker_topic(inbox) for (inbox,) in step.all("inboxes_waiting", queue))


def expire(step: Step, e: Entry) -> None:
    """Cancel a waiting job whose time to start has passed."""
    end(step, e, JobState.CANCELLED, Reason.EXPIRED)


def _stop(step: Step, e: Entry, state: int) -> None:
    """Take a running job out of its session."""
    step.move(e, state)
    e.session = e.claim = e.started_at = e.flow = None


def again(step: Step, e: Entry, delay: float, *, crashed: bool = False) -> None:
    """A retry or a snooze: it paid for its start. An ordered lane stays closed for it; elsewhere it arrives anew.

    `crashed`: the holder saw the process of the body die. Any other end of a run clears the suspicion.
    """
    e.crashes += crashed
    e.suspect = int(crashed)
    e.returns = 0
    e.expires_at = None
    e.paid = 0
    _go_back(step, e, delay, keep_arrival=False)


def back(step: Step, e: Entry, delay: float = 0.0, inbox: str | None = None) -> None:
    """A hand-back or a rescue: it starts next in its lane, without paying again. `inbox`: where it is to wait."""
    fair_order.give_back(step, e)
    _go_back(step, e, delay, keep_arrival=True, inbox=inbox)


def _go_back(step: Step, e: Entry, delay: float, *, keep_arrival: bool, inbox: str | None = None) -> None:
    tell_room(step, e.queue)
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
            lane_limits.hand_on(step, lane)
    if delay <= 0:
        bindings.place(step, e, end)
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
        lane_limits.settle(step, lane)
    step.topics.add(job_topic(e.id))


def promote(step: Step, e: Entry) -> None:
    """A job's time has come: it arrives, or, if it kept its place in an ordered lane, takes it up again."""
    step.move(e, PENDING)
    e.due = None
    admit(step, e)
    step.save(e)
    step.topics.add(job_topic(e.id))


def admit(step: Step, e: Entry) -> None:
    """Give a pending job its binding, its arrival and its place. The caller saves it."""
    bindings.place(step, e, end)
    if e.lane is not None and e.granted:
        lane_limits.resume(step, e)
    elif e.lane is None:
        lane_limits.arrive(step, e)


def crash(step: Step, e: Entry, holder: Holder) -> JobState:
    """The process of a job that had begun is gone. Returns what became of the job."""
    if e.kind == JobKind.TURN:
        end(step, e, JobState.CANCELLED, Reason.WAITER_GONE, move=Move.CRASH)
        return JobState.CANCELLED
    e.returns = 0
    return _charge(step, e, holder, Move.CRASH, CRASH_ERROR)


def hand_back(step: Step, e: Entry, holder: Holder) -> JobState:
    """A body that had begun was stopped. Not charged at first, and no sign against the job; then as after a crash."""
    if e.returns >= MOST_HAND_BACKS:
        return _charge(step, e, holder, Move.HAND_BACK, HANDED_BACK_ERROR)
    e.returns += 1
    e.suspect = int(e.suspect or e.returns == MOST_HAND_BACKS)
    e.expires_at = None
    return take_back(step, e, holder, Move.HAND_BACK)


def _charge(step: Step, e: Entry, holder: Holder, move: Move, error: str) -> JobState:
    """A job whose run counts although its body did not come to an end: it runs again while its budget lasts."""
    if e.kind == JobKind.CLEANUP and _tie_is_lost(step, e):
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
        back(step, e, fate.delay)
    return fate.state


def take_back(step: Step, e: Entry, holder: Holder, outcome: Move = Move.TAKE_BACK, *, delay: float = 0.0) -> JobState:
    """A claimed job that never began, or was handed back: it waits again and its run is not charged."""
    if e.kind == JobKind.CLEANUP and _tie_is_lost(step, e):
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
    back(step, e, delay)
    return state


def decline(step: Step, e: Entry, holder: Holder, t: Transition) -> JobState:
    """Its session does not know its task: it goes back uncharged, or fails when that went on for too long."""
    if e.kind == JobKind.CLEANUP and _tie_is_lost(step, e):
        end(step, e, JobState.CANCELLED, Reason.WORKER_LOST, move=t.move)
        return JobState.CANCELLED
    row = step.one("declined_since", e.seq, e.fence - 1)
    since = step.now if row is None else row[0]
    if step.now - since >= t.delay:
        e.attempt -= 1
        end(step, e, JobState.FAILED, t.reason, error=t.error, group=t.error_group, move=t.move)
        return JobState.FAILED
    # Nobody else could take what is bound to this worker. And who takes it from that inbox should have known it.
    state = JobState.SCHEDULED if e.inbox else JobState.PENDING
    record(step, e, holder, t.move.value, state, t.reason)
    step.run("declined_put", e.seq, e.fence, since, None if e.inbox else since + t.delay)
    e.attempt -= 1
    if e.inbox:
        back(step, e, decline_delay(step.now - since))
    else:
        step.run("unknown_task_put", e.queue, e.task)
        back(step, e, inbox=unknown_inbox(e.task))
    return state


def offer_again(step: Step, limit: int) -> int:
    """Jobs that were declined long enough: everybody is offered them once more, and may fail them."""
    over = step.all("declined_over", step.now, limit)
    for (seq,) in over:
        step.run("declined_offered", seq)
        e = step.entry(seq)
        if e is not None and e.state == PENDING and e.inbox.startswith(UNKNOWN):
            bindings.replace(step, e, end)
    return len(over)


def _tie_is_lost(step: Step, e: Entry) -> bool:
    row = step.one("binding_get", e.binding)
    return row is None or row[4] not in bindings.OPEN_STATES
