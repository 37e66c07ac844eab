"""Broadcasts: one child for each worker of a pool, and a parent that runs until all of them are final.

A child is a job for one worker index. Its id is the parent's id followed by the index, so a worker that restarts gets
the same child. Workers that register while the parent can be joined get a child too.
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
from .records import JobRecord, job_record_of
from .step import Step

AddChild = Callable[[Step, JobRecord, int], None]
End = Callable[..., None]


def begin(step: Step, parent: JobRecord, ttl: float, add_child: AddChild, end: End) -> None:
    """Store the children of a new parent, one for each live worker."""
    for (index,) in step.all("pool_live", parent.pool, step.boot, step.mono):
        if step.one("child_exists", child_id(parent.id, index)) is not None:
            raise Conflict(
                f"job {child_id(parent.id, index)!r} exists already, and a copy of this broadcast needs that id"
            )
        add_child(step, parent, index)
    if ttl <= 0:
        finish_if_over(step, parent, end)


def join(step: Step, pool: str, index: int, add_child: AddChild) -> None:
    """Store children for a worker that has registered: for broadcasts that it can still join and has no child of."""
    for parent in map(job_record_of, step.all("broadcasts_joining", step.now, pool)):
        if step.one("child_exists", child_id(parent.id, index)) is None:
            add_child(step, parent, index)


def child_id(parent: str, index: int) -> str:
    """Return the id of the copy for one worker."""
    return f"{parent}/{index}"


def child_ended(step: Step, parent: int, end: End) -> None:
    """Finish the parent of a child that is final, if it was the last one."""
    e = step.active_job(parent)
    if e is not None:
        step.topics.add(job_topic(e.id))
        finish_if_over(step, e, end)


def finish_if_over(step: Step, parent: JobRecord, end: End) -> None:
    """Finish a parent whose children are all final, once no worker can join it."""
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


def cancel(step: Step, parent: JobRecord, cancel_child: Callable[[Step, JobRecord], Any], end: End) -> JobState:
    """Cancel a broadcast: waiting children are cancelled at once, running ones are asked to stop."""
    parent.cancel = 1
    step.save(parent)
    children = list(map(job_record_of, step.all("children_records", parent.seq)))
    for child in children:
        cancel_child(step, child)
    if not children:
        finish_if_over(step, parent, end)
    return JobState.RUNNING if step.active_job(parent.seq) is not None else JobState.CANCELLED


def close_joining(step: Step, limit: int, end: End) -> int:
    """Close parents whose time to join is over, and finish those whose children are all final."""
    rows = step.all("broadcasts_closing", step.now, limit)
    for parent in map(job_record_of, rows):
        parent.due = None
        step.save(parent)
        finish_if_over(step, parent, end)
    return len(rows)


def abandon(step: Step, end: End) -> None:
    """Cancel children that wait for a worker that is gone, of broadcasts that can no longer be joined."""
    for child in map(job_record_of, step.all("children_unserved", step.boot, step.mono)):
        end(step, child, JobState.CANCELLED, Reason.WORKER_LOST)
