"""A lane's jobs in the order in which they start, at a cost that depends on the page and on what runs."""

from __future__ import annotations

from typing import Any

from ...errors import NotFound
from ...model.lanes import terms
from ...model.listings import LanePage, LineCursor, LineRow, line_page
from ...model.names import shown
from ...model.reading import COUNTED_WHOLE
from ..codes import STATES
from ..shared.stored_settings import read_settings
from .reading import View


def lane_line(view: View, queue: str, lane: str | None, limit: int, cursor: LineCursor) -> LanePage:
    """A page of a lane's line."""
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
    return line_page(queue, lane, map(row_of, rows), cursor, ordered=ordered, limit=limit, exact=exact)


def row_of(row: Any) -> LineRow:
    """A job as `line_columns` has it."""
    seq, id, task, state, class_, enqueued_at, attempt, started_at, arrival = row
    return LineRow(seq, id, task, STATES[state], class_, enqueued_at, attempt, started_at, arrival)
