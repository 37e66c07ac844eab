"""The verbs of the store that only read: each is one statement, and waits for no writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ...model import listings
from ...model.binding import Binding
from ...model.ended import EndedPage, check_ended
from ...model.job import Job
from ...model.listings import FailureGroup, LaneListing, LanePage, LanesCursor, LineCursor, check_failures, check_lane
from ...model.reading import DeclinedTask, Filter, JobPosition, Page, QueueReading, check_page
from ...model.schedule import StoredSchedule
from ...model.session import Session, Term
from ...model.tokens import AccessToken
from ..shared.token_rows import token_of
from . import ended, lane_order, positions, reading


class Reader(ABC):
    """Reads the records of a schema."""

    @abstractmethod
    def _view(self) -> reading.View:
        """A view of the schema at the time of the clock."""

    async def schedules(self) -> list[StoredSchedule]:
        return await reading.schedules(self._view())

    async def leader(self) -> Term | None:
        return await reading.leader(self._view())

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        return await reading.get(self._view(), ids)

    async def find(self, where: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        return await reading.find(self._view(), where, limit, cursor)

    async def positions(self, ids: Sequence[str]) -> list[JobPosition | None]:
        return await positions.read_positions(self._view(), ids)

    async def queues(self) -> list[QueueReading]:
        return await reading.queues(self._view())

    async def lanes(self, queue: str, *, limit: int = 100, cursor: str | None = None) -> LaneListing:
        return await reading.lanes(self._view(), queue, limit, LanesCursor.read(cursor))

    async def lane_line(self, queue: str, lane: str | None, *, limit: int = 50, cursor: str | None = None) -> LanePage:
        check_lane(queue, lane)
        check_page(limit)
        return await lane_order.lane_line(self._view(), queue, lane, limit, LineCursor.read(cursor))

    async def declined(self, *, limit: int = 100) -> list[DeclinedTask]:
        return await reading.declined(self._view(), limit)

    async def failures(
        self, *, queue: str | None = None, task: str | None = None, limit: int = 50
    ) -> list[FailureGroup]:
        check_failures(queue, task)
        check_page(limit)
        most = listings.MOST_FAILURES
        rows = await self._view().all("read_failures", queue, task, limit, most, listings.ERROR_TAIL)
        return [FailureGroup.of(tuple(row)[:-1], exact=row["exact"]) for row in rows]

    async def ended(self, after: str | None, *, limit: int = 1_000) -> EndedPage:
        return await ended.read_ended(self._view(), after, check_ended(limit))

    async def sessions(self) -> list[Session]:
        return await reading.sessions(self._view())

    async def bindings(self, pool: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Binding]:
        return await reading.bindings(self._view(), pool, key, limit)

    async def tokens(self) -> list[AccessToken]:
        return [token_of(row) for row in await self._view().all("read_tokens")]
