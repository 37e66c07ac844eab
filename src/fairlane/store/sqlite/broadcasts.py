"""Broadcasts: one child for each worker of a pool, and a parent that runs until all of them are final.

A child is a job for one index; its id is its parent's with the index behind it, so a worker that restarts finds the
same child. Workers that register before the parent's time to join is over get one too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ...errors import Conflict
from ...model.job import JobState, Reason
from ...model.session import worker_name
from ..codes import STATES
from ..wakeups import job_topic
from .job_record import Entry, entry_of
from .step import Step

AddChild = Callable[[Step, Entry, int], None]
End = Callable[..., None]


def begin(step: Step, parent: Entry, ttl: float, add_child: AddChild, end: End) -> None:
    """Start a parent whose row is stored as running: children for the workers there are."""
    for (index,) in step.all("pool_live", parent.pool, step.boot, step.mono):
        if step.one("child_exists", child_id(parent.id, index)) is not None:
            raise Conflict(
                f"job {child_id(parent.id, index)!r} exists already, and a copy of this broadcast needs that id"
            )
        add_child(step, parent, index)
    if ttl <= 0:
        finish_if_over(step, parent, end)


def join(step: Step, pool: str, index: int, add_child: AddChild) -> None:
    """A worker has registered: broadcasts it may still join get a child for it, unless it has one from before."""
    for parent in map(entry_of, step.all("broadcasts_joining", step.now, pool)):
        if step.one("child_exists", child_id(parent.id, index)) is None:
            add_child(step, parent, index)


def child_id(parent: str, index: int) -> str:
    """The id of the copy for one worker."""
    return f"{parent}/{index}"


def child_ended(step: Step, parent: int, end: End) -> None:
    """A child is final: its parent may be over."""
    e = step.entry(parent)
    if e is not None:
        step.topics.add(job_topic(e.id))
        finish_if_over(step, e, end)


def finish_if_over(step: Step, parent: Entry, end: End) -> None:
    """End a parent all of whose children are final, once nobody can join any more."""
    if parent.due is not None and parent.due > step.now and not parent.cancel:
        return
    if step.one("children_active", parent.seq) is not None:
        return
    if parent.cancel:
        end(step, parent, JobState.CANCELLED, Reason.BY_USER)
        return
    rows = step.all("children_outcomes", parent.seq)
    report = {worker_name(parent.pool, index): STATES[state].value for index, state in rows}
    end(step, parent, JobState.COMPLETED, result=msgspec.json.encode(report))


def cancel(step: Step, parent: Entry, cancel_child: Callable[[Step, Entry], Any], end: End) -> JobState:
    """Cancel a broadcast: children that wait are final at once, running ones are asked to stop."""
    parent.cancel = 1
    step.save(parent)
    children = list(map(entry_of, step.all("children_records", parent.seq)))
    for child in children:
        cancel_child(step, child)
    if not children:
        finish_if_over(step, parent, end)
    return JobState.RUNNING if step.entry(parent.seq) is not None else JobState.CANCELLED


def close_joining(step: Step, limit: int, end: End) -> int:
    """The time to join is over: a parent whose copies are all final is over too."""
    rows = step.all("broadcasts_closing", step.now, limit)
    for parent in map(entry_of, rows):
        parent.due = None
        step.save(parent)
        finish_if_over(step, parent, end)
    return len(rows)


def abandon(step: Step, end: End) -> None:
    """Cancel copies that wait for a worker that is gone, of broadcasts nobody can join any more."""
    for child in map(entry_of, step.all("children_unserved", step.boot, step.mono)):
        end(step, child, JobState.CANCELLED, Reason.WORKER_LOST)
