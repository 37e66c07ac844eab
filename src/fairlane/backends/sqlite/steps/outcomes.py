"""How jobs end and how they go back: every way out of running or waiting, with all that follows in the same step."""

from __future__ import annotations

from typing import Any

import msgspec

from ....job import KEPT_ATTEMPTS, Attempt, JobKind, JobState, Reason
from ....states import Move, after_crash
from ....wakeups import job_topic, worker_topic
from ...codes import FINAL_CODES, MOVE_CODES, PENDING, RUNNING, SCHEDULED
from . import bindings, broadcasts, flows, places
from .entry import Entry, encode_attempts, reason_value
from .step import SLOTLESS, TALLY_OF_STATE, Step

CRASH_ERROR = "The process that ran it died, or lost contact for longer than its lease."


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
    e.attempts_json = encode_attempts([*e.attempts, ended][-KEPT_ATTEMPTS:] if e.attempts_json else [ended])
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
    step.run("live_delete", e.seq)
    tell(step, e.queue, e.class_, e.state, FINAL_CODES[state])
    step.topics.add(job_topic(e.id))
    if e.state == RUNNING and e.kind in (JobKind.TURN, JobKind.BROADCAST):
        step.count(e.queue, e.class_, SLOTLESS, -1)
    if e.flow is not None and e.state != RUNNING:
        flow = step.flow_number(e.flow)
        if flow.head == e.arrival:
            flows.find_head(step, flow)
    if e.uniq is not None:
        step.run("unique_release", e.seq, step.now)
        step.run("unique_outlive", FINAL_CODES[state], e.seq)
    if e.lane is not None:
        places.vacate(step, e)
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
    e.paid = 0
    _go_back(step, e, delay, keep_arrival=False)


def back(step: Step, e: Entry, delay: float = 0.0) -> None:
    """A hand-back or a rescue: it starts next in its lane, without paying again."""
    flows.give_back(step, e)
    _go_back(step, e, delay, keep_arrival=True)


def _go_back(step: Step, e: Entry, delay: float, *, keep_arrival: bool) -> None:
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
            places.hand_on(step, lane)
    if delay <= 0:
        bindings.place(step, e, end)
        if keeps_place:
            places.resume(step, e)
        else:
            places.arrive(step, e)
    step.save(e)
    step.run("job_attempts", e.attempts_json, e.seq)
    if keeps_place and lane is not None:
        places.trim(step, lane)
        places.settle(step, lane)
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
        places.resume(step, e)
    elif e.lane is None:
        places.arrive(step, e)


def crash(step: Step, e: Entry, holder: Holder) -> JobState:
    """The process of a job that had begun is gone. Returns what became of the job."""
    if e.kind == JobKind.TURN:
        end(step, e, JobState.CANCELLED, Reason.WAITER_GONE, move=Move.CRASH)
        return JobState.CANCELLED
    if e.kind == JobKind.CLEANUP and _tie_is_lost(step, e):
        end(step, e, JobState.CANCELLED, Reason.WORKER_LOST, move=Move.CRASH)
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
        end(step, e, fate.state, fate.reason, error=CRASH_ERROR, group=Reason.CRASHED.value, move=Move.CRASH)
    elif fate.state is JobState.CANCELLED:
        end(step, e, fate.state, fate.reason, move=Move.CRASH)
    else:
        record(step, e, holder, Move.CRASH.value, fate.state, Reason.CRASHED)
        e.suspect = 1
        back(step, e, fate.delay)
    return fate.state


def take_back(step: Step, e: Entry, holder: Holder, outcome: Move = Move.TAKE_BACK) -> None:
    """A claimed job that never began, or was handed back: it is pending again and its run is not charged."""
    if e.kind == JobKind.CLEANUP and _tie_is_lost(step, e):
        end(step, e, JobState.CANCELLED, Reason.WORKER_LOST, move=outcome)
        return
    if e.cancel:
        end(step, e, JobState.CANCELLED, Reason.BY_USER, move=outcome)
        return
    record(step, e, holder, outcome.value, JobState.PENDING)
    e.attempt -= 1
    back(step, e)


def _tie_is_lost(step: Step, e: Entry) -> bool:
    row = step.one("binding_get", e.binding)
    return row is None or row[4] not in bindings.OPEN_STATES
