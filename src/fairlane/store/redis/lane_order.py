"""A lane's jobs in the order in which they start, at a cost that depends on the page and on what runs."""

from __future__ import annotations

from ...model.listings import LanePage, LineCursor, LineRow, line_page
from ..codes import STATES
from .encoding import TIME, decode, encode
from .functions import Functions


async def lane_line(functions: Functions, queue: str, lane: str | None, limit: int, cursor: LineCursor) -> LanePage:
    """A page of a lane's line."""
    # Where each class goes on depends on whether the lane has an order; where it has, the first of these counts.
    afters = [cursor.after(class_, ordered=False) for class_ in range(3)]
    asked = {
        "running": not cursor.waiting,
        "after": [False if after is None else after for after in afters],
        "count": limit + 1,
    }
    about, parts = await functions.call_for_parts("lane_line", queue, lane or "", encode(asked))
    rows = []
    for record, came in zip(parts[::2], parts[1::2], strict=True):
        seq, id, task, state, class_, attempt, started_at, arrival = decode(record)
        enqueued_at = TIME.unpack(came)[0] if len(came) == TIME.size else 0.0
        place = None if arrival is False else int(arrival)
        started = None if started_at is False else float(started_at)
        rows.append(LineRow(int(seq), id, task, STATES[state], class_, enqueued_at, attempt, started, place))
    return line_page(queue, lane, rows, cursor, ordered=about["ordered"], limit=limit, exact=about["exact"])
