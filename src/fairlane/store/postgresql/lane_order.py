"""A lane's jobs in the order in which they start, at a cost that depends on the page and on what runs."""

from __future__ import annotations

import msgspec

from ...errors import NotFound
from ...model.lanes import terms
from ...model.listings import LanePage, LineCursor, LineRow, line_page
from ...model.names import shown
from ...model.reading import COUNTED_WHOLE
from ..codes import STATES
from ..shared.stored_settings import read_settings
from .reading import View

_rows = msgspec.json.Decoder(list[tuple[int, str, str, int, int, float, int, float | None, int | None]])


async def lane_line(view: View, queue: str, lane: str | None, limit: int, cursor: LineCursor) -> LanePage:
    """A page of a lane's line."""
    rank, after = (int(cursor.first), cursor.second) if cursor.waiting else (-1, -1)
    row = await view.one("read_lane_line", queue, lane, not cursor.waiting, rank, after, limit + 1, COUNTED_WHOLE)
    if row is None:
        raise NotFound(f"there is no queue {shown(queue)}")
    declared, override, jobs, exact = row
    settings = read_settings(queue, declared, override).settings
    rows = [
        LineRow(seq, id, task, STATES[state], class_, enqueued_at, attempt, started_at, arrival)
        for seq, id, task, state, class_, enqueued_at, attempt, started_at, arrival in (
            () if jobs is None else _rows.decode(jobs)
        )
    ]
    ordered = lane is not None and terms(settings, lane).ordered
    return line_page(queue, lane, rows, cursor, ordered=ordered, limit=limit, exact=exact)
