"""Behind a pooler that gives every transaction another session of the server, and lets none remember anything.

What stands in these modules of the suite holds there too: turns, broadcasts, releases and finishing use every kind of
statement there is. And a worker works there by polling alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fairlane import Fairlane, Intervals, Settings
from fairlane.store.clock import ManualClock
from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql.store import PostgresqlStore
from tests.conformance import test_broadcast, test_finish, test_releases, test_turns
from tests.conformance.kit import Kit
from tests.servers.pooler import Pooler, pooled
from tests.servers.postgresql import server

for _module in (test_broadcast, test_finish, test_releases, test_turns):
    globals().update({name: test for name, test in vars(_module).items() if name.startswith("test_")})


@pytest.fixture
def pooler() -> Iterator[Pooler]:
    url = server().fresh_database()
    with pooled(url) as made:
        yield made
    server().done(url)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(pooler: Pooler, clock: ManualClock) -> AsyncIterator[PostgresqlStore]:
    opened = await PostgresqlStore.open(pooler.url + "?listen=off", clock=clock)
    yield opened
    await opened.close()


@pytest.fixture
def kit(store: PostgresqlStore, clock: ManualClock) -> Kit:
    return Kit(store, clock)


def application(url: str) -> tuple[Fairlane, Any]:
    app = Fairlane(settings=Settings(url=url, intervals=Intervals().scaled(0.1)))
    app.queue("default").lane("one:*", limit=1)

    @app.task(name="double")
    async def double(number: int) -> int:
        return 2 * number

    return app, double


async def test_the_transactions_of_one_client_go_to_several_sessions(pooler: Pooler) -> None:
    """Without this the module would test nothing."""
    connection = await driver().connect(pooler.url, statement_cache_size=0)
    sessions = {await connection.fetchval("SELECT pg_backend_pid()") for _ in range(6)}
    await connection.execute("SET application_name = 'mine'")
    names = {await connection.fetchval("SHOW application_name") for _ in range(6)}
    await connection.close()

    assert len(sessions) == 3
    assert "mine" not in names


async def test_a_worker_does_jobs_of_every_kind_by_polling_alone(pooler: Pooler) -> None:
    app, double = application(pooler.url + "?listen=off")
    worker = app.worker(slots=4)
    running = asyncio.create_task(worker.run())
    handles = [await double.enqueue(number) for number in range(10)]
    handles += await app.enqueue_many([double.options(lane=f"one:{n % 2}").call(n) for n in range(10, 20)])
    handles += [
        await double.options(delay=0.3).enqueue(20),
        await double.options(sticky="k").enqueue(21),
        await double.options(unique="u").enqueue(22),
        await double.options(priority="high", expires=60).enqueue(23),
    ]
    async with asyncio.timeout(30):
        results = [await handle.result() for handle in handles]
        worker.stop()
        await running
    recount = await app.client.recount()
    await app.close()

    assert results == [2 * number for number in range(24)]
    assert recount.differences == ()
    assert max(len(sessions) for sessions in pooler.sessions.values()) == 3


async def test_jobs_are_stored_in_a_transaction_of_the_user(pooler: Pooler) -> None:
    app, double = application(pooler.url + "?listen=off")
    connection = await driver().connect(pooler.url, statement_cache_size=0)
    async with connection.transaction():
        [kept] = await app.enqueue_on(connection, double.call(1))
    undone = connection.transaction()
    await undone.start()
    [lost] = await app.enqueue_on(connection, double.call(2))
    await undone.rollback()
    found = await app.client.find()
    await connection.close()
    await app.close()

    assert [job.id for job in found.jobs] == [kept.id]
    assert lost.id != kept.id
