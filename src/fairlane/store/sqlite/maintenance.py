"""Deleting jobs and records past their retention, and recounting derived data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import InvalidInput
from ...model.job import JobState, check_ids
from ...model.maintenance import Pruned, Recount, Retention
from ..codes import FINAL_CODES
from . import endings, lane_limits
from .enqueue import stored_fingerprint
from .records import json_texts
from .step import Step

TIDY_FLOWS = 10_000
EVERY_JOB = 2**62


def prune(step: Step, keep: Retention, limit: int) -> Pruned:
    """Delete final jobs over their age or number, and old records of other kinds."""
    if limit < 1:
        raise InvalidInput("limit", "must be at least 1")
    jobs = 0
    for (queue,) in step.all("queue_ids"):
        for state in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED):
            completed = state is JobState.COMPLETED
            age = keep.completed_seconds if completed else keep.failed_seconds
            count = keep.completed_count if completed else keep.failed_count
            jobs += _prune_state(step, keep, queue, state, age, count, limit - jobs)
    other = 0
    for name, value in (
        ("prune_sessions", step.now - keep.history_seconds),
        ("prune_bindings", step.now - keep.history_seconds),
        ("prune_reserved_ids", step.now),
        ("prune_uniques", step.now),
        ("prune_task_sets", step.now - keep.history_seconds),
    ):
        other += step.run(name, value, limit).rowcount
    other += step.run("prune_declined", limit).rowcount
    other += step.run("prune_unknown_tasks").rowcount
    other += _tidy_flows(step, TIDY_FLOWS)
    return Pruned(jobs=jobs, other=other, more=jobs >= limit)


def _prune_state(step: Step, keep: Retention, queue: int, state: JobState, age: float, count: int, limit: int) -> int:
    if limit <= 0:
        return 0
    # All jobs up to the age limit, or up to the last one over the number limit, whichever is later.
    cut: tuple[float, int] = (step.now - age, EVERY_JOB)
    row = step.one("ended_beyond", queue, FINAL_CODES[state], count)
    if row is not None:
        cut = max(cut, tuple(row))
    rows = step.all("jobs_ended_before", queue, FINAL_CODES[state], *cut, limit)
    for row in rows:
        _forget_job(step, keep, *row)
    return len(rows)


def _forget_job(
    step: Step, keep: Retention, seq: int, id: str, code: int, finished_at: float, retry_of: str | None, *content: Any
) -> None:
    until = finished_at + (keep.id_seconds if retry_of is None else keep.retry_id_seconds)
    if until > step.now:
        step.run("reserved_id_put", id, stored_fingerprint(content), code, until)
    step.run("outcome_delete", seq)
    step.run("job_delete", seq)


def forget(step: Step, ids: Sequence[str], keep: Retention) -> list[bool]:
    """Delete those of these jobs that are final."""
    check_ids(ids)
    rows = step.all("jobs_ended_by_ids", json_texts(ids)) if ids else []
    for row in rows:
        _forget_job(step, keep, *row)
    gone = {row[1] for row in rows}
    return [id in gone for id in ids]


def _tidy_flows(step: Step, limit: int) -> int:
    """Delete flows of empty lanes that are not ahead of the clock of their domain.

    The clock of a domain without jobs is moved past all its flows first.
    """
    for domain, finish in step.all("domains_idle"):
        step.run("domain_save", finish, domain)
    return step.run("flows_tidy", limit).rowcount


def recount(step: Step) -> Recount:
    """Compare counts, lanes and flows with the jobs they are derived from, and correct them."""
    differences = [f"job {id}: its identity was missing" for id in endings.restore_identities(step)]
    for queue, class_, column, kept, true in step.all("queue_count_differences"):
        name = step.queue_number(queue).name
        differences.append(f"queue {name}, class {class_}: {column} was {kept}, is {true}")
    step.run("queue_count_recount")
    for lane, key, kept, true in step.all("lane_differences"):
        differences.append(f"lane {key}: granted was {kept}, is {true}")
        step.lane(lane).granted = true
    for lane, key in step.all("lanes_short"):
        if given := lane_limits.grant_free_places(step, step.lane(lane)):
            differences.append(f"lane {key}: {given} places were free while jobs waited")
    for seq, id in step.all("lanes_dangling"):
        differences.append(f"job {id}: its lane was gone")
        step.run("active_job_leave_lane", seq)
    for flow, lane, kept, true in step.all("flow_differences"):
        differences.append(f"flow of lane {lane!r}: head was {kept}, is {true}")
        found = step.flow_number(flow)
        found.head = true
        if true is None:
            found.tag = None
        elif found.tag is None:
            found.tag = max(found.domain.clock, found.finish)
        found.dirty = True
    [jobs] = step.one("active_job_count")
    return Recount(jobs=jobs, differences=tuple(differences))
