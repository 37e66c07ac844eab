"""A server that stops, dies, freezes or closes connections: no call hangs, and calls work again when it is back."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager

import pytest

from fairlane.errors import FairlaneError, StoreUnavailable
from fairlane.store.postgresql import database as module
from fairlane.store.postgresql.address import parse
from fairlane.store.postgresql.database import Connection, Database
from fairlane.store.shared import deadlines
from tests.servers.installation import system, wheel
from tests.servers.postgresql import Server, own_server

pytestmark = pytest.mark.anyio
VERSIONS = [name for name, found in (("wheel", wheel()), ("system", system())) if found is not None] or ["any"]
SLEEP = "SELECT pg_sleep(30), 'in the middle'"


@pytest.fixture(scope="module", params=VERSIONS)
def mine(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that may be stopped and killed."""
    with own_server(request.param, durable=False) as started:
        yield started


@pytest.fixture
async def database(mine: Server) -> AsyncIterator[Database]:
    if mine.pid is None:
        mine.start()
    opened = Database(parse(mine.url + "?pool=3"))
    yield opened
    await opened.close()


async def pid(database: Database) -> int:
    row = await database.fetchrow("SELECT pg_backend_pid() AS pid")
    assert row is not None
    return int(row["pid"])


async def all_in_use(database: Database) -> set[int]:
    """Use every connection of the pool at once."""
    rows = await asyncio.gather(
        *(database.fetchrow("SELECT pg_backend_pid() AS pid, pg_sleep(0.05)") for _ in range(3))
    )
    return {row["pid"] for row in rows if row is not None}


async def failure(database: Database) -> FairlaneError:
    with pytest.raises(FairlaneError) as caught:
        await database.execute("SELECT 1")
    return caught.value


async def begun(database: Database) -> asyncio.Task[str]:
    """A call that the server is busy with."""
    call = asyncio.create_task(database.execute(SLEEP))
    async with asyncio.timeout(5):
        while not await database.fetch(
            "SELECT FROM pg_stat_activity WHERE query = $1 AND wait_event = 'PgSleep'", SLEEP
        ):
            await asyncio.sleep(0.01)
    return call


async def told_soon(call: asyncio.Task[str], within: float = 1.0) -> StoreUnavailable:
    started = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        await asyncio.wait_for(call, 10)
    assert time.monotonic() - started < within
    return caught.value


@pytest.mark.parametrize("busy", [True, False], ids=["busy loop", "idle loop"])
@pytest.mark.parametrize("end", ["stop", "abort", "kill"])
async def test_a_restart_while_idle_causes_no_error(mine: Server, database: Database, end: str, busy: bool) -> None:
    before = await all_in_use(database)
    if busy:
        # The event loop is blocked meanwhile, so it has noticed nothing when the next call is made.
        getattr(mine, end)()
        mine.start()
    else:
        await asyncio.to_thread(getattr(mine, end))
        await asyncio.to_thread(mine.start)
    after = await all_in_use(database)

    assert (len(before), len(after)) == (3, 3)
    assert not before & after


async def test_a_snapshot_after_a_restart_causes_no_error(mine: Server, database: Database) -> None:
    async with database.snapshot(), database.snapshot(), database.transaction():
        pass
    mine.restart()
    async with database.snapshot() as view:
        assert await view.fetchval("SELECT 1") == 1
    assert len(await all_in_use(database)) == 3


@pytest.mark.parametrize("end", ["stop", "abort", "kill"])
async def test_a_call_in_progress_fails_at_once_and_the_next_one_works(
    mine: Server, database: Database, end: str
) -> None:
    call = await begun(database)
    await asyncio.to_thread(getattr(mine, end))
    await told_soon(call)
    await asyncio.to_thread(mine.start)

    assert await pid(database)


async def test_a_connection_that_was_ended_while_idle_is_not_used(mine: Server, database: Database) -> None:
    admin = Database(parse(mine.url))
    for _ in range(5):
        ended = await pid(database)
        await admin.execute("SELECT pg_terminate_backend($1, 5000)", ended)
        assert await pid(database) != ended
    await admin.close()


async def test_a_connection_whose_end_was_announced_is_not_used(database: Database) -> None:
    # The message of the server has arrived, and the end of the connection has not.
    body = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
    for _ in range(3):
        ended = await pid(database)
        [pool] = database._pools.values()
        [(connection, _)] = pool._kept
        connection._protocol.data_received(b"E" + struct.pack("!i", 4 + len(body)) + body)
        assert await pid(database) != ended


async def test_a_connection_that_was_ended_in_the_middle(mine: Server, database: Database) -> None:
    call = await begun(database)
    await database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = $1 AND pid <> pg_backend_pid()", SLEEP
    )
    error = await told_soon(call)

    assert "Repeating the call is safe" in str(error)
    assert len(await all_in_use(database)) == 3


async def test_a_snapshot_or_transaction_that_loses_its_connection(mine: Server, database: Database) -> None:
    async def lose(block: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
        async with block() as connection:
            mine = await connection.fetchval("SELECT pg_backend_pid()")
            await database.execute("SELECT pg_terminate_backend($1, 5000)", mine)
            await connection.fetch("SELECT 1")

    for block in (database.snapshot, database.transaction):
        with pytest.raises(StoreUnavailable):
            await lose(block)
        assert await pid(database)


async def test_calls_during_an_outage_fail_fast_and_cost_little(mine: Server, database: Database) -> None:
    await all_in_use(database)
    mine.stop()
    started, used = time.monotonic(), time.process_time()
    errors = [await failure(database) for _ in range(200)]
    took, used = time.monotonic() - started, time.process_time() - used
    mine.start()

    assert {type(error) for error in errors} == {StoreUnavailable}
    assert took < 20
    assert used < 2
    async with asyncio.timeout(30):
        while True:
            try:
                assert await pid(database)
                return
            except StoreUnavailable:
                await asyncio.sleep(0.02)


async def test_a_frozen_server_is_noticed(mine: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "CALL_SECONDS", 0.5)
    database = Database(parse(mine.url + "?pool=2&connect_timeout=1"))
    await pid(database)
    with mine.frozen():
        started = time.monotonic()
        assert type(await failure(database)) is StoreUnavailable
        assert time.monotonic() - started < 5
        # The connection is still taken up with the call that was given up, and a new one is not answered.
        assert type(await failure(database)) is StoreUnavailable
        assert time.monotonic() - started < 8
    async with asyncio.timeout(5):
        while True:
            try:
                assert await pid(database)
                break
            except StoreUnavailable:
                await asyncio.sleep(0.05)
    await database.close()


async def test_a_cancelled_call_does_not_wait_for_a_frozen_server(mine: Server, database: Database) -> None:
    await pid(database)
    with mine.frozen():
        call = asyncio.create_task(database.execute("SELECT 1"))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - started < 5
    assert await pid(database)


async def test_closing_does_not_wait_for_a_frozen_server(mine: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSING_SECONDS", 0.3)
    database = Database(parse(mine.url))
    await pid(database)
    with mine.frozen():
        call = asyncio.create_task(database.execute("SELECT 1"))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await database.close()
        assert time.monotonic() - started < 8
        with pytest.raises(StoreUnavailable):
            await call
