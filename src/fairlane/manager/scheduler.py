"""The scheduler enqueues one job for each slot of each schedule. The job's id names the slot, so a slot fires once,
however many schedulers run and however often.

A template that cannot be read and a job that is rejected are logged once and tried again; other schedules continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from ..errors import Conflict, FairlaneError, InvalidInput, Stale, StoreError
from ..model.job import MOST_JOBS_PER_CALL, CronSlot, NewJob
from ..model.schedule import StoredSchedule, Timetable, job_from
from .leader_context import LeaderContext, log

SHORTEST_REST = 0.01
IDLE_FACTOR = 5
"""How much longer to rest without schedules. The first one that is declared catches up with the slots it missed."""


class Scheduler:
    """Fires the slots that are due by the store's clock."""

    name = "scheduler"

    def __init__(self, context: LeaderContext) -> None:
        self._context = context
        # The last slot of each schedule that has fired: the store does not record one whose job was a duplicate.
        self._answered: dict[str, float] = {}
        self._logged: dict[str, str] = {}

    async def run_once(self) -> float:
        context = self._context
        with context.contact.call():
            stored = await context.store.declare([])
        if not stored:
            return IDLE_FACTOR * context.intervals.schedule
        now = stored[0].now
        jobs: list[NewJob] = []
        rest = context.intervals.schedule
        for each in stored:
            made, following = self._due_jobs(each, now)
            jobs += made
            if following is not None:
                rest = min(rest, max(following - now, SHORTEST_REST))
        for start in range(0, len(jobs), MOST_JOBS_PER_CALL):
            await self._fire(jobs[start : start + MOST_JOBS_PER_CALL])
        return rest

    def _due_jobs(self, stored: StoredSchedule, now: float) -> tuple[list[NewJob], float | None]:
        """The jobs of the slots that are due, and the time of the next slot."""
        schedule = stored.schedule
        since = min(now, max(stored.stored_at, stored.last_slot or 0.0, self._answered.get(schedule.name, 0.0)))
        following = _first_slot(schedule.timetable, since)
        if following is None or following > now:
            return [], following
        due = msgspec.structs.replace(stored, last_slot=since).due(now)
        if not due:
            # It was not declared for a day.
            return [], None
        try:
            jobs = [job_from(schedule.job, schedule.name, slot) for slot in due]
        except InvalidInput as exc:
            self._log_once(schedule.name, exc)
            return [], None
        return jobs, _first_slot(schedule.timetable, due[-1])

    async def _fire(self, jobs: Sequence[NewJob]) -> None:
        """Enqueue all in one call; if one is rejected, one by one, so that it stops no other schedule."""
        try:
            await self._enqueue(jobs)
            return
        except (StoreError, Stale):
            raise
        except FairlaneError:
            rejected: set[str] = set()
        for job in jobs:
            slot = _slot_of(job)
            # If a later slot fired, the store would skip the rejected one before it.
            if slot.schedule in rejected:
                continue
            try:
                await self._enqueue([job])
            except (StoreError, Stale):
                raise
            except Conflict:
                # Another manager fired it while the template was being changed.
                self._fired(slot)
            except FairlaneError as exc:
                rejected.add(slot.schedule)
                self._log_once(slot.schedule, exc)

    async def _enqueue(self, jobs: Sequence[NewJob]) -> None:
        with self._context.contact.call():
            answers = await self._context.store.enqueue(jobs)
        self._context.counts["fired"] += sum(answer.created for answer in answers)
        for job in jobs:
            self._fired(_slot_of(job))

    def _fired(self, slot: CronSlot) -> None:
        self._answered[slot.schedule] = max(slot.slot, self._answered.get(slot.schedule, 0.0))
        if self._logged.pop(slot.schedule, None) is not None:
            log.info("schedule %s: fires again", slot.schedule)

    def _log_once(self, schedule: str, exc: FairlaneError) -> None:
        kind = type(exc).__name__
        if self._logged.get(schedule) != kind:
            self._logged[schedule] = kind
            log.error("schedule %s: its job was rejected, trying again (%s)", schedule, exc)


def _slot_of(job: NewJob) -> CronSlot:
    assert job.cron is not None
    return job.cron


@lru_cache(maxsize=4096)
def _first_slot(timetable: Timetable, since: float) -> float | None:
    """Cached, because every pass computes it for every schedule, which takes 50 µs for a cron expression."""
    return timetable.next_after(since)
