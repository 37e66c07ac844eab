"""Repeating work: when the next slot is, and which missed ones still fire. Pure: the caller says what time it
is.

The slots of a schedule are fixed instants, so two managers that look at the same schedule see the same slots,
and one job per (schedule, slot) can be kept by its id alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError

from ..errors import InvalidInput
from .job import JobKind, NewJob
from .names import check_name, check_seconds, shown

CATCH_UP_SECONDS = 60.0
"""Slots missed for at most this long all fire; of older ones only the latest."""
FORGOTTEN_SECONDS = 86_400.0
"""A schedule that no live worker declared for this long stops."""
SET_BY_THE_SLOT = frozenset({"id", "cron", "run_at"})
"""What a template leaves open."""


class Timetable(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Either a cron expression in a time zone, or a fixed interval counted from 1970."""

    cron: str | None = None
    every: float | None = None
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.every is None):
            raise InvalidInput("cron", "give either a cron expression or every=seconds")
        if self.every is not None:
            check_seconds("every", self.every, least=1.0)
        zone = _zone(self.timezone)
        if self.cron is not None:
            if not isinstance(self.cron, str):
                raise InvalidInput("cron", f"must be text, not {type(self.cron).__name__}")
            try:
                CronSim(self.cron, datetime.fromtimestamp(0, zone))
            except (CronSimError, ValueError) as exc:
                raise InvalidInput("cron", f"{shown(self.cron)} is not a cron expression: {exc}") from None

    def after(self, instant: float) -> Iterator[float]:
        """The slots later than `instant`, in order. Empty when there is none in the next decades."""
        if self.every is not None:
            # From the count, not by adding up: slots must be the same numbers for everybody. A product may be
            # rounded down, and then the division of a slot by the interval names the slot before it.
            for number in count(int(instant // self.every)):
                if (slot := number * self.every) > instant:
                    yield slot
        assert self.cron is not None
        # Slots are whole seconds; fromtimestamp rounds, and could round up to a slot and so miss it.
        start = datetime.fromtimestamp(math.floor(instant), _zone(self.timezone))
        for moment in CronSim(self.cron, start):
            slot = moment.astimezone(UTC).timestamp()
            # A step back to winter time can show the local start hour twice.
            if slot > instant:
                yield slot

    def next_after(self, instant: float) -> float | None:
        """The first slot later than `instant`, None when there is none."""
        return next(self.after(instant), None)

    def due(self, since: float, now: float) -> list[float]:
        """The slots in ``(since, now]`` that fire: all of the last minute, and the latest of any older ones.

        `since` is the last slot that fired, or the moment the schedule was first stored.
        """
        recent = list(_until(self.after(max(since, now - CATCH_UP_SECONDS)), now))
        older = self._latest(since, now - CATCH_UP_SECONDS)
        return recent if older is None else [older, *recent]

    def _latest(self, since: float, until: float) -> float | None:
        """The last slot in ``(since, until]``: halves the span, so a year of silence costs little."""
        latest = None
        slot = self.next_after(since)
        while slot is not None and slot <= until:
            latest = slot
            middle = (latest + until) / 2
            slot = self.next_after(middle)
            if slot is None or slot > until:
                # None in the later half: what is left, if anything, lies between.
                until = middle
                slot = self.next_after(latest)
        return latest


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A declared repetition: which job to enqueue, when."""

    name: str
    timetable: Timetable
    job: bytes
    """The template of the job, so that a manager needs none of the user's code; see `template_of`. The store carries it
    and never reads it."""

    def __post_init__(self) -> None:
        check_name("schedule", self.name)


class StoredSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as the store knows it."""

    schedule: Schedule
    stored_at: float
    declared_at: float
    last_slot: float | None

    def due(self, now: float) -> list[float]:
        """The slots that fire now; none once nobody has declared the schedule for a day."""
        if now - self.declared_at > FORGOTTEN_SECONDS:
            return []
        since = self.stored_at if self.last_slot is None else max(self.last_slot, self.stored_at)
        # A slot that fired by a clock that was ahead must not silence the schedule until then.
        return self.schedule.timetable.due(min(since, now), now)

    def next_slot(self, now: float) -> float | None:
        """The first slot after `now` that would fire; None once nobody has declared the schedule for a day."""
        return None if now - self.declared_at > FORGOTTEN_SECONDS else self.schedule.timetable.next_after(now)


def template_of(job: NewJob) -> bytes:
    """The template of a schedule that repeats `job`. Every field is written, so that a default that changes later
    does not change what was declared.
    """
    if job.kind not in (JobKind.JOB, JobKind.BROADCAST):
        raise InvalidInput("job", f"a {job.kind.value} cannot be repeated by a schedule")
    if job.run_at is not None:
        raise InvalidInput("run_at", "the schedule says when the job runs; leave it out")
    fields = {field: getattr(job, field) for field in job.__struct_fields__ if field not in SET_BY_THE_SLOT}
    return msgspec.json.encode(fields)


def job_from(template: bytes, schedule: str, slot: float) -> NewJob:
    """The job of one slot. Raises `InvalidInput` for a template that is not one."""
    named = f"{slot:.0f}" if float(slot).is_integer() else repr(slot)
    try:
        fields = msgspec.json.decode(template, type=dict[str, object])
        fields |= {"id": f"cron:{schedule}:{named}", "cron": {"schedule": schedule, "slot": slot}}
        return msgspec.convert(fields, NewJob)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput("template", f"is not the template of a job ({exc})") from None


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise InvalidInput("timezone", f"{shown(name)} is not a known time zone, such as 'Europe/Berlin'") from None


def _until(slots: Iterator[float], last: float) -> Iterator[float]:
    for slot in slots:
        if slot > last:
            return
        yield slot
