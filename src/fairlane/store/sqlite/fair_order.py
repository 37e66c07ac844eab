"""Fair order between lanes: entering and leaving the line of claimable jobs (see `fairlane.model.fairness`)."""

from __future__ import annotations

from ...model.fairness import refund, tag
from ...model.session import UNKNOWN
from ..wakeups import worker_topic
from .job_record import Entry
from .step import Flow, Step


def enter(step: Step, e: Entry) -> None:
    """Make a job claimable; its row is for the caller to save. It is pending, granted and ungated."""
    assert e.arrival is not None
    e.flow = join(step, e.queue, e.class_, e.inbox, e.flow_key, e.arrival)
    # Only a job that somebody else cannot take can hold its lane's place idle; see `places.move_idle_grants`.
    e.granted_at = step.now if e.lane is not None and e.inbox else None


def join(step: Step, queue: int, class_: int, inbox: str, lane: str, arrival: int) -> int:
    """Put an arrival into its flow, and tell those who could start it. Returns the number of the flow."""
    flow = step.flow(queue, class_, inbox, lane)
    line_up(step, flow, queue, inbox, arrival)
    return flow.id


def line_up(step: Step, flow: Flow, queue: int, inbox: str, arrival: int) -> None:
    """The same for a flow that was read already."""
    if flow.tag is None or flow.head is None:
        flow.tag = tag(flow.domain.clock, flow.finish)
        flow.head = arrival
        flow.dirty = True
    elif arrival < flow.head:
        flow.head = arrival
        flow.dirty = True
    shared = not inbox or inbox.startswith(UNKNOWN)
    step.topics.add(step.queue_number(queue).topic if shared else worker_topic(inbox))


def withdraw(step: Step, e: Entry) -> None:
    """Take a job out of the line, before it has started. Nothing was charged for it, so nothing is owed."""
    if e.flow is None:
        return
    flow = step.flow_number(e.flow)
    e.flow = None
    e.granted_at = None
    step.run("active_job_withdraw", e.seq)
    if flow.head == e.arrival:
        find_head(step, flow)


def find_head(step: Step, flow: Flow) -> None:
    """Look up the next job of a flow after its head has gone; its tag stays, because nobody has paid."""
    [flow.head] = step.one("flow_head", flow.id)
    if flow.head is None:
        flow.tag = None
    flow.dirty = True


def give_back(step: Step, e: Entry) -> None:
    """Return what an interrupted start had paid, so that starting again pays once in all."""
    flow = step.flow(e.queue, e.class_, e.inbox, e.flow_key)
    flow.finish = refund(flow.finish, e.paid)
    if flow.tag is not None:
        flow.tag = tag(flow.domain.clock, flow.finish)
    flow.dirty = True
    e.paid = 0
