"""The verbs of the store that only read: each is one statement, and waits for no writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ... import listings
from ...binding import Binding
from ...job import Job
from ...listings import (
    FailureGroup,
    LaneListing,
    LanePage,
    LanesCursor,
    LineCursor,
    check_failures,
    check_lane,
)
from ...reading import DeclinedTask, Filter, Page, QueueReading, Standing, check_page
from ...schedule import StoredSchedule
from ...session import Session, Term
from ...tokens import AccessToken
from ..token_rows import token_of
from . import lane_lines, standings, views


class Reader(ABC):
    """Reads the records of a schema."""

    @abstractmethod
    def _view(self) -> views.View:
        """The schema at this moment."""

    async def schedules(self) -> list[StoredSchedule]:
        return await views.schedules(self._view())

    async def leader(self) -> Term | None:
        return await views.leader(self._view())

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        return await views.get(self._view(), ids)

    async def find(self, where: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        return await views.find(self._view(), where, limit, cursor)

    async def standing(self, ids: Sequence[str]) -> list[Standing | None]:
        return await standings.standings(self._view(), ids)

    async def queues(self) -> list[QueueReading]:
        return await views.queues(self._view())

    async def lanes(self, queue: str, *, limit: int = 100, cursor: str | None = None) -> LaneListing:
        return await views.lanes(self._view(), queue, limit, LanesCursor.read(cursor))

    async def lane_line(self, queue: str, lane: str | None, *, limit: int = 50, cursor: str | None = None) -> LanePage:
        check_lane(queue, lane)
        check_page(limit)
        return await lane_lines.lane_line(self._view(), queue, lane, limit, LineCursor.read(cursor))

    async def declined(self, *, limit: int = 100) -> list[DeclinedTask]:
        return await views.declined(self._view(), limit)

    async def failures(
        self, *, queue: str | None = None, task: str | None = None, limit: int = 50
    ) -> list[FailureGroup]:
        check_failures(queue, task)
        check_page(limit)
        most = listings.MOST_FAILURES
        rows = await self._view().all("read_failures", queue, task, limit, most, listings.ERROR_TAIL)
        return [FailureGroup.of(tuple(row)[:-1], exact=row["exact"]) for row in rows]

    async def sessions(self) -> list[Session]:
        return await views.sessions(self._view())

    async def bindings(self, pool: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Binding]:
        return await views.bindings(self._view(), pool, key, limit)

    async def tokens(self) -> list[AccessToken]:
        return [token_of(row) for row in await self._view().all("read_tokens")]
