"""The scheduler makes one job for each slot of each schedule. The job's id names the slot, so that however many
schedulers look, and however often, a slot fires once.

A template that cannot be read and a job that is refused are told once and tried again; the other schedules go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from ..errors import Conflict, FairlaneError, InvalidInput, Stale, StoreError
from ..model.job import MOST_JOBS_PER_CALL, CronSlot, NewJob
from ..model.schedule import StoredSchedule, Timetable, job_from
from .leader_context import LeaderContext, log

UNREAD_REST = 0.05
"""Until the rescuer's first pass has read the store's clock."""
SHORTEST_REST = 0.01
IDLE_FACTOR = 5
"""Without schedules there is only the first one to wait for, and it catches up what it missed."""


class Scheduler:
    """Fires the slots that are due by the store's clock, which the rescuer reads for it."""

    name = "scheduler"

    def __init__(self, context: LeaderContext) -> None:
        self._context = context
        # The last slot of each schedule that has its job: the store does not note one whose job was a duplicate.
        self._answered: dict[str, float] = {}
        self._troubles: dict[str, str] = {}

    async def run_once(self) -> float:
        context = self._context
        with context.contact.call():
            stored = await context.store.declare([])
        if not stored:
            return IDLE_FACTOR * context.intervals.schedule
        now = context.clock.now()
        if now is None:
            return min(UNREAD_REST, context.intervals.schedule)
        jobs: list[NewJob] = []
        rest = context.intervals.schedule
        for each in stored:
            made, following = self._look(each, now)
            jobs += made
            if following is not None:
                rest = min(rest, max(following - now, SHORTEST_REST))
        for start in range(0, len(jobs), MOST_JOBS_PER_CALL):
            await self._fire(jobs[start : start + MOST_JOBS_PER_CALL])
        return rest

    def _look(self, stored: StoredSchedule, now: float) -> tuple[list[NewJob], float | None]:
        """The jobs of the slots that are due, and the slot after them."""
        schedule = stored.schedule
        since = min(now, max(stored.stored_at, stored.last_slot or 0.0, self._answered.get(schedule.name, 0.0)))
        following = _first_slot(schedule.timetable, since)
        if following is None or following > now:
            return [], following
        due = msgspec.structs.replace(stored, last_slot=since).due(now)
        if not due:
            # Nobody declares it any more.
            return [], None
        try:
            jobs = [job_from(schedule.job, schedule.name, slot) for slot in due]
        except InvalidInput as exc:
            self._tell(schedule.name, exc)
            return [], None
        return jobs, _first_slot(schedule.timetable, due[-1])

    async def _fire(self, jobs: Sequence[NewJob]) -> None:
        """All in one call; if one is refused, one by one, so that it stops no other schedule."""
        try:
            await self._enqueue(jobs)
            return
        except (StoreError, Stale):
            raise
        except FairlaneError:
            refused: set[str] = set()
        for job in jobs:
            slot = _slot_of(job)
            # A later slot that fired would make the store forget the refused one before it.
            if slot.schedule in refused:
                continue
            try:
                await self._enqueue([job])
            except (StoreError, Stale):
                raise
            except Conflict:
                # Another manager fired it while the template was being changed.
                self._fired(slot)
            except FairlaneError as exc:
                refused.add(slot.schedule)
                self._tell(slot.schedule, exc)

    async def _enqueue(self, jobs: Sequence[NewJob]) -> None:
        with self._context.contact.call():
            answers = await self._context.store.enqueue(jobs)
        self._context.counts["fired"] += sum(answer.created for answer in answers)
        for job in jobs:
            self._fired(_slot_of(job))

    def _fired(self, slot: CronSlot) -> None:
        self._answered[slot.schedule] = max(slot.slot, self._answered.get(slot.schedule, 0.0))
        if self._troubles.pop(slot.schedule, None) is not None:
            log.info("schedule %s: fires again", slot.schedule)

    def _tell(self, schedule: str, exc: FairlaneError) -> None:
        kind = type(exc).__name__
        if self._troubles.get(schedule) != kind:
            self._troubles[schedule] = kind
            log.error("schedule %s: its job was refused, trying again (%s)", schedule, exc)


def _slot_of(job: NewJob) -> CronSlot:
    assert job.cron is not None
    return job.cron


@lru_cache(maxsize=4096)
def _first_slot(timetable: Timetable, since: float) -> float | None:
    """Remembered, because every pass asks it of every schedule, and a cron expression takes 50 µs to follow."""
    return timetable.next_after(since)
