"""Fair order between lanes: making jobs claimable and withdrawing them (see `fairlane.model.fairness`)."""

from __future__ import annotations

from ...model.fairness import refund, tag
from ...model.session import UNKNOWN
from ..wakeups import worker_topic
from .records import JobRecord
from .step import Flow, Step


def enter(step: Step, e: JobRecord) -> None:
    """Make a job claimable that is pending, granted and ungated. The caller saves it."""
    assert e.arrival is not None
    e.flow = join(step, e.queue, e.class_, e.inbox, e.flow_key, e.arrival)
    # Only a job that is bound to one worker can hold a place idle; see `lane_limits.move_idle_grants`.
    e.granted_at = step.now if e.lane is not None and e.inbox else None


def join(step: Step, queue: int, class_: int, inbox: str, lane: str, arrival: int) -> int:
    """Add an arrival to its flow and notify workers that could start it. Returns the id of the flow."""
    flow = step.flow(queue, class_, inbox, lane)
    queue_up(step, flow, queue, inbox, arrival)
    return flow.id


def queue_up(step: Step, flow: Flow, queue: int, inbox: str, arrival: int) -> None:
    """Do the same for a flow that is already loaded."""
    if flow.tag is None or flow.head is None:
        flow.tag = tag(flow.domain.clock, flow.finish)
        flow.head = arrival
        flow.dirty = True
    elif arrival < flow.head:
        flow.head = arrival
        flow.dirty = True
    shared = not inbox or inbox.startswith(UNKNOWN)
    step.topics.add(step.queue_number(queue).topic if shared else worker_topic(inbox))


def withdraw(step: Step, e: JobRecord) -> None:
    """Make a job that has not started unclaimable. Nothing was charged for it, so nothing is refunded."""
    if e.flow is None:
        return
    flow = step.flow_number(e.flow)
    e.flow = None
    e.granted_at = None
    step.run("active_job_withdraw", e.seq)
    if flow.head == e.arrival:
        find_head(step, flow)


def find_head(step: Step, flow: Flow) -> None:
    """Find the next job of a flow whose head was removed. The tag stays the same: no start was charged."""
    [flow.head] = step.one("flow_head", flow.id)
    if flow.head is None:
        flow.tag = None
    flow.dirty = True


def refund_start(step: Step, e: JobRecord) -> None:
    """Refund an interrupted start, so that a job that starts again is charged only once."""
    flow = step.flow(e.queue, e.class_, e.inbox, e.flow_key)
    flow.finish = refund(flow.finish, e.paid)
    if flow.tag is not None:
        flow.tag = tag(flow.domain.clock, flow.finish)
    flow.dirty = True
    e.paid = 0
