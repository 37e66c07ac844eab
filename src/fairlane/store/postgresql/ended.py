"""The feed of jobs that ended as failed or cancelled.

Transactions do not become visible in the order of the times that they write. So a cursor is not a time: it names the
transactions that had ended when a page was read. Jobs that were ended by later transactions, or by one that was open
then, are on a later page, whatever their times are. The time only determines where the search in the index begins.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from math import isfinite

import msgspec

from ...errors import InvalidInput
from ...model.ended import EndedPage
from ..shared.rows import ended_of
from ..shared.stored_settings import readable
from .database import Record
from .reading import View

MARGIN_SECONDS = 60.0
"""A transaction writes the time at which its statement began, but gets its number only with its first write. This is
more than the time between the two, and more than a correction of the server's clock."""
EXAMINED_SECONDS = 60.0
"""How often a reader examines which transactions are open. In between, the search begins at the same time."""
LONGEST_OPEN_SECONDS = 3_600.0
"""How far back the first search of a reader begins if a transaction was open when the reader began."""


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """Which transactions were visible when a page was read."""

    since: float
    """Jobs that ended but were not visible yet have this time or a later one."""
    oldest: int
    """Every transaction with a lower number had ended."""
    newest: int
    """No transaction with this number or a higher one had ended."""
    examined_at: float
    """When the reader last examined which transactions were open."""
    last_given: int
    """No transaction had a higher number then."""


class EndedCursor(msgspec.Struct, frozen=True, array_like=True):
    """The end of a page. The pages of one pass together return the jobs that the snapshot `seen` did not show."""

    seen: Snapshot
    following: Snapshot | None = None
    """The snapshot of the first page of a pass that is not complete; the next pass returns what that snapshot did not
    show. Not the snapshot of a later page: a transaction that ends between two pages may belong on an earlier one."""
    finished_at: float = 0.0
    seq: int = -1

    @classmethod
    def read(cls, text: str) -> EndedCursor:
        """Parse the cursor of a page."""
        try:
            if len(text) > 1_000:
                raise ValueError
            found = msgspec.json.decode(urlsafe_b64decode(text.encode("ascii")), type=cls)
        except (ValueError, msgspec.MsgspecError):
            raise InvalidInput("cursor", "is not a cursor that a page returned") from None
        shots = [found.seen] if found.following is None else [found.seen, found.following]
        numbers = [found.seq + 1, *(number for shot in shots for number in (shot.oldest, shot.newest, shot.last_given))]
        times = [found.finished_at, *(time for shot in shots for time in (shot.since, shot.examined_at))]
        if not all(0 <= number < 2**62 for number in numbers) or not all(map(isfinite, times)):
            raise InvalidInput("cursor", "is not a cursor that a page returned")
        return found

    @property
    def text(self) -> str:
        """The cursor as a page returns it."""
        return urlsafe_b64encode(msgspec.json.encode(self)).decode()


async def read_ended(view: View, after: str | None, limit: int) -> EndedPage:
    """The next failed and cancelled jobs."""
    cursor = None if after is None else EndedCursor.read(after)
    if cursor is None:
        [first] = await view.all("read_ended", None, -1, 0, 0, None, 0.0, limit, view.now)
        margin = MARGIN_SECONDS if first["first_open"] is None else LONGEST_OPEN_SECONDS
        return EndedPage(jobs=(), cursor=EndedCursor(_examined(first, first["now"] - margin)).text, more=False)
    seen = cursor.seen
    at = (seen.since, -1)
    every: float | None = EXAMINED_SECONDS
    if cursor.following is not None:
        # Another page of the same pass.
        at, every = (cursor.finished_at, cursor.seq), None
    first, *rows = await view.all("read_ended", *at, seen.oldest, seen.newest, seen.examined_at, every, limit, view.now)
    if seen.newest > first["newest"]:
        # The cursor is from another server, which had assigned higher numbers: `read_ended` has searched all jobs.
        seen = Snapshot(0.0, 0, first["newest"], first["now"], first["newest"])
        cursor = EndedCursor(seen)
    following = cursor.following or _following(seen, first)
    page, more = rows[:limit], len(rows) > limit
    end = EndedCursor(seen, following, page[-1]["finished_at"], page[-1]["seq"]) if more else EndedCursor(following)
    jobs = readable("job that ended", lambda row: ended_of(tuple(row)[1:9]), page)
    return EndedPage(jobs=tuple(jobs), cursor=end.text, more=more)


def _following(before: Snapshot, first: Record) -> Snapshot:
    """The snapshot of a page that follows one with the snapshot `before`."""
    if first["last_given"] is None:
        return msgspec.structs.replace(before, oldest=first["oldest"], newest=first["newest"])
    since = before.since
    if first["first_open"] is None:
        since = first["now"] - MARGIN_SECONDS
    elif first["first_open"] > before.last_given:
        # Every open transaction began to write after the previous examination.
        since = before.examined_at - MARGIN_SECONDS
    return _examined(first, since)


def _examined(first: Record, since: float) -> Snapshot:
    return Snapshot(since, first["oldest"], first["newest"], first["now"], first["last_given"])
