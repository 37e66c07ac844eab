"""The positions of waiting jobs, computed from what the server counts in one call."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...model.reading import EXACT_PLACES, JobPosition
from ..positions import MANY_LANES, MOST_COUNTED, MOST_LANES, QueueSnapshot, WaitingJob, Worker, job_position
from ..shared.stored_settings import read_settings
from .reading import View, wanted


class _Queue(msgspec.Struct):
    id: int
    name: str
    declared: str
    override: str | None
    pending: tuple[int, int, int]
    busy: tuple[int, int, int]
    workers: list[Worker]
    seconds: float | None

    def snapshot(self) -> QueueSnapshot:
        return QueueSnapshot(
            name=self.name,
            settings=read_settings(self.name, self.declared, self.override).settings,
            pending=self.pending,
            busy=self.busy,
            workers=self.workers,
            seconds=self.seconds,
        )


class _Answer(msgspec.Struct):
    now: float
    queues: list[_Queue]
    jobs: list[WaitingJob]


_answer = msgspec.json.Decoder(_Answer)

MOST_PLACES = 5 * EXACT_PLACES
"""Places are counted up to this number. Counting reads a row for each; beyond it, a sample gives an estimate."""


async def read_positions(view: View, ids: Sequence[str]) -> list[JobPosition | None]:
    """The positions of jobs by id; None for jobs that do not wait and for unknown ids."""
    asked = wanted(ids)
    if not asked:
        return [None] * len(ids)
    limits = (MOST_PLACES, MOST_LANES, MOST_COUNTED, MANY_LANES)
    row = await view.one("read_positions", asked, *limits, view.now, view.lease)
    assert row is not None
    answer = _answer.decode(row[0])
    queues = {queue.id: queue.snapshot() for queue in answer.queues}
    found = {job.id: job_position(job, queues[job.queue], answer.now) for job in answer.jobs}
    return [found.get(id) for id in ids]
