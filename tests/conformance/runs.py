"""Longer stories told with a kit: a backlog, and a worker that starts and completes one job after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fairlane.model.job import Claimed, Job, JobState, NewJob
from fairlane.model.reading import Filter

from .kit import Kit, Worker


def bulk(kit: Kit, lane: str | None, count: int, **fields: Any) -> list[NewJob]:
    """`count` requests for one lane."""
    return [kit.new(lane=lane, **fields) for _ in range(count)]


async def run(worker: Worker, starts: int, *, batch: int = 1) -> list[Claimed]:
    """Start and complete exactly `starts` jobs, `batch` at a time. Returns them in that order."""
    ran: list[Claimed] = []
    while len(ran) < starts:
        claimed = await worker.claim(min(batch, starts - len(ran)))
        assert claimed, f"nothing to start after {len(ran)} of {starts}"
        ran += claimed
        await worker.complete(*claimed)
    return ran


async def drain(worker: Worker, *, batch: int = 100) -> list[str]:
    """Start and complete all jobs. Returns the ids in the order of their starts."""
    ran: list[str] = []
    while claimed := await worker.claim(batch):
        ran += [job.id for job in claimed]
        await worker.complete(*claimed)
    return ran


def lanes_of(jobs: Iterable[Claimed]) -> list[str]:
    """The lane of each job, empty text for none."""
    return [job.lane or "" for job in jobs]


async def everything(kit: Kit, **where: Any) -> list[Job]:
    """Every job that a filter finds, page by page."""
    found: list[Job] = []
    cursor: str | None = None
    while True:
        page = await kit.store.find(Filter(**where), limit=500, cursor=cursor)
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            return found


async def running(kit: Kit, **where: Any) -> list[str]:
    """The ids of the running jobs that a filter finds, in the order of their arrival."""
    jobs = await everything(kit, state=JobState.RUNNING, **where)
    return [job.id for job in sorted(jobs, key=lambda job: job.arrival or 0)]
