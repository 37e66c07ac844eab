"""Follows the jobs that end as failed or cancelled, for an integration that records such ends outside of the store.

Any process may do so, and several at once: the feed reads only. Nothing wakes it, because ends that no process works
for (an expiry, a cancel, a crash) are announced to those alone that wait for that job. So it polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from random import Random

from ..errors import InvalidInput
from ..manager.service import JITTER, FailureTracker
from ..model.ended import EndedJob, EndedPage
from ..store.port import Store

logger = logging.getLogger("fairlane.runtime.ended_feed")
POLL_SECONDS = 1.0
PAGE = 200
MOST_REMEMBERED = 10_000
"""Ends that the feed remembers, to leave out those that the store returns again."""


class EndedFeed:
    """Yields pages of jobs that ended, as they end. Belongs to one event loop, and ends by cancellation only.

    It begins behind `cursor`, or at the present. The end of a job comes at least once: usually once, but again after a
    restart from an earlier cursor, and in the cases that `Store.ended` names. To survive a restart without a gap, store
    `page.cursor` after the jobs of that page are recorded.
    """

    def __init__(
        self, store: Store, *, cursor: str | None = None, poll: float = POLL_SECONDS, rng: Random | None = None
    ) -> None:
        self._store = store
        self._cursor = cursor
        self._poll = poll
        self._rng = rng or Random()
        self._failures = FailureTracker("following ended jobs", logger, self._rng)
        self._rests = False
        self._returned: dict[tuple[str, float], None] = {}

    @property
    def cursor(self) -> str | None:
        """Continues behind all that was returned; None until the feed has begun."""
        return self._cursor

    async def begin(self) -> str:
        """Take the present as the beginning, unless there is a cursor, and return it. Waits until the store answers."""
        if self._cursor is None:
            self._cursor = (await self._read()).cursor
        return self._cursor

    async def next(self) -> EndedPage:
        """Wait until jobs have ended, and return them. Raises `InvalidInput` for a cursor of another store."""
        await self.begin()
        while True:
            if self._rests:
                await asyncio.sleep(self._poll * (1 - JITTER * self._rng.random()))
            page = await self._read()
            self._cursor = page.cursor
            self._rests = not page.more
            jobs = tuple(job for job in page.jobs if self._is_new(job))
            if jobs:
                return EndedPage(jobs=jobs, cursor=page.cursor, more=page.more)

    async def __aiter__(self) -> AsyncGenerator[EndedPage, None]:
        while True:
            yield await self.next()

    async def _read(self) -> EndedPage:
        while True:
            try:
                page = await self._store.ended(self._cursor, limit=PAGE)
            except InvalidInput:
                raise
            except Exception as exc:
                await asyncio.sleep(self._failures.failed(exc))
            else:
                self._failures.worked()
                return page

    def _is_new(self, job: EndedJob) -> bool:
        # With the time, because the id of a job that was forgotten may be used again.
        end = (job.id, job.finished_at)
        if end in self._returned:
            return False
        self._returned[end] = None
        if len(self._returned) > MOST_REMEMBERED:
            del self._returned[next(iter(self._returned))]
        return True
