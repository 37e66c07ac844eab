"""The feed of ended jobs on PostgreSQL, where transactions become visible in another order than that of their times."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql.ended import EndedCursor
from fairlane.store.postgresql.statements import placed
from tests.conformance.kit import Kit
from tests.servers.stores import KINDS, EmptyStores, empty_stores

pytestmark = pytest.mark.anyio
CANCEL = placed("SELECT * FROM fairlane.cancel($1, $2, $3)", "fairlane")
HOUR = 3_600.0


@pytest.fixture
def stores(tmp_path: Path) -> Any:
    """Empty stores."""
    with empty_stores(KINDS[1], tmp_path) as given:
        yield given


@pytest.fixture
def url(stores: EmptyStores) -> str:
    """The URL of an empty store."""
    return stores.next()


@pytest.fixture
def clock() -> ManualClock:
    """The clock of the store."""
    return ManualClock()


@pytest.fixture
async def store(url: str, clock: ManualClock) -> AsyncIterator[Store]:
    """An empty store."""
    opened = await open_store(url, clock=clock)
    yield opened
    await opened.close()


@pytest.fixture
def kit(store: Store, clock: ManualClock) -> Kit:
    """The store with short words."""
    return Kit(store, clock)


@pytest.fixture
async def connection(url: str) -> AsyncIterator[Any]:
    """Another connection to the same database."""
    opened = await driver().connect(url)
    yield opened
    await opened.close()


class Reader:
    """Reads the feed to its end."""

    def __init__(self, kit: Kit, limit: int) -> None:
        self.kit = kit
        self.limit = limit
        self.cursor: str | None = None

    async def ids(self) -> list[str]:
        """The ids of what the store returns, repetitions included."""
        found: list[str] = []
        more = True
        while more:
            page = await self.kit.store.ended(self.cursor, limit=self.limit)
            found += [job.id for job in page.jobs]
            self.cursor, more = page.cursor, page.more
        return found


async def cancel_with(connection: Any, kit: Kit, *ids: str) -> None:
    """Cancel jobs on a connection that a test holds open, with the present time of the store."""
    now = kit.clock.now()
    await connection.fetch(CANCEL, list(ids), now, now)


async def two_jobs(kit: Kit) -> None:
    """Two jobs in queues of their own, so that neither end waits for the other."""
    await kit.enqueue(id="early", queue="one")
    await kit.enqueue(id="late", queue="two")


@pytest.mark.parametrize("limit", [1, 100])
@pytest.mark.parametrize("within_savepoint", [False, True])
@pytest.mark.parametrize("seconds", [0.5, 30.0, 3 * HOUR])
async def test_an_end_that_becomes_visible_later_than_a_younger_one_is_found(
    kit: Kit, connection: Any, seconds: float, within_savepoint: bool, limit: int
) -> None:
    feed = Reader(kit, limit)
    await feed.ids()
    await two_jobs(kit)
    transaction = connection.transaction()
    await transaction.start()
    if within_savepoint:
        # What a subtransaction writes has a number that no snapshot names.
        async with connection.transaction():
            await cancel_with(connection, kit, "early")
    else:
        await cancel_with(connection, kit, "early")
    kit.clock.advance(seconds)
    await kit.store.cancel(["late"])

    assert await feed.ids() == ["late"]
    for _ in range(3):
        kit.clock.advance(seconds)
        assert set(await feed.ids()) <= {"late"}
    await transaction.commit()
    kit.clock.advance(seconds)
    assert "early" in await feed.ids()
    assert await feed.ids() == []


async def test_an_end_that_is_open_when_a_reader_begins_is_found(kit: Kit, connection: Any) -> None:
    await two_jobs(kit)
    feed = Reader(kit, 100)
    async with connection.transaction():
        await cancel_with(connection, kit, "early")
        kit.clock.advance(600)
        assert await feed.ids() == []
    kit.clock.advance(600)

    assert await feed.ids() == ["early"]


async def test_an_end_that_becomes_visible_between_two_pages_is_found(kit: Kit, connection: Any) -> None:
    feed = Reader(kit, 100)
    await feed.ids()
    await two_jobs(kit)
    ids = [await kit.enqueue(queue="two") for _ in range(5)]
    transaction = connection.transaction()
    await transaction.start()
    await cancel_with(connection, kit, "early")
    kit.clock.advance(1)
    await kit.store.cancel(ids)
    first = await kit.store.ended(feed.cursor, limit=2)
    await transaction.commit()
    feed.cursor = first.cursor

    assert {job.id for job in first.jobs} | set(await feed.ids()) == set(ids)
    assert "early" in await feed.ids()


async def test_what_is_rolled_back_did_not_end(kit: Kit, connection: Any) -> None:
    feed = Reader(kit, 100)
    await feed.ids()
    await two_jobs(kit)
    transaction = connection.transaction()
    await transaction.start()
    await cancel_with(connection, kit, "early")
    await transaction.rollback()
    await kit.store.cancel(["late"])

    assert await feed.ids() == ["late"]


async def test_an_open_transaction_makes_the_feed_repeat_itself_and_its_end_stops_that(
    kit: Kit, connection: Any
) -> None:
    feed = Reader(kit, 100)
    await feed.ids()
    await two_jobs(kit)
    async with connection.transaction():
        await connection.execute("CREATE TABLE unrelated ()")
        await kit.store.cancel(["late"])
        assert [await feed.ids(), await feed.ids()] == [["late"], ["late"]]
    assert await feed.ids() == ["late"]
    assert await feed.ids() == []


async def test_the_search_begins_a_minute_ago_however_long_ago_the_feed_began(kit: Kit) -> None:
    feed = Reader(kit, 100)
    for _ in range(3):
        kit.clock.advance(HOUR)
        await feed.ids()
        assert feed.cursor is not None
        # Other databases of the server may have a transaction open: then the search begins before the page before.
        assert kit.clock.now() - EndedCursor.read(feed.cursor).seen.since <= HOUR + 60


async def test_a_cursor_of_a_server_with_more_transactions_returns_everything(kit: Kit) -> None:
    feed = Reader(kit, 1)
    await feed.ids()
    await two_jobs(kit)
    await kit.store.cancel(["early", "late"])
    kit.clock.advance(HOUR)
    assert await feed.ids() == ["early", "late"]
    assert feed.cursor is not None
    seen = EndedCursor.read(feed.cursor).seen
    ahead = msgspec.structs.replace(seen, oldest=2**60, newest=2**61, since=kit.clock.now())
    feed.cursor = EndedCursor(ahead).text

    assert await feed.ids() == ["early", "late"]
    assert await feed.ids() == []
