"""Listings: the lanes of a queue, the jobs of a lane in order, and failed jobs by group.

The cost of a listing depends on what it shows, not on the number of jobs. A queue with few waiting jobs is counted
completely. In a longer one, the longest lanes are those with most jobs in a sample, and those with running jobs; each
is counted up to a limit, and the length of a longer lane is estimated from its share of the sample.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec

from ...errors import NotFound
from ...model import listings
from ...model.lanes import terms
from ...model.listings import (
    ERROR_TAIL,
    FailureGroup,
    LaneListing,
    LanePage,
    LanesCursor,
    LineCursor,
    LineRow,
    comes_after,
    lane_order,
    lanes_page,
    largest_first,
    line_page,
)
from ...model.names import shown
from ...model.reading import COUNTED_WHOLE, LaneReading
from ..codes import STATES
from ..shared.stored_settings import read_settings
from .reading import View, waited_seconds

WINDOWS = 200
"""Number of seq ranges in a sample, spread over all active jobs."""
WINDOW = 10
"""Length of each range."""
COUNTED = 20_000
"""Most jobs that are counted in all."""
COUNTED_OF_EACH = 50
"""Jobs of each lane that are counted in any case."""
ENOUGH = 10
"""Jobs of a lane in a sample that are enough to estimate its share."""
ALL = -1

_rng = Random()


def lanes(view: View, queue: str, limit: int, cursor: LanesCursor | None) -> LaneListing:
    """Return the lanes of a queue that have jobs."""
    for number, (name, _, stored) in view.settings().items():
        if name == queue:
            rows, exact = backlogs(view, number, limit + 1, cursor)
            gated = {
                lane: (arrival, seq) for lane, arrival, seq in view.all("oldest_gated_of_lanes", number, COUNTED_WHOLE)
            }
            found = [
                LaneReading(
                    queue=queue,
                    lane=lane,
                    terms=terms(stored.settings, lane),
                    pending=pending,
                    running=running,
                    exact=counted,
                    oldest_wait=_oldest_of_lane(view, number, lane or "", gated),
                )
                for lane, pending, running, counted in rows
            ]
            return lanes_page(found, cursor, limit, exact=exact)
    raise NotFound(f"there is no queue {queue!r}")


def _oldest_of_lane(view: View, queue: int, lane: str, gated: dict[str, tuple[int, int]]) -> float | None:
    found = [tuple(row) for row in view.all("oldest_of_lane", queue, lane)]
    if lane in gated:
        found.append(gated[lane])
    return waited_seconds(view, min(found)[1]) if found else None


def backlogs(
    view: View, queue: int, limit: int, cursor: LanesCursor | None
) -> tuple[list[tuple[str | None, int, int, bool]], bool]:
    """Return the longest lanes of a queue after the cursor, and whether all lanes were looked at.

    For each: its key, its waiting jobs, its running jobs, and whether the former is exact.
    """
    running: Counter[str] = Counter()
    for lane, count in view.all("backlog_running", queue):
        running[lane] += count
    [waiting] = view.one("backlog_sum", queue)
    sample: dict[str, int] = {}
    if waiting <= COUNTED_WHOLE:
        lanes = {lane for (lane,) in view.all("backlog_lanes", queue, ALL)}
        most = ALL
    else:
        sample = _sample(view, queue)
        looked_at = limit + (0 if cursor is None else cursor.shown)
        lanes = set(list(sample)[:looked_at]) | set(running)
        if len(sample) < looked_at:
            # Short lanes may be missing from the sample.
            lanes.update(lane for (lane,) in view.all("backlog_lanes", queue, looked_at))
        most = max(COUNTED_OF_EACH, COUNTED // max(1, len(lanes)))
    counts = Counter({lane: view.one("backlog_of_lane", queue, lane, most)[0] for lane in lanes})
    for lane, count in view.all("backlog_gated", queue, COUNTED_WHOLE):
        counts[lane] += count
    scale = waiting / max(1, sum(sample.values()))
    found = []
    for lane in counts.keys() | running.keys():
        pending, seen = counts[lane], sample.get(lane, 0)
        exact = most == ALL or pending < most
        if not exact and seen >= ENOUGH:
            pending = max(pending, round(scale * seen))
        if (pending or running[lane]) and comes_after(cursor, pending, running[lane], lane):
            found.append((lane or None, pending, running[lane], exact))
    found.sort(key=lambda row: lane_order(row[1], row[2], row[0]))
    return found[:limit], most == ALL


def _sample(view: View, queue: int) -> dict[str, int]:
    """Return the lanes of a sample of the waiting jobs with their number of jobs, the most frequent first."""
    first, last = view.one("backlog_range")
    step = (last - first + 1) / WINDOWS
    starts = [first + int((number + _rng.random()) * step) for number in range(WINDOWS)]
    return dict(view.all("backlog_sample", msgspec.json.encode(starts).decode(), WINDOW, queue))


def lane_line(view: View, queue: str, lane: str | None, limit: int, cursor: LineCursor) -> LanePage:
    """Return a page of the jobs of a lane, in the order in which they start."""
    row = view.one("queue_by_name", queue)
    if row is None:
        raise NotFound(f"there is no queue {shown(queue)}")
    number, _, _, declared, override = row
    settings = read_settings(queue, declared, override).settings
    ordered = lane is not None and terms(settings, lane).ordered
    rows: list[Any] = [] if cursor.waiting else view.all("line_running", number, lane)
    exact = True
    afters = [cursor.after(class_, ordered=ordered) for class_ in range(3)]
    for flow, class_ in view.all("flows_of_lane", number, lane or ""):
        after = afters[class_]
        if after is not None:
            rows += view.all("line_ready", flow, after, limit + 1)
    limited = None if lane is None else view.one("lane_by_key", number, lane)
    if limited is None:
        rows += view.all("line_gated", number, lane, COUNTED_WHOLE)
        exact = view.one("line_gated_count", number, COUNTED_WHOLE)[0] < COUNTED_WHOLE
    else:
        # In an ordered lane every rank is 0.
        for rank, after in enumerate(afters[:1] if ordered else afters):
            if after is not None:
                rows += view.all("line_waiting", limited[0], rank, after, limit + 1)
        rows += view.all("line_holding", limited[0])
    return line_page(queue, lane, map(_line_row, rows), cursor, ordered=ordered, limit=limit, exact=exact)


def _line_row(row: Any) -> LineRow:
    """Return the job of a row of `line_columns`."""
    seq, id, task, state, class_, enqueued_at, attempt, started_at, arrival = row
    return LineRow(seq, id, task, STATES[state], class_, enqueued_at, attempt, started_at, arrival)


def failures(view: View, queue: str | None, task: str | None, limit: int) -> list[FailureGroup]:
    """Return the largest groups of failed jobs, among the newest ones."""
    most = listings.MOST_FAILURES
    if queue is None:
        seqs = [seq for (seq,) in view.all("failed_newest", most + 1)]
    else:
        row = view.one("queue_by_name", queue)
        seqs = [] if row is None else [seq for (seq,) in view.all("failed_newest_of_queue", row[0], most + 1)]
    newest: dict[tuple[str, str], tuple[float, int, str]] = {}
    counts: dict[tuple[str, str], int] = {}
    firsts: dict[tuple[str, str], float] = {}
    for name, group, reason, finished_at, seq in view.all("failed_jobs", msgspec.json.encode(seqs[:most]).decode()):
        if task in (None, name):
            key = (name, group)
            counts[key] = counts.get(key, 0) + 1
            firsts[key] = min(finished_at, firsts.get(key, finished_at))
            newest[key] = max((finished_at, seq, reason), newest.get(key, (0.0, 0, "")))
    exact = len(seqs) <= most
    found = []
    for (name, group), (last_at, seq, reason) in newest.items():
        row = (name, group, counts[name, group], firsts[name, group], last_at, reason, str(seq), None)
        found.append(FailureGroup.of(row, exact=exact))
    return [_shown(view, each) for each in largest_first(found, limit)]


def _shown(view: View, group: FailureGroup) -> FailureGroup:
    """Return a group with its example job, whose seq stood for its id."""
    id, error = view.one("failed_example", int(group.example_id), ERROR_TAIL)
    return msgspec.structs.replace(group, example_id=id, error_line=listings.error_line(error))
