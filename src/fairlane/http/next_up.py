"""Which jobs of a queue start next, in order.

The store has the order, job by job: `positions` estimates how many jobs of the queue start before a given one. The
candidates are the first jobs of the longest lanes, and the newest jobs, among which are the heads of short lanes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from ..model.job import JobState, Priority
from ..model.listings import WAITING_LINE
from ..model.reading import Filter, Gate, JobPosition, LaneReading
from ..store.port import Store

HEADS = 6
"""Lanes whose first jobs are candidates."""
NEWEST = 20
"""Of the newest jobs of the queue, those that wait are candidates too."""
AMONG_NEWEST = 6
SHOWN = 10


async def next_up(store: Store, queue: str, lanes: Sequence[LaneReading]) -> list[dict[str, Any]]:
    """The jobs that start next, in the estimated order: at most `SHOWN`, fewer where others may come between."""
    heads = [lane for lane in lanes if lane.pending and not lane.terms.paused][:HEADS]
    pages = await asyncio.gather(
        *(store.lane_line(queue, lane.lane, limit=SHOWN, cursor=WAITING_LINE) for lane in heads)
    )
    newest = await store.find(Filter(queue=queue), limit=NEWEST)
    candidates: dict[str, dict[str, Any]] = {}
    for page in pages:
        for job in page.jobs:
            if job.state is JobState.PENDING:
                candidates[job.id] = _candidate(job.id, job.task, page.lane, job.priority, job.enqueued_at)
    for found in [job for job in newest.jobs if job.state is JobState.PENDING][:AMONG_NEWEST]:
        candidates.setdefault(found.id, _candidate(found.id, found.task, found.lane, found.priority, found.enqueued_at))
    known = [
        each
        for each in await store.positions(list(candidates))
        if each is not None and each.gate is not Gate.LANE_PAUSED
    ]
    return [
        candidates[each.id] | {"why": each.why(), "eta": each.eta(), "ahead": each.queue_ahead}
        for each in list(_without_gap(known))[:SHOWN]
    ]


def _without_gap(known: list[JobPosition]) -> Iterator[JobPosition]:
    """The candidates in order, up to the first before which there are jobs that are no candidates."""
    known.sort(key=lambda each: (each.queue_ahead, each.place or 0))
    for each in known:
        # Jobs of several lanes whose turn is the same have the same number of jobs ahead.
        up_to = sum(other.queue_ahead <= each.queue_ahead for other in known)
        if each.queue_ahead >= min(SHOWN, up_to):
            return
        yield each


def _candidate(id: str, task: str, lane: str | None, priority: Priority, enqueued_at: float) -> dict[str, Any]:
    return {"id": id, "task": task, "lane": lane, "priority": priority.label, "enqueued_at": enqueued_at}
