"""Schedules: when the next slot is, and which missed slots still fire. Pure: the caller passes the time.

The slots of a schedule are fixed instants, so two managers compute the same slots, and the id of a job, made of
schedule and slot, is enough to keep it from being stored twice.
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
"""All slots missed within this time fire; of older ones only the latest."""
FORGOTTEN_SECONDS = 86_400.0
"""A schedule that no live worker has declared for this long stops."""
SET_BY_THE_SLOT = frozenset({"id", "cron", "run_at"})
"""Fields that a template does not contain."""


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
            # Multiply instead of adding up, so that every process computes the same floats. A product may be
            # rounded down, and then dividing a slot by the interval yields the number of the slot before it.
            for number in count(int(instant // self.every)):
                if (slot := number * self.every) > instant:
                    yield slot
        assert self.cron is not None
        # Slots are whole seconds. fromtimestamp rounds: rounding up to a slot would skip that slot.
        start = datetime.fromtimestamp(math.floor(instant), _zone(self.timezone))
        for moment in CronSim(self.cron, start):
            slot = moment.astimezone(UTC).timestamp()
            # When daylight saving time ends, the local start hour occurs twice.
            if slot > instant:
                yield slot

    def next_after(self, instant: float) -> float | None:
        """Return the first slot later than `instant`; None when there is none."""
        return next(self.after(instant), None)

    def due(self, since: float, now: float) -> list[float]:
        """Return the slots in ``(since, now]`` that fire: all of the last minute, and the latest of any older ones.

        `since` is the last slot that fired, or the moment the schedule was first stored.
        """
        recent = list(_until(self.after(max(since, now - CATCH_UP_SECONDS)), now))
        older = self._latest(since, now - CATCH_UP_SECONDS)
        return recent if older is None else [older, *recent]

    def _latest(self, since: float, until: float) -> float | None:
        """Return the last slot in ``(since, until]``, by bisection: a long outage costs little."""
        latest = None
        slot = self.next_after(since)
        while slot is not None and slot <= until:
            latest = slot
            middle = (latest + until) / 2
            slot = self.next_after(middle)
            if slot is None or slot > until:
                # No slot in the later half: continue in the earlier one.
                until = middle
                slot = self.next_after(latest)
        return latest


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A declared schedule: which job to enqueue, and when."""

    name: str
    timetable: Timetable
    job: bytes
    """The template of the job, so that a manager needs none of the user's code; see `template_of`. Opaque to stores."""

    def __post_init__(self) -> None:
        check_name("schedule", self.name)


class StoredSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it is stored."""

    schedule: Schedule
    stored_at: float
    declared_at: float
    last_slot: float | None
    now: float
    """The store's clock when the schedule was read."""

    def due(self, now: float) -> list[float]:
        """Return the slots that fire now; none if the schedule has not been declared for a day."""
        if now - self.declared_at > FORGOTTEN_SECONDS:
            return []
        since = self.stored_at if self.last_slot is None else max(self.last_slot, self.stored_at)
        # If the last slot was fired by a clock that was ahead, the schedule must not pause until that time.
        return self.schedule.timetable.due(min(since, now), now)

    def next_slot(self, now: float) -> float | None:
        """Return the first slot after `now` that would fire; None if the schedule has not been declared for a day."""
        return None if now - self.declared_at > FORGOTTEN_SECONDS else self.schedule.timetable.next_after(now)


def template_of(job: NewJob) -> bytes:
    """Return the template of a schedule that repeats `job`.

    Every field is stored, so that a default that changes later does not change what was declared.
    """
    if job.kind not in (JobKind.JOB, JobKind.BROADCAST):
        raise InvalidInput("job", f"a {job.kind.value} cannot be repeated by a schedule")
    if job.run_at is not None:
        raise InvalidInput("run_at", "is set by the schedule; leave it out")
    fields = {field: getattr(job, field) for field in job.__struct_fields__ if field not in SET_BY_THE_SLOT}
    return msgspec.json.encode(fields)


def slot_id(schedule: str, slot: float) -> str:
    """Return the id of the job of one slot."""
    named = f"{slot:.0f}" if float(slot).is_integer() else repr(slot)
    return f"cron:{schedule}:{named}"


def job_from(template: bytes, schedule: str, slot: float) -> NewJob:
    """Return the job of one slot. Raises `InvalidInput` for an invalid template."""
    try:
        fields = msgspec.json.decode(template, type=dict[str, object])
        fields |= {"id": slot_id(schedule, slot), "cron": {"schedule": schedule, "slot": slot}}
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
