"""Listings for operators and tenants: a lane's jobs in the order in which they start, lanes, and grouped failures."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..error_text import error_summary
from ..errors import InvalidInput
from . import names
from .job import JobState, Priority, Reason
from .reading import LaneReading


class LaneJob(msgspec.Struct, frozen=True, kw_only=True):
    """A running or waiting job of a lane."""

    id: str
    task: str
    state: JobState
    """`running`, `pending`, or `scheduled` for a retry that keeps its place in an ordered lane."""
    priority: Priority
    enqueued_at: float
    attempt: int
    """Charged runs so far, including the current one."""
    started_at: float | None = None
    """When its current run began; None for a waiting job."""
    place: int | None = None
    """1 for the next of the waiting jobs; None for a running job."""

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self.state is JobState.RUNNING


class LanePage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of a lane: the running ones, oldest run first, then the waiting ones in the order in which they start."""

    queue: str
    lane: str | None
    ordered: bool
    """Whether the lane is ordered by arrival alone; otherwise by class, then arrival."""
    jobs: tuple[LaneJob, ...]
    cursor: str | None
    """Continues after the last job; None at the end. Places continue from the previous page."""
    exact: bool = True
    """False when jobs may be missing: more jobs wait behind gates than were examined, or the lane's settings are
    changing at this moment."""


class LineRow(msgspec.Struct, frozen=True):
    """A job of a lane as a store returns it."""

    seq: int
    id: str
    task: str
    state: JobState
    class_: int
    enqueued_at: float
    attempt: int
    started_at: float | None
    arrival: int | None


class LineCursor(msgspec.Struct, frozen=True):
    """Where a page of a lane ends: among the running jobs, or among the waiting ones."""

    waiting: bool = False
    first: float = -1.0
    """Running: when the last job of the page started. Waiting: its rank, which is its class in an unordered lane."""
    second: int = -1
    """Running: the number of that job. Waiting: its arrival."""
    place: int = 0

    @classmethod
    def read(cls, text: str | None) -> LineCursor:
        """Parse the cursor of a page."""
        if text is None:
            return cls()
        try:
            if len(text) > 80 or not text.isascii():
                raise ValueError
            kind, first, second, place = text.split("_")
            found = cls(kind == "w", float(first), int(second), int(place))
        except ValueError:
            raise InvalidInput("cursor", "is not a cursor that a page returned") from None
        if (
            kind not in ("r", "w")
            or not -1 <= found.first < 1e12
            or not (-1 <= found.second < 2**62 > found.place >= 0)
        ):
            raise InvalidInput("cursor", "is not a cursor that a page returned")
        return found

    @property
    def text(self) -> str:
        """The cursor as a page returns it."""
        return f"{'w' if self.waiting else 'r'}_{self.first!r}_{self.second}_{self.place}"

    def after(self, class_: int, *, ordered: bool) -> int | None:
        """The arrival after which the waiting jobs of a class continue; None when all of them are on earlier pages."""
        rank = 0 if ordered else class_
        if not self.waiting or rank > self.first:
            return -1
        return self.second if rank == self.first else None


WAITING_LINE = LineCursor(waiting=True).text
"""The cursor at which the waiting jobs of a lane begin, however many run."""


def check_lane(queue: str, lane: str | None) -> None:
    """Validate a queue and one of its lanes."""
    names.check_name("queue", queue)
    if lane is not None:
        names.check_key("lane", lane)


def line_page(
    queue: str,
    lane: str | None,
    rows: Iterable[LineRow],
    cursor: LineCursor,
    *,
    ordered: bool,
    limit: int,
    exact: bool = True,
) -> LanePage:
    """Build a page from rows that contain at least the next `limit` + 1 jobs; duplicates are allowed."""
    found = []
    for row in {row.seq: row for row in rows}.values():
        if row.state is JobState.RUNNING:
            key = LineCursor(False, row.started_at or 0.0, row.seq)
        elif row.arrival is None:
            continue
        else:
            key = LineCursor(True, 0.0 if ordered else float(row.class_), row.arrival)
        if (key.waiting, key.first, key.second) > (cursor.waiting, cursor.first, cursor.second):
            found.append((key, row))
    found.sort(key=lambda each: (each[0].waiting, each[0].first, each[0].second))
    jobs = []
    place = cursor.place
    for key, row in found[:limit]:
        place += key.waiting
        jobs.append(
            LaneJob(
                id=row.id,
                task=row.task,
                state=row.state,
                priority=Priority(row.class_),
                enqueued_at=row.enqueued_at,
                attempt=row.attempt,
                started_at=row.started_at if row.state is JobState.RUNNING else None,
                place=place if key.waiting else None,
            )
        )
    last = msgspec.structs.replace(found[limit - 1][0], place=place).text if len(found) > limit else None
    return LanePage(queue=queue, lane=lane, ordered=ordered, jobs=tuple(jobs), cursor=last, exact=exact)


MOST_FAILURES = 5_000
"""The newest failed jobs that `failures` examines: its cost does not grow with their number."""
ERROR_TAIL = names.ERROR_BYTES
"""Bytes at the end of an error in which the line that names it is searched: all of what is stored."""
LONGEST_LINE = 500


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Failed jobs of one task and error group that retention still keeps."""

    task: str
    error_group: str
    count: int
    first_at: float
    """When the first of them failed."""
    last_at: float
    reason: Reason
    """The reason of the newest job."""
    example_id: str
    """The id of the newest job."""
    error_line: str | None
    """The line of its error that names it, at most 500 characters."""
    exact: bool = True
    """False when more jobs failed than were examined: `count` is a lower bound, and the first failure may be older."""

    @classmethod
    def of(cls, row: Sequence[Any], *, exact: bool) -> FailureGroup:
        """Build a group from a row: the fields in order, with the end of the error in place of its line."""
        task, group, count, first_at, last_at, reason, example_id, error = row
        return cls(
            task=task,
            error_group=group,
            count=count,
            first_at=float(first_at),
            last_at=float(last_at),
            reason=Reason(reason),
            example_id=example_id,
            error_line=error_line(error),
            exact=exact,
        )


def error_line(text: str | None) -> str | None:
    """The line of an error that names it, shortened."""
    summary = error_summary(text)
    return None if summary is None else summary[:LONGEST_LINE]


def check_failures(queue: str | None, task: str | None) -> None:
    """Validate the filters of `failures`."""
    for field, value in (("queue", queue), ("task", task)):
        if value is not None:
            names.check_name(field, value)


def largest_first(groups: Iterable[FailureGroup], limit: int) -> list[FailureGroup]:
    """Return the `limit` largest groups; of equally large ones the latest first."""
    return sorted(groups, key=lambda each: (-each.count, -each.last_at, each.task, each.error_group))[:limit]


LANES_PAGED = 2_000
"""How many lanes of a long queue can be paged through on stores that sample lanes."""


class LaneListing(list[LaneReading]):
    """Lanes of a queue that have work, the longest backlog first: a list with the cursor of the next page."""

    def __init__(self, lanes: Iterable[LaneReading] = (), cursor: str | None = None, *, exact: bool = True) -> None:
        super().__init__(lanes)
        self.cursor = cursor
        """Continues after the last lane; None at the end."""
        self.exact = exact
        """False where lanes were sampled: a lane may be missing from the pages, or appear on two of them."""


class LanesCursor(msgspec.Struct, frozen=True, array_like=True):
    """Where a page of lanes ends."""

    pending: int
    running: int
    lane: str
    """'' for the jobs without a lane."""
    shown: int
    """Lanes on this page and on those before it."""

    @classmethod
    def read(cls, text: str | None) -> LanesCursor | None:
        """Parse the cursor of a page."""
        if text is None:
            return None
        try:
            if len(text) > 2_000:
                raise ValueError
            found = msgspec.json.decode(urlsafe_b64decode(text.encode("ascii")), type=cls)
        except (ValueError, msgspec.MsgspecError):
            raise InvalidInput("cursor", "is not a cursor that a page returned") from None
        if not all(0 <= number < 2**31 for number in (found.pending, found.running, found.shown)):
            raise InvalidInput("cursor", "is not a cursor that a page returned")
        return found

    @property
    def text(self) -> str:
        """The cursor as a page returns it."""
        return urlsafe_b64encode(msgspec.json.encode(self)).decode()


def lane_order(pending: int, running: int, lane: str | None) -> tuple[int, int, str]:
    """The sort key of lanes: the longest backlog first, then the busiest, then by name."""
    return (-pending, -running, lane or "")


def comes_after(cursor: LanesCursor | None, pending: int, running: int, lane: str | None) -> bool:
    """Whether a lane sorts after the end of a page."""
    if cursor is None:
        return True
    return lane_order(pending, running, lane) > lane_order(cursor.pending, cursor.running, cursor.lane)


def lanes_page(
    lanes: Sequence[LaneReading], cursor: LanesCursor | None, limit: int, *, exact: bool = True
) -> LaneListing:
    """Build a page from the next `limit` + 1 lanes, in order."""
    page, last = lanes[:limit], None
    shown = len(page) + (0 if cursor is None else cursor.shown)
    if len(lanes) > limit and (exact or shown < LANES_PAGED):
        end = page[-1]
        last = LanesCursor(end.pending, end.running, end.lane or "", shown).text
    if cursor is None and exact and len(page) == len(lanes):
        page = with_shares(page)
    return LaneListing(page, last, exact=exact)


def with_shares(lanes: Sequence[LaneReading]) -> list[LaneReading]:
    """Return all lanes of a queue, each with its share."""
    weights = [0.0 if lane.terms.paused or not lane.pending else lane.terms.weight for lane in lanes]
    whole = sum(weights) or 1.0
    return [msgspec.structs.replace(lane, share=own / whole) for lane, own in zip(lanes, weights, strict=True)]
