"""How long the lanes of a queue are, at a cost that depends on the lanes asked for and not on the jobs.

A queue with few waiting jobs is counted whole. Of a longer one the longest lanes are those that most jobs of a sample
are in, and the lanes of jobs that run; each is counted only so far, and what is longer is estimated by its share of the
sample.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import msgspec

from ...model.listings import LanesCursor, comes_after, lane_order
from ...model.reading import COUNTED_WHOLE

if TYPE_CHECKING:
    from .reading import View

WINDOWS = 200
"""Ranges of numbers that a sample takes, spread over all live jobs."""
WINDOW = 10
COUNTED = 20_000
"""Jobs that are counted in all."""
COUNTED_OF_EACH = 50
"""Jobs of one lane that are counted at least."""
ENOUGH = 10
"""Jobs of a lane in a sample that its share can be told by."""
ALL = -1

_rng = Random()


def backlogs(
    view: View, queue: int, limit: int, cursor: LanesCursor | None
) -> tuple[list[tuple[str | None, int, int, bool]], bool]:
    """The longest lanes of a queue after a place in that order: the key, what waits, what runs, and whether the former
    was counted to the end. And whether all lanes were looked at."""
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
            # Short lanes may be missing in the sample.
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
    """Lanes of some of the waiting jobs, with how many of those are theirs, the most first."""
    first, last = view.one("backlog_range")
    step = (last - first + 1) / WINDOWS
    starts = [first + int((number + _rng.random()) * step) for number in range(WINDOWS)]
    return dict(view.all("backlog_sample", msgspec.json.encode(starts).decode(), WINDOW, queue))
