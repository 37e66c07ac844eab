"""The feed of jobs that ended as failed or cancelled."""

from __future__ import annotations

from ...model.ended import EndedPage
from ..shared.rows import ended_of, position_of
from ..shared.stored_settings import readable
from .reading import View


def read_ended(view: View, after: str | None, limit: int) -> EndedPage:
    """Return the next failed and cancelled jobs. One writer at a time numbers them, so numbers are in commit order."""
    [last] = view.one("ending_get")
    number = last if after is None else position_of(after)
    if number > last:
        # The file is an earlier copy of the one that the cursor is from.
        number = 0
    rows = view.all("ended_after", number, limit + 1)
    page = rows[:limit]
    return EndedPage(
        jobs=tuple(readable("job that ended", lambda row: ended_of(row[1:]), page)),
        cursor=str(page[-1][0] if page else number),
        more=len(rows) > limit,
    )
